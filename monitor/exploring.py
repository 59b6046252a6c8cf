"""How far the limit of a silent worker may grow, by what its answers show. Pure.

A larger limit is tried; it stays if the worker does more in the same time with it. Where it does not, what
was added only waits inside the engine, and the limit goes back. That finds the slots of an engine that has a
number of them, and the batch beyond which a larger one only slows each answer of one that has not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from workers.evidence import Evidence
from workers.limits import DEFAULT_LIMIT, LimitDecision

LEAST_ANSWERS: Final = 16
"""So many answers at least, and as many as the limit, are needed to know a speed: short ones come first."""
STEP: Final = 1.5
"""How many times larger the next limit is that is tried."""
WORTH_IT: Final = 0.25
"""The part of what was added that must show as work done. 1: none of it waited in the engine.

Not more: an engine that writes each answer the slower the fuller it is has little to show for its last slots.
"""
PAUSE_S: Final = (60.0, 960.0)
"""How long a limit stands after a larger one was no better: first, and at most; twice as long each time."""


@dataclass(slots=True)
class Explorer:
    """One incarnation's memory of what was tried."""

    _best: tuple[int, float] | None = None
    """The largest limit that was worth it, and the tokens per second of one answer with it."""
    _pause_s: float = PAUSE_S[0]
    _quiet_until: float = field(default=0.0)

    def decide(self, limit: int, evidence: Evidence, *, pressed: bool, now_s: float) -> LimitDecision:
        """The limit from now on. ``pressed``: leases fill it. ``evidence`` is of this limit only."""
        speed, wanted = evidence.speed, max(LEAST_ANSWERS, limit)
        if speed is None or evidence.answers < wanted:
            return LimitDecision(limit, f"hold: {evidence.answers} of {wanted} answers that show its speed")
        if self._best is not None and limit > self._best[0] and not _paid(self._best, (limit, speed)):
            return self._back(self._best[0], now_s)
        self._best = (limit, speed)
        if now_s < self._quiet_until:
            return LimitDecision(limit, "hold: a larger one was no better")
        if not pressed:
            return LimitDecision(limit, "hold: leases do not press")
        larger = max(limit + 1, int(STEP * limit))
        return LimitDecision(larger, f"try {larger}: with {limit} an answer has {speed:.3g} tokens/s")

    def refused(self, now_s: float) -> None:
        """The worker refused work: what it had was too much, whatever its answers showed before."""
        self._best = None
        self._rest(now_s)

    def _back(self, limit: int, now_s: float) -> LimitDecision:
        self._rest(now_s)
        return LimitDecision(limit, "back: more at once was no faster")

    def _rest(self, now_s: float) -> None:
        self._quiet_until = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_S[1])


def may_explore(limit: int, slots: int | None) -> bool:
    """Whether answers are all there is to go by: below the usual limit it comes back by itself."""
    return slots is None and limit >= DEFAULT_LIMIT


def _paid(before: tuple[int, float], now: tuple[int, float]) -> bool:
    (limit, speed), (larger, speed_now) = before, now
    gained = (larger * speed_now) / (limit * speed) - 1
    return gained >= WORTH_IT * (larger / limit - 1)
