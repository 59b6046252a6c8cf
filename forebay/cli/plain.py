"""A run as plain lines, for logs and pipes: one every few seconds and at every change. No escape codes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from dispatcher.batches.record import BatchRecord, BatchStatus
from forebay.cli.tables import dash, percent, rate
from forebay.durations import clock
from forebay.progress import Progress
from workers.fleet import WorkerView
from workers.legible import legible

EVERY_S = 5.0
_NAMED = 3
"""Models that are named where there are many."""


class PlainWatcher:
    """Prints through ``say``, a line at a time. ``now`` is a monotonic clock."""

    def __init__(
        self,
        say: Callable[[str], object],
        *,
        every_s: float = EVERY_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say = say
        self._every_s = every_s
        self._now = now
        self._next_s = 0.0
        self._status: BatchStatus | None = None
        self._standings: dict[str, tuple[str, str]] = {}
        self._trouble: str | None = None
        self._unserved: tuple[str, ...] = ()

    def note(self, text: str) -> None:
        self._say(text)

    def started(self, record: BatchRecord, *, resumed: bool) -> None:
        self._say(begun(record, resumed=resumed))

    def waiting(self, workers: Sequence[WorkerView]) -> None:
        if self._due():
            self._say(f"waiting for a worker: {'; '.join(_reasons(workers)) or 'none is registered'}")

    def close(self) -> None:
        """Nothing is open."""

    def progress(self, seen: Progress) -> None:
        changed = [worker for worker in seen.workers if self._standings.get(worker.id) != _standing(worker)]
        if self._due() or changed or seen.status is not self._status:
            self._say(progress_line(seen))
        for worker in changed:
            self._say(worker_line(worker))
        if seen.trouble != self._trouble:
            self._say(trouble_line(seen.trouble))
            self._trouble = seen.trouble
        if seen.unserved != self._unserved and not seen.status.final:
            self._say(f"  {unserved_line(seen)}")
            self._unserved = seen.unserved
        self._status = seen.status
        self._standings = {worker.id: _standing(worker) for worker in seen.workers}

    def _due(self) -> bool:
        now = self._now()
        if now < self._next_s:
            return False
        self._next_s = now + self._every_s
        return True


def begun(record: BatchRecord, *, resumed: bool) -> str:
    """The first line of a run."""
    how = "taken up again" if resumed else "taken in"
    refused = f", {record.request_counts.failed:,} of them refused" if record.request_counts.failed else ""
    return f"{record.id}: {record.request_counts.total:,} lines {how}{refused}"


def progress_line(seen: Progress) -> str:
    """How far a batch is, in a line."""
    left = "-" if seen.eta_s is None else clock(seen.eta_s)
    share = percent(seen.done / seen.total) if seen.total else "-"
    return (
        f"{seen.status} {share}%: {seen.completed:,} done, {seen.failed:,} failed, "
        f"{seen.in_flight} in flight of {seen.total:,}; {rate(seen.tokens_per_s)} tokens/s; "
        f"{clock(seen.elapsed_s)} passed, {left} left"
    )


def trouble_line(trouble: str | None) -> str:
    """What keeps a batch from going on; None: that it is over."""
    return "  the storage can be used again" if trouble is None else f"  trouble: {legible(trouble)}"


def unserved_line(seen: Progress) -> str:
    """Which lines wait for a worker that serves their model, and what the workers serve."""
    if not seen.unserved:
        return "every model is served now"
    served = sorted(frozenset[str]().union(*(worker.models for worker in seen.workers)))
    theirs = f"they serve {_names(served)}" if served else "none is registered"
    return f"no worker serves {_names(seen.unserved)}, its lines wait ({theirs})"


def _names(models: Sequence[str]) -> str:
    told = [legible(model) for model in models[:_NAMED]]
    more = len(models) - len(told)
    return ", ".join([*told, *([f"{more} more"] if more else [])])


def worker_line(worker: WorkerView) -> str:
    """How a worker stands, in a line."""
    load = worker.load
    return (
        f"  {worker.id} {dash(worker.runtime)} {worker.state}: "
        f"running {dash(load.running if load else None)}, waiting {dash(load.waiting if load else None)}, "
        f"KV {percent(load.kv_usage_max if load else None)}%, "
        f"leases {worker.leases}/{worker.limit}, breaker {worker.breaker}"
    )


def _standing(worker: WorkerView) -> tuple[str, str]:
    return worker.state, worker.breaker


def _reasons(workers: Sequence[WorkerView]) -> list[str]:
    return [legible(f"{worker.id} ({worker.state}) {worker.reason}".rstrip()) for worker in workers]
