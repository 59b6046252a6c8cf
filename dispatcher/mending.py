"""Jobs that are lost are queued again, without anybody's help: so that a batch ends that lost some.

Redis loses its last writes when its machine dies, or when a replica takes over that was behind: a shard that
was reported done is not done any more, and its job, acknowledged after that, is gone. Or a command dies
between two steps, as `submit` or `cancel` may. Here is what is looked for and when; `forebay resume` brings
batches back that Redis knows nothing of any more. Queues and records of jobs are `queues`' subject.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import structlog

from dispatcher import queues
from dispatcher.batches.ledger import Entry, Ledger
from dispatcher.batches.record import BatchStatus
from dispatcher.bookkeeping import Bookkeeping
from dispatcher.queues import BatchJob
from workers.connection import SyncRedis

log = structlog.get_logger(__name__)

LOOK_S = 15.0
"""From one look to the next, in seconds. What is missing twice in a row is queued again."""
_NEWEST = 200
"""So many batches are looked at, the newest ones."""


class Mending:
    """One dispatcher's. Several that find the same do no harm: of two claims on a shard the later counts."""

    def __init__(self, ledger: Ledger, bookkeeping: Bookkeeping, rq_redis: SyncRedis) -> None:
        self._ledger = ledger
        self._bookkeeping = bookkeeping
        self._rq_redis = rq_redis
        self._missing: Mapping[str, frozenset[BatchJob]] = {}
        """By queue, what the last look missed: a job that just moved is there again with the next."""

    async def look(self) -> None:
        """Queue again what was missing at the last look, and is. Raises StoreUnavailable."""
        missing = await self._look()
        for queue, lost in missing.items():
            again = sorted(lost & self._missing.get(queue, frozenset()))
            if again:
                log.warning("jobs were lost, and are queued again", queue=queue, jobs=len(again))
                await self._bookkeeping.step(queues.enqueue_again, self._rq_redis, queue, again)
        self._missing = missing

    async def _look(self) -> dict[str, frozenset[BatchJob]]:
        wanted: dict[str, list[BatchJob]] = defaultdict(list)
        for entry in await self._ledger.recent(_NEWEST):
            wanted[entry.queue] += await self._wanted(entry)
        return {
            queue: frozenset(
                await self._bookkeeping.step(queues.lost_jobs, self._rq_redis, queue, batch_jobs)
            )
            for queue, batch_jobs in wanted.items()
            if batch_jobs
        }

    async def _wanted(self, entry: Entry) -> Iterable[BatchJob]:
        """The jobs that there must be for a batch to go on."""
        match BatchStatus(entry.status):
            case BatchStatus.IN_PROGRESS:
                done = await self._ledger.shards_done(entry.id)
                left = [shard for shard in range(entry.shards) if shard not in done]
                return [BatchJob(entry.id, shard) for shard in left] or [BatchJob(entry.id, None)]
            case BatchStatus.FINALIZING | BatchStatus.CANCELLING:
                return [BatchJob(entry.id, None)]
            case _:  # ended, or still with whoever submits it
                return ()
