"""Which workers are given up, so that requests in flight there are called off and go elsewhere. Pure.

That a worker stands still is found out by the monitor; slowness is no reason: what moves keeps its requests.
What being called off means for a request is `outcome`'s subject, how it is done `attempts`'.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.breaker import BreakerState
from workers.fleet import FleetView, WorkerView

STALLED = "stalled"
"""The reason of a breaker that the monitor opened: work, and no token or answer for long."""
_MARGIN_S = 10.0
"""So long before and after a new life is noticed it is not held against anybody. Before: a request may have
been sent to it already. After: two engines behind one address look like a new life with every poll.
"""


@dataclass(frozen=True, slots=True)
class _Life:
    incarnation: int
    since_s: float
    """When it was first seen, on Redis' clock."""
    restarted: bool
    """Whether the worker was seen to have restarted; else somebody registered it."""


class Recall:
    """What one dispatcher has seen of the workers that it sends to."""

    def __init__(self) -> None:
        self._workers: dict[str, WorkerView] = {}
        self._lives: dict[str, _Life] = {}
        self._now_s = 0.0

    def look(self, view: FleetView) -> None:
        """Hear how the fleet stands."""
        self._now_s = view.now_s
        self._workers = {worker.id: worker for worker in view.workers}
        self._lives = {worker.id: self._life(worker) for worker in view.workers}

    def _life(self, worker: WorkerView) -> _Life:
        known = self._lives.get(worker.id)
        if known is not None and known.incarnation == worker.incarnation:
            return known
        return _Life(worker.incarnation, self._now_s, restarted=bool(worker.incarnation_reason))

    def why(self, worker_id: str, granted_s: float, *, trial: bool) -> str | None:
        """Why a request that got its lease before the last look is called off; None: it is not.

        `trial`: it is the one request that a half-open breaker let through, to see whether the worker moves.
        """
        worker = self._workers.get(worker_id)
        if worker is None:
            return "removed"
        if worker.breaker_reason == STALLED and _admitted_before(worker.breaker, trial=trial):
            return STALLED
        life = self._lives[worker_id]
        lasts = life.since_s + _MARGIN_S <= self._now_s
        if life.restarted and lasts and granted_s + _MARGIN_S < life.since_s:
            return "restarted"
        return None


def _admitted_before(breaker: BreakerState, *, trial: bool) -> bool:
    """Whether a request was let through before the breaker opened."""
    match breaker:
        case BreakerState.OPEN:
            return True
        case BreakerState.HALF_OPEN:
            return not trial
        case BreakerState.CLOSED:
            return False
