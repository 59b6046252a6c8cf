"""What waits in queues and batches, as one look at Redis shows it: what a metrics page tells of work to come.

Belongs here: the look and its sums. How it is told is `exporter`'s subject; batches are `ledger`'s, queues
are `queues`'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass

from dispatcher.batches.ledger import Entry, Ledger
from dispatcher.batches.record import BatchStatus

NEWEST = 200
"""So many batches are looked at, the newest ones: those that ended stay, and shall not make a look long."""


@dataclass(frozen=True, slots=True)
class Survey:
    """One look, of what has not ended."""

    jobs: Mapping[str, int]
    """Jobs that wait, by queue; those that a dispatcher holds are not among them."""
    batches: Mapping[str, int]
    """Batches by status; every status that is not final is there."""
    lines_left: int
    """Lines of those batches without a durable result."""
    in_trouble: int
    """Those of the batches whose files cannot be used now."""


async def survey(ledger: Ledger, jobs: Callable[[], Awaitable[Mapping[str, int]]]) -> Survey:
    """Look now; `jobs` counts what waits in queues. Raises StoreUnavailable."""
    return summed_up(await jobs(), await ledger.recent(NEWEST))


def summed_up(jobs: Mapping[str, int], entries: Iterable[Entry]) -> Survey:
    """The sums of those of the batches that have not ended."""
    open_ones = [entry for entry in entries if not entry.ended]
    found = Counter(entry.status for entry in open_ones)
    return Survey(
        jobs=jobs,
        batches={status.value: found[status.value] for status in BatchStatus if not status.final},
        lines_left=sum(max(0, entry.total - entry.completed - entry.failed) for entry in open_ones),
        in_trouble=sum(1 for entry in open_ones if entry.fields.get("trouble")),
    )
