"""One incarnation of one worker under watch: what a tick asks, and what follows from the answers.

A tick returns findings and writes nothing; writing them is ``service``'s work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from monitor.credentials import target_of
from monitor.detect import detect, owner
from monitor.lifecycle import Lifecycle
from monitor.limiting import Limiter
from monitor.probe import Form, Verdict
from monitor.rates import RateMeter
from monitor.readiness import check
from monitor.reading import Gauges, Reading, read_load
from monitor.rebirth import Identity
from monitor.stall import StallWatch
from workers.breaker import BreakerState
from workers.credentials import MissingKeyError
from workers.fleet import WorkerState, WorkerView
from workers.limits import PRESS, LimitDecision, memory_full
from workers.load import Load, LoadSource
from workers.spec import Runtime

if TYPE_CHECKING:
    import httpx

    from monitor.http import Target
    from monitor.readiness import Readiness
    from monitor.settings import MonitorSettings

log = structlog.get_logger()

_LOOK_SHARE = 0.5
"""A look at a ready worker that hangs leaves this part of the time to its load."""
EAGER_POLLS = 3
"""After a change of the limit so many polls follow soon: more leases come, and show what it holds."""


@dataclass(frozen=True, slots=True)
class StateFinding:
    """The worker's state, and what it said of itself; None leaves what is known.

    ``note`` says what is amiss with its load; empty: nothing, or it was not asked for.
    """

    state: WorkerState
    reason: str
    models: tuple[str, ...] | None = None
    max_model_len: int | None = None
    runtime: Runtime | None = None
    version: str | None = None
    note: str = ""

    @property
    def why(self) -> str:
        """The reason and the note, for people."""
        return f"{self.reason}; {self.note}" if self.note else self.reason

    def over(self, before: StateFinding | None) -> StateFinding:
        """The same, with what was said before in place of what is not said now."""
        if before is None:
            return self
        return replace(
            self,
            models=before.models if self.models is None else self.models,
            max_model_len=before.max_model_len if self.max_model_len is None else self.max_model_len,
            runtime=self.runtime or before.runtime,
            version=self.version or before.version,
        )


@dataclass(frozen=True, slots=True)
class Findings:
    """What one tick found out, in the order in which it is to be written; None: nothing of that kind.

    ``reborn`` says why this must be another life of the worker; then ``state`` is of the next incarnation and
    nothing else is there. ``absent`` is the reason of a memo to set; ``available`` says that one may go.
    ``limit`` is there only when it changes. ``fast``: poll again soon.
    """

    reborn: str | None = None
    state: StateFinding | None = None
    absent: str | None = None
    available: bool = False
    load: Load | None = None
    limit: LimitDecision | None = None
    stalled: bool = False
    fast: bool = False


class Watch:
    """The memory of one incarnation; belongs to one task."""

    def __init__(
        self,
        view: WorkerView,
        settings: MonitorSettings,
        client: httpx.AsyncClient,
        *,
        now: Callable[[], float],
        environ: Mapping[str, str],
        reborn: bool = False,
    ) -> None:
        """``now`` gives Redis' clock, in seconds. ``reborn``: nothing stored is of this incarnation."""
        self.incarnation = view.incarnation
        self._settings = settings
        self._client = client
        self._now = now
        self._environ = environ
        self._policy = settings.limit_policy()
        self._form = Form.SECTIONS
        self._gauges = Gauges(view.runtime, view.id, settings.mappings)
        self._used: object = None
        self._detected = False
        self._doubt = False
        self._amiss: str | None = None
        """What was amiss with the last reading; empty: nothing; None: there was none yet."""
        self._eager = 0
        """Polls that are still made soon because the limit changed."""
        self._identity = Identity() if reborn else Identity(view.load, view.version)
        self._lifecycle = Lifecycle(settings.readiness_interval_s, settings.unready_after)
        self._readiness = view.reason
        self._known: StateFinding | None = None
        """All that was found out of its state so far."""
        self._written: StateFinding | None = None
        self._meter = RateMeter()
        self._stall = StallWatch(settings.stall_after_s)
        self._limiter = Limiter(self._policy)

    def state_was_written(self, finding: StateFinding) -> None:
        """The finding stands in Redis: it is no news any more."""
        self._written = finding

    @property
    def learns(self) -> bool:
        """Whether the limit is still being learned, so that the next sample matters soon."""
        return self._limiter.hurries

    async def tick(self, view: WorkerView, *, memo: bool) -> Findings:
        """One poll within one budget. ``view`` is older than the tick; ``memo``: one stands for this life."""
        began_at = asyncio.get_running_loop().time()
        deadline = began_at + self._settings.poll_budget_s
        try:
            target = target_of(view, self._environ)
        except MissingKeyError as error:
            return Findings(state=self._news(view, StateFinding(WorkerState.UNREADY, str(error))))
        state = StateFinding(view.state, self._readiness)
        memo = memo and not self._doubt
        if self._doubt or self._lifecycle.due(view.state, self._now()):
            look_by = deadline
            if view.state is WorkerState.READY:
                look_by = began_at + _LOOK_SHARE * self._settings.poll_budget_s
            state, reborn = await self._look(view, target, look_by)
            if reborn is not None:
                return Findings(reborn=reborn, state=state)
        if state.state is not WorkerState.READY:
            return Findings(state=self._news(view, state))
        return await self._read(view, target, state, memo=memo, deadline=deadline)

    # -- readiness and runtime ----------------------------------------------------------------------------

    async def _look(
        self, view: WorkerView, target: Target, deadline: float
    ) -> tuple[StateFinding, str | None]:
        """The state that follows from a look, and why this is another life, if it is."""
        self._detected, self._doubt = self._detected and not self._doubt, False
        found = await check(self._client, target, deadline=deadline)
        now_s = self._now()
        state = self._lifecycle.next_state(view.state, found, now_s)
        self._readiness = found.reason
        finding = StateFinding(state, found.reason, found.models, found.max_model_len)
        if state is not WorkerState.READY:
            # It may come back as something else.
            self._detected = False
        if not found.ready or (self._detected and not _changed(view, owner(found.models_answer))):
            return finding, None
        return await self._identify(view, target, found, finding, deadline)

    async def _identify(
        self, view: WorkerView, target: Target, found: Readiness, finding: StateFinding, deadline: float
    ) -> tuple[StateFinding, str | None]:
        detected = await detect(self._client, target, found.models_answer, deadline=deadline)
        self._detected = detected.runtime not in (None, Runtime.GENERIC)
        if self._gauges.runtime is None and detected.runtime is not None:
            self._gauges = Gauges(detected.runtime, view.id, self._settings.mappings)
        finding = replace(finding, runtime=detected.runtime, version=detected.version)
        return finding, _changed(view, detected.runtime) or self._identity.meet_version(detected.version)

    def _news(self, view: WorkerView, finding: StateFinding) -> StateFinding | None:
        """All that is known with this finding, unless it was written before and still stands."""
        known = self._known = finding.over(self._known)
        stands = view.state is known.state and not _models_lost(view, known)
        return None if stands and known == self._written else known

    # -- load ---------------------------------------------------------------------------------------------

    async def _read(
        self, view: WorkerView, target: Target, state: StateFinding, *, memo: bool, deadline: float
    ) -> Findings:
        reading = await read_load(
            self._client,
            target,
            self._gauges,
            form=self._form,
            memo=memo,
            models=view.models,
            deadline=deadline,
            sent_s=self._now(),
        )
        self._form = reading.form
        self._log(view, reading)
        found = Findings(
            state=self._news(view, replace(state, note=_note(reading))),
            absent=_absence(reading),
            available=reading.verdict is not None and reading.verdict.verdict is Verdict.AVAILABLE,
        )
        if reading.load is None:
            if reading.unreached:
                self._lifecycle.look_soon()
            blind = self._limiter.decide_blind(view, self._now())
            return replace(found, limit=_change(view, blind), fast=self._doubts(reading))
        after_gap, self._amiss = self._amiss != "", ""
        # What the gap hid may be another life, which the memo is not of.
        self._doubt = memo and after_gap and not self._identity.can_tell(reading.load)
        if (reborn := self._identity.meet(reading.load)) is not None:
            return Findings(reborn=reborn)
        return self._conclude(view, reading.load, found)

    def _doubts(self, reading: Reading) -> bool:
        """Whether all that is known of the worker has to be asked anew: something else is amiss than before.

        It may have restarted between two polls, as something else; a memo would hide what it serves now.
        """
        # The probe's part changes with the memo alone.
        amiss = reading.page_reason or reading.reason
        self._doubt, self._amiss = amiss != self._amiss, amiss
        return self._doubt

    def _conclude(self, view: WorkerView, load: Load, found: Findings) -> Findings:
        """What a fresh load leads to: rates, limit, stall."""
        pressed = presses(view)
        loaded = pressed or bool(load.waiting) or memory_full(load.kv_usage_max, self._policy)
        rates = self._meter.add(load, loaded=loaded)
        limit = _change(view, self._limiter.decide(view, load))
        self._eager = EAGER_POLLS if limit is not None else max(0, self._eager - 1)
        return replace(
            found,
            load=load.model_copy(
                update={
                    "drain_rate": rates.drain_rate,
                    "token_rate": rates.token_rate,
                    "capacity_rate": rates.capacity_rate,
                }
            ),
            limit=limit,
            stalled=self._stalled(view, load),
            # Gauges cost more than /v1/loads: they are read so often only where that helps. The leases that a
            # new limit allows are not in the next view yet, which is no reason to stop looking.
            fast=(pressed or self._eager > 0) and (load.source is LoadSource.NATIVE or self.learns),
        )

    def _stalled(self, view: WorkerView, load: Load) -> bool:
        live = load.source is LoadSource.NATIVE or self._gauges.live
        stalled = self._stall.add(load, live=live, leases=view.leases, now_s=self._now())
        if stalled or view.breaker is BreakerState.OPEN:  # the trial that follows gets the whole time
            self._stall.forgive()
        return stalled and view.breaker is not BreakerState.OPEN  # in a half-open one the trial stands still

    def _log(self, view: WorkerView, reading: Reading) -> None:
        verdict = reading.verdict
        if verdict is not None and verdict.verdict is not Verdict.AVAILABLE:
            log.debug("probe", worker=view.id, verdict=verdict.verdict.value, reason=verdict.reason)
        if reading.reason:
            log.debug("load unknown", worker=view.id, reason=reading.reason)
        if reading.used is not None and reading.used != self._used:
            self._used = reading.used
            log.info("metrics found", worker=view.id, names=sorted(reading.used.values()))


