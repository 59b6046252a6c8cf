"""When a worker's readiness is looked at, and which state follows from what was seen. Pure.

Looking is ``readiness``' work. Draining and removal are a person's decisions and not made here.
"""

from __future__ import annotations

from dataclasses import dataclass

from monitor.readiness import Readiness
from workers.fleet import WorkerState


@dataclass(slots=True)
class Lifecycle:
    """One incarnation's readiness. ``interval_s``: between looks at a ready worker.

    ``unready_after``: failed looks in a row that make it unready; a look that learned nothing counts for
    neither side.
    """

    interval_s: float
    unready_after: int
    _failures: int = 0
    _look_at: float = 0.0

    def due(self, state: WorkerState, now_s: float) -> bool:
        """Whether to look now. A worker that is not ready is looked at in every tick."""
        return state is not WorkerState.READY or now_s >= self._look_at

    def look_soon(self) -> None:
        """Something else failed to reach the worker: look in the next tick."""
        self._look_at = 0.0

    def next_state(self, state: WorkerState, found: Readiness, now_s: float) -> WorkerState:
        """The state after a look: starting -> ready -> unready -> ready; any other stays as it is."""
        if found.ready is not None:
            self._failures = 0 if found.ready else self._failures + 1
        self._look_at = now_s + self.interval_s if found.ready else 0.0
        if state not in (WorkerState.STARTING, WorkerState.READY, WorkerState.UNREADY):
            return state
        if found.ready:
            return WorkerState.READY
        if state is WorkerState.READY and self._failures >= self.unready_after:
            return WorkerState.UNREADY
        return state
