"""A run as JSON events on standard output, one a line, for programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from dispatcher.batches.record import BatchRecord
from forebay.cli.failures import complain
from forebay.cli.options import print_json
from forebay.progress import Progress
from workers.fleet import WorkerView

EVERY_S = 1.0


class EventWatcher:
    """Prints ``started``, ``waiting``, ``progress`` and ``finished``, the middle two about every second."""

    def __init__(
        self,
        emit: Callable[[dict[str, Any]], object] = print_json,
        *,
        every_s: float = EVERY_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._emit = emit
        self._every_s = every_s
        self._now = now
        self._next_s = 0.0

    def note(self, text: str) -> None:
        complain(text)

    def started(self, record: BatchRecord, *, resumed: bool) -> None:
        counts = record.request_counts
        self._emit({"event": "started", "batch_id": record.id, "total": counts.total, "resumed": resumed})

    def waiting(self, workers: Sequence[WorkerView]) -> None:
        if self._due():
            self._emit({"event": "waiting", "workers": [_worker(worker) for worker in workers]})

    def progress(self, seen: Progress) -> None:
        if self._due() or seen.status.final:
            self._emit(progress_event(seen))

    def close(self) -> None:
        """Nothing is open."""

    def _due(self) -> bool:
        now = self._now()
        if now < self._next_s:
            return False
        self._next_s = now + self._every_s
        return True


def progress_event(seen: Progress) -> dict[str, Any]:
    """One look at a batch. What is unknown is null."""
    return {
        "event": "progress",
        "batch_id": seen.batch_id,
        "status": seen.status,
        "request_counts": {"total": seen.total, "completed": seen.completed, "failed": seen.failed},
        "in_flight": seen.in_flight,
        "tokens_per_s": seen.tokens_per_s,
        "eta_s": seen.eta_s,
        "elapsed_s": seen.elapsed_s,
        "trouble": seen.trouble,
        "unserved": list(seen.unserved),
        "workers": [_worker(worker) for worker in seen.workers],
    }


def _worker(worker: WorkerView) -> dict[str, Any]:
    load = worker.load
    return {
        "id": worker.id,
        "runtime": worker.runtime,
        "state": worker.state,
        "reason": worker.reason,
        "running": load.running if load else None,
        "waiting": load.waiting if load else None,
        "kv_usage_max": load.kv_usage_max if load else None,
        "leases": worker.leases,
        "limit": worker.limit,
        "breaker": worker.breaker,
    }