def presses(view: WorkerView) -> bool:
    """Whether leases press against the limit: a larger one would be used."""
    return view.leases >= PRESS * view.limit


def _models_lost(view: WorkerView, known: StateFinding) -> bool:
    """Whether Redis lacks the models that the worker named: a failover may have lost them."""
    return not view.models_given and known.models is not None and view.models != frozenset(known.models)


def _change(view: WorkerView, decision: LimitDecision) -> LimitDecision | None:
    """The decision, if it changes anything."""
    return None if decision.value == view.limit and not decision.anew else decision


def _absence(reading: Reading) -> str | None:
    verdict = reading.verdict
    return verdict.reason if verdict is not None and verdict.verdict is Verdict.ABSENT else None


def _note(reading: Reading) -> str:
    """What a person should know of a reading. The reason of an absence stands in the memo."""
    if reading.load is None:
        return f"load unknown: {reading.reason}" if reading.reason else ""
    verdict = reading.verdict
    inconclusive = verdict is not None and verdict.verdict is Verdict.INCONCLUSIVE
    return f"/v1/loads: {verdict.reason}" if verdict is not None and inconclusive else ""


def _changed(view: WorkerView, detected: Runtime | None) -> str | None:
    """Why a worker that runs something else than before must live another life."""
    if view.runtime_given or None in (view.runtime, detected):
        return None
    if detected is Runtime.GENERIC or detected is view.runtime:
        return None
    return f"its runtime changed from {view.runtime} to {detected}"
