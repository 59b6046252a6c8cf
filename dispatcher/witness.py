"""What this dispatcher sees of workers that do not tell how busy they are: how fast their answers come when
their limit is full. It is counted beside the limit, for the monitor, which learns from it how far to go.

What follows from it is ``monitor.exploring``'s subject. No more is counted than shows something: an answer
to a request that had the worker as full as its limit lets it be, from its beginning to its end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from workers.evidence import NONE, Evidence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from workers.fleet import WorkerView
    from workers.store import FleetStore

INTERVAL_S: Final = 0.2
"""How often what was seen is told, in seconds, if there is any."""
FULL: Final = 0.75
"""From this part of its limit on a worker counts as full: a look comes after leases were freed, and before
they are taken again.
"""
_LONGEST_GAP_S: Final = 3.0
"""Looks are a second apart at most while anything is in flight. After a longer gap, of this process or of
Redis, nobody knows how full a worker was.
"""


@dataclass(slots=True)
class _Silent:
    """A worker that does not tell, at one limit."""

    limit_since: float
    full_since: float = math.inf
    """From when on all looks found it full; infinite: the last did not."""
    leases: int = 0
    """As the last look found them."""
    seen: Evidence = NONE
    """What was not told yet."""


class Witness:
    """One dispatcher's part. Times are on Redis' clock, in seconds."""

    def __init__(self, store: FleetStore, *, stale_after_s: float) -> None:
        """``stale_after_s``: a load that is older tells nothing."""
        self._store = store
        self._stale_after_s = stale_after_s
        self._silent: dict[str, _Silent] = {}
        self._looked_s = -math.inf

    def look(self, workers: Iterable[WorkerView], now_s: float) -> None:
        """See who does not tell how busy it is, and who of them is full."""
        silent = {}
        gap = now_s - self._looked_s > _LONGEST_GAP_S
        self._looked_s = now_s
        for worker in workers:
            if self._tells(worker, now_s):
                continue
            known = self._silent.get(worker.id)
            if known is None or known.limit_since != worker.limit_since:
                known = _Silent(worker.limit_since)
            known.leases = worker.leases
            full = worker.leases >= FULL * worker.limit
            since_s = now_s if gap else min(known.full_since, now_s)
            known.full_since = since_s if full else math.inf
            silent[worker.id] = known
        self._silent = silent

    def saw(self, worker_id: str, tokens: int | None, seconds: float | None, now_s: float) -> None:
        """An answer came from a worker: so many tokens, in so many seconds. None: it has no tokens, it is no
        text, or the worker does not count them; then answers are counted instead.
        """
        worker = self._silent.get(worker_id)
        if worker is None or not seconds or now_s - self._looked_s > _LONGEST_GAP_S:
            return
        if now_s - seconds >= max(worker.limit_since, worker.full_since):
            worker.seen = worker.seen.with_answer(tokens or 1, seconds, worker.leases)

    async def tell(self) -> None:
        """Have it counted. Raises StoreUnavailable; then it is lost, which costs a moment's learning."""
        told = {name: worker for name, worker in self._silent.items() if worker.seen.answers}
        if not told:
            return
        notes = [(name, worker.limit_since, worker.seen) for name, worker in told.items()]
        for worker in told.values():
            worker.seen = NONE
        await self._store.note_evidence(notes)

    def _tells(self, worker: WorkerView, now_s: float) -> bool:
        load = worker.load
        if load is None or load.running is None or load.waiting is None:
            return False
        return now_s - load.sampled_at <= self._stale_after_s
