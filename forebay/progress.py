"""How far a batch is, as numbers: counts, rates of the last seconds, the time that is left.

No clock and no I/O: where the numbers come from is ``desk``'s subject, how they look the command line's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from dispatcher.batches.ledger import Entry, status_of
from dispatcher.batches.record import BatchStatus
from workers.fleet import FleetView, WorkerView

WINDOW_S = 15.0
"""Rates are over so many last seconds: enough to be calm, few enough to follow a worker that died."""

_FORESEEABLE = 0.05
"""Share of the cost that must be done before the rest is foretold: the longest requests go first, and count
only when they end, so that the first seconds look far slower than the batch will be."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One look at a batch and its fleet. Rates and the estimate are None while nothing is known."""

    batch_id: str
    status: BatchStatus
    total: int
    completed: int
    failed: int
    in_flight: int
    """Live leases of the whole fleet, those of other batches included."""
    completion_tokens: int
    tokens_per_s: float | None
    eta_s: float | None
    elapsed_s: float
    workers: tuple[WorkerView, ...]
    now_s: float
    """Redis' clock, which the workers' stamps are on."""
    trouble: str | None = None
    """Why the batch's files cannot be used now, for people."""
    unserved: tuple[str, ...] = ()
    """Models that lines ask for and no worker serves, sorted: those lines wait until one does."""

    @property
    def done(self) -> int:
        """Lines that have a result."""
        return self.completed + self.failed


@dataclass(slots=True)
class Pace:
    """Rates over the last seconds, from numbers that only grow."""

    window_s: float = WINDOW_S
    _seen: deque[tuple[float, int, int]] = field(default_factory=deque)

    def observe(self, now_s: float, tokens: int, cost: int) -> None:
        """Take in one look: tokens generated, and planned cost that is done."""
        self._seen.append((now_s, tokens, cost))
        while len(self._seen) > 2 and now_s - self._seen[1][0] >= self.window_s:
            self._seen.popleft()

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens generated per second; None before there are two looks."""
        return self._rate(1)

    def eta_s(self, cost_left: int) -> float | None:
        """Seconds until the cost that is left is done at the rate of late; None while nothing moves."""
        rate = self._rate(2)
        return max(0, cost_left) / rate if rate else None

    def _rate(self, column: int) -> float | None:
        if len(self._seen) < 2:
            return None
        first, last = self._seen[0], self._seen[-1]
        passed = last[0] - first[0]
        return (last[column] - first[column]) / passed if passed > 0 else None


def look(
    entry: Entry, fleet: FleetView, pace: Pace, *, started_s: float, models: Collection[str] = ()
) -> Progress:
    """One look at a batch, whose lines ask for these ``models``; ``pace`` is told of it. ``started_s`` is on
    the fleet's clock. Raises UnreadableRecordError.
    """
    pace.observe(fleet.now_s, entry.completion_tokens, entry.cost_done)
    status = status_of(entry)
    foreseeable = entry.cost_done >= _FORESEEABLE * entry.cost_total
    return Progress(
        batch_id=entry.id,
        status=status,
        total=entry.total,
        completed=entry.completed,
        failed=entry.failed,
        in_flight=sum(worker.leases for worker in fleet.workers),
        completion_tokens=entry.completion_tokens,
        tokens_per_s=pace.tokens_per_s,
        eta_s=pace.eta_s(entry.cost_total - entry.cost_done) if foreseeable else None,
        elapsed_s=max(0.0, fleet.now_s - started_s),
        workers=fleet.workers,
        now_s=fleet.now_s,
        trouble=entry.trouble,
        unserved=() if status.final else unserved(models, fleet.workers),
    )


def unserved(models: Collection[str], workers: Collection[WorkerView]) -> tuple[str, ...]:
    """Which of these models no worker names, sorted. One that has not said what it serves may serve all."""
    if any(not worker.models for worker in workers):
        return ()
    served = frozenset[str]().union(*(worker.models for worker in workers))
    return tuple(sorted(set(models) - served))
