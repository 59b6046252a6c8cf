"""Batches end without anybody's help: lost jobs are queued again, and what is overdue is called off.

Redis loses its last writes when its machine dies, or when a replica takes over that was behind: a shard that
was reported done is not done any more, and its job, acknowledged after that, is gone. Or a command dies
between two steps, as `submit` or `cancel` may. Here is what is looked for and when; `forebay resume` brings
batches back that Redis knows nothing of any more. Queues and records of jobs are `queues`' subject.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import structlog

from dispatcher import queues
from dispatcher.batches.ledger import Entry, Ledger
from dispatcher.batches.record import BatchStatus
from dispatcher.bookkeeping import Bookkeeping
from dispatcher.finaliser import OVERDUE
from dispatcher.queues import BatchJob
from workers.connection import SyncRedis

log = structlog.get_logger(__name__)

T = TypeVar("T")

_GRACE_S = 5.0
"""How long after its deadline a batch is left to those who hold its shards: they answer what is late."""
LOOK_S = 15.0
"""From one look to the next, in seconds. What is missing twice in a row is queued again."""
_AT_ONCE = 200
"""Jobs that one step of the bookkeeping drops or queues, a few round trips each: heartbeats go in between."""


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
                for some in _in_parts(again):
                    await self._bookkeeping.step(queues.enqueue_again, self._rq_redis, queue, some)
        self._missing = missing

    async def _look(self) -> dict[str, frozenset[BatchJob]]:
        wanted: dict[str, list[BatchJob]] = defaultdict(list)
        now_s = await self._ledger.now()
        for entry in await self._ledger.unfinished():
            if _overdue(entry, now_s):
                await self._call_off(entry)
            wanted[entry.queue] += await self._wanted(entry)
        return {
            queue: frozenset(
                await self._bookkeeping.step(queues.lost_jobs, self._rq_redis, queue, batch_jobs)
            )
            for queue, batch_jobs in wanted.items()
            if batch_jobs
        }

    async def _call_off(self, entry: Entry) -> None:
        """End a batch whose time is over, whatever keeps its shards waiting: no room, other queues."""
        status = await self._ledger.move(
            entry.id,
            BatchStatus.CANCELLING,
            among=[BatchStatus.IN_PROGRESS],
            fields={"late": "1", OVERDUE: "1"},
        )
        if status == BatchStatus.CANCELLING:
            log.warning("a batch's time is over", batch=entry.id, shards_done=entry.shards_done)
            for some in _in_parts(range(entry.shards)):
                await self._bookkeeping.step(queues.drop_shards, self._rq_redis, entry.queue, entry.id, some)
            await self._bookkeeping.step(queues.enqueue_finalise, self._rq_redis, entry.queue, entry.id)

    async def _wanted(self, entry: Entry) -> Iterable[BatchJob]:
        """The jobs that there must be for a batch to go on."""
        match entry.status:
            case BatchStatus.IN_PROGRESS:
                done = await self._ledger.shards_done(entry.id)
                left = [shard for shard in range(entry.shards) if shard not in done]
                return [BatchJob(entry.id, shard) for shard in left] or [BatchJob(entry.id, None)]
            case BatchStatus.FINALIZING | BatchStatus.CANCELLING:
                return [BatchJob(entry.id, None)]
            case _:  # ended, still with whoever submits it, or of a newer version
                return ()


def _in_parts(jobs: Sequence[T]) -> Iterator[Sequence[T]]:
    return (jobs[start : start + _AT_ONCE] for start in range(0, len(jobs), _AT_ONCE))


def _overdue(entry: Entry, now_s: float) -> bool:
    """Whether lines of a batch should have been answered as late by now, and were not."""
    waits = entry.status == BatchStatus.IN_PROGRESS and entry.shards_done < entry.shards
    return waits and entry.expires_at + _GRACE_S <= now_s
