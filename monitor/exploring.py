"""How far the limit of a silent worker may grow, by what its answers show. Pure.

A larger limit is tried; it stays if the worker does more in the same time with it. Where it does not, what
was added only waits inside the engine, and the limit goes back. From time to time a smaller one is tried as
well, and stays if the worker does as much with it: what was once worth it need not be so for other requests.
A trial is compared with what was measured just before it, since answers differ from hour to hour.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from workers.evidence import NONE, Evidence
from workers.limits import DEFAULT_LIMIT, LimitDecision

LEAST_ANSWERS: Final = 16
"""So many answers at least, and as many as the limit, are needed to know a speed: short ones come first."""
STEP: Final = 1.5
"""How many times larger, or smaller, the next limit is that is tried."""
WORTH_IT: Final = 0.25
"""The part of what was added that must show as work done. 1: none of it waited in the engine.

Not more: an engine that writes each answer the slower the fuller it is has little to show for its last slots.
"""
PAUSE_S: Final = (60.0, 960.0)
"""How long a limit stands after a trial changed nothing: first, and at most; twice as long each time."""
FRESH_S: Final = 120.0
"""A measurement that takes longer is begun anew, a trial that does ends: other requests may run by then."""


class _Step(Enum):
    """What the evidence is about that comes in now."""

    REST = "nothing in particular"
    BASE = "the limit that stands, before a trial"
    TRIAL = "the limit that is tried"


@dataclass(slots=True)
class Explorer:
    """One incarnation's memory of what was tried. ``limit`` is always as it stands in Redis.

    ``adopted``: somebody else has set the limit that it begins with, perhaps for a trial, so a smaller one is
    tried first. Else the worker is new, and all that its answers have shown is fresh.
    """

    adopted: bool = False
    _begun: bool = False
    _step: _Step = _Step.REST
    _since_s: float = 0.0
    """When the step began."""
    _limit: int | None = None
    """What stands if nobody else has set it; None: somebody else has."""
    _base: tuple[int, Evidence] = (0, NONE)
    _upwards: bool = True
    _pause_s: float = PAUSE_S[0]
    _quiet_until: float = 0.0

    def decide(self, limit: int, evidence: Evidence, *, pressed: bool, now_s: float) -> LimitDecision:
        """The limit from now on. ``pressed``: leases fill it. ``evidence``: since it was last written."""
        if limit != self._limit:
            self._begin(limit, now_s)
        match self._step:
            case _Step.REST:
                return self._rested(limit, pressed=pressed, now_s=now_s)
            case _Step.BASE:
                return self._measured(limit, evidence, pressed=pressed, now_s=now_s)
            case _Step.TRIAL:
                return self._tried(limit, evidence, pressed=pressed, now_s=now_s)

    def refused(self, now_s: float) -> None:
        """The worker refused work, so that its limit was cut: nothing is tried for a while."""
        self._rest(None, now_s, upwards=True)

    def _begin(self, limit: int, now_s: float) -> None:
        """Begin with a limit that somebody else has set."""
        first, self._begun = not self._begun, True
        if first and not self.adopted:
            self._step, self._since_s, self._limit = _Step.BASE, now_s, limit
        else:
            self._rest(limit, now_s, upwards=not first)

    def _rested(self, limit: int, *, pressed: bool, now_s: float) -> LimitDecision:
        if now_s < self._quiet_until:
            return LimitDecision(limit, "hold: what was tried last changed nothing")
        if not pressed:
            return LimitDecision(limit, "hold: leases do not press")
        self._step, self._since_s = _Step.BASE, now_s
        return LimitDecision(limit, f"measure what it does with {limit} at once", anew=True)

    def _measured(self, limit: int, evidence: Evidence, *, pressed: bool, now_s: float) -> LimitDecision:
        if not _suffices(limit, evidence):
            if now_s - self._since_s > FRESH_S:
                self._rest(limit, now_s, upwards=self._upwards)
            return LimitDecision(limit, _counting(limit, evidence))
        if not pressed:
            self._rest(limit, now_s, upwards=self._upwards)
            return LimitDecision(limit, "hold: leases do not press")
        return self._try_next(limit, evidence, now_s)

    def _try_next(self, limit: int, evidence: Evidence, now_s: float) -> LimitDecision:
        larger, smaller = max(limit + 1, int(STEP * limit)), max(DEFAULT_LIMIT, int(limit / STEP))
        tried = smaller if not self._upwards and smaller < limit else larger
        self._base, self._upwards = (limit, evidence), tried > limit
        self._step, self._since_s, self._limit = _Step.TRIAL, now_s, tried
        return LimitDecision(tried, f"try {tried}: with {limit} it does {evidence.work:.3g} tokens/s")

    def _tried(self, limit: int, evidence: Evidence, *, pressed: bool, now_s: float) -> LimitDecision:
        before, base = self._base
        if not _suffices(limit, evidence):
            if now_s - self._since_s > FRESH_S:
                self._rest(before, now_s, upwards=self._upwards)
                return LimitDecision(before, f"back from {limit}: too few answers came to know more")
            return LimitDecision(limit, _counting(limit, evidence))
        if self._upwards == _paid(*((base, evidence) if self._upwards else (evidence, base))):
            # It stays, and what was measured of it is what the next one is compared with.
            self._pause_s = PAUSE_S[0]
            if pressed and (self._upwards or limit > DEFAULT_LIMIT):
                return self._try_next(limit, evidence, now_s)
            self._rest(limit, now_s, upwards=self._upwards)
            return LimitDecision(limit, "hold: it was worth it")
        self._pause_s, pause_s = min(2 * self._pause_s, PAUSE_S[1]), self._pause_s
        self._rest(before, now_s, upwards=not self._upwards, pause_s=pause_s)
        why = "no more was done" if limit > before else "less was done"
        return LimitDecision(before, f"back from {limit}: {why}")

    def _rest(self, limit: int | None, now_s: float, *, upwards: bool, pause_s: float = PAUSE_S[0]) -> None:
        self._step, self._since_s, self._limit, self._upwards = _Step.REST, now_s, limit, upwards
        self._quiet_until = now_s + pause_s


def may_explore(limit: int, slots: int | None) -> bool:
    """Whether answers are all there is to go by: below the usual limit it comes back by itself."""
    return slots is None and limit >= DEFAULT_LIMIT


def _suffices(limit: int, evidence: Evidence) -> bool:
    return evidence.answers >= max(LEAST_ANSWERS, limit) and evidence.work > 0


def _counting(limit: int, evidence: Evidence) -> str:
    return f"hold: {evidence.answers} of {max(LEAST_ANSWERS, limit)} answers that show what it does"


def _paid(fewer: Evidence, more: Evidence) -> bool:
    """Whether what was done with more at once was worth it. Where it was not really more, nothing was."""
    added = more.at_once / fewer.at_once - 1
    gained = more.work / fewer.work - 1
    return added > 0 and gained >= WORTH_IT * added
