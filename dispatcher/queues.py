"""Putting jobs on RQ's queues. Taking them off is `claims`' subject; what they do is `jobs`' and `service`'s.

Synchronous, as RQ is: call it from a thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rq import Queue, Retry
from rq.exceptions import NoSuchJobError
from rq.job import Job
from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer
from rq.utils import as_text

from dispatcher import jobs
from dispatcher.plain_job import PlainJob
from workers.connection import SyncRedis, translated

QUEUES = ("high", "default", "low")
"""A fleet's queues, most urgent first."""

_RETRIES = 100
"""How often a job may be taken up again after it failed, or its dispatcher died; deaths are not charged to a
shard's job (`plain_job`)."""
_PENDING = ("queued", "started", "deferred", "scheduled")
_GIVEN_UP = ("failed", "stopped", "canceled")
"""Ends that somebody or something wanted: a job that came to one is not lost."""
_ENQUEUE_CHUNK = 500
_NO_TIMEOUT = -1


class BatchJob(NamedTuple):
    """A job of a batch: the one of a shard, or, with None, the one that finalises it."""

    batch_id: str
    shard: int | None

    @property
    def id(self) -> str:
        """Its id on RQ."""
        if self.shard is None:
            return finalise_job_id(self.batch_id)
        return shard_job_id(self.batch_id, self.shard)


def shard_job_id(batch_id: str, shard: int) -> str:
    """The id of the RQ job that carries a shard: a shard is queued at most once."""
    return f"{batch_id}-{shard}"


def finalise_job_id(batch_id: str) -> str:
    """The id of the RQ job that finalises a batch."""
    return f"{batch_id}-finalise"


def queue(connection: SyncRedis, name: str) -> Queue:
    """One of RQ's queues, with the JSON serializer: nothing pickled is ever read."""
    return Queue(name, connection=connection, serializer=JSONSerializer)


def enqueue_shards(connection: SyncRedis, name: str, batch_id: str, shards: Iterable[int]) -> int:
    """Queue one job for each shard, in order. A shard whose job is queued already is not queued twice.

    Returns how many were queued. Raises StoreUnavailable.
    """
    wanted = list(shards)
    target = queue(connection, name)
    queued = 0
    with translated():
        for start in range(0, len(wanted), _ENQUEUE_CHUNK):
            chunk = wanted[start : start + _ENQUEUE_CHUNK]
            absent = _absent(connection, [shard_job_id(batch_id, shard) for shard in chunk])
            new = [shard for shard in chunk if shard_job_id(batch_id, shard) in absent]
            target.enqueue_many([_shard_job(batch_id, shard) for shard in new])
            queued += len(new)
    return queued


def _absent(connection: SyncRedis, job_ids: Sequence[str]) -> set[str]:
    """Those of the jobs that neither wait nor run; one that failed or ended may be queued again."""
    statuses = _statuses(connection, job_ids)
    return {job_id for job_id in job_ids if statuses[job_id] not in _PENDING}


def _statuses(connection: SyncRedis, job_ids: Sequence[str]) -> dict[str, str]:
    """What RQ notes of each job; empty when it has no record."""
    with connection.pipeline(transaction=False) as pipeline:
        for job_id in job_ids:
            pipeline.hget(Job.key_for(job_id), "status")
        statuses = pipeline.execute()
    return {job_id: as_text(status or b"") for job_id, status in zip(job_ids, statuses, strict=True)}


def lost_jobs(connection: SyncRedis, name: str, wanted: Sequence[BatchJob]) -> list[BatchJob]:
    """Those of the jobs that nobody could ever take up from a queue, though nothing says that they failed.

    One that moves while this looks may be among them. Raises StoreUnavailable.
    """
    with translated():
        reachable = _reachable(queue(connection, name))
        missing = [job for job in wanted if job.id not in reachable]
        statuses = _statuses(connection, [job.id for job in missing]) if missing else {}
    return [job for job in missing if statuses[job.id] not in _GIVEN_UP]


def enqueue_again(connection: SyncRedis, name: str, lost: Iterable[BatchJob]) -> None:
    """Queue jobs anew, whatever their records say. Raises StoreUnavailable."""
    target = queue(connection, name)
    with translated():
        for job in lost:
            if job.shard is None:
                _enqueue_finalise(connection, name, job.batch_id)
            else:
                target.enqueue_many([_shard_job(job.batch_id, job.shard)])


def requeue_lost(connection: SyncRedis, name: str, batch_id: str, shards: Iterable[int]) -> int:
    """Queue those shards whose jobs nobody could ever take up, whatever their records say.

    A job that moves while this looks may be queued twice: the later claim of its shard fences the earlier.
    Returns how many were queued. Raises StoreUnavailable.
    """
    target = queue(connection, name)
    with translated():
        reachable = _reachable(target)
        lost = [shard for shard in shards if shard_job_id(batch_id, shard) not in reachable]
        for start in range(0, len(lost), _ENQUEUE_CHUNK):
            chunk = lost[start : start + _ENQUEUE_CHUNK]
            target.enqueue_many([_shard_job(batch_id, shard) for shard in chunk])
    return len(lost)


def requeue_lost_finalise(connection: SyncRedis, name: str, batch_id: str) -> bool:
    """Queue the finaliser if nobody could ever take it up; whether that was so. Raises StoreUnavailable."""
    with translated():
        lost = finalise_job_id(batch_id) not in _reachable(queue(connection, name))
        if lost:
            _enqueue_finalise(connection, name, batch_id)
    return lost


def _reachable(target: Queue) -> set[str]:
    """Jobs that wait, are being popped, or are held: looked for in the order in which they move."""
    registry = StartedJobRegistry(target.name, connection=target.connection, serializer=JSONSerializer)
    waiting = target.get_job_ids()
    popped = target.intermediate_queue.get_job_ids()
    return {*waiting, *popped, *registry.get_job_ids(cleanup=False)}


def _shard_job(batch_id: str, shard: int) -> Any:
    return Queue.prepare_data(
        jobs.RUN_SHARD,
        args=(batch_id, shard),
        job_id=shard_job_id(batch_id, shard),
        description=f"{batch_id} shard {shard}",
        retry=Retry(max=_RETRIES, enqueue_at_front=True),
        timeout=_NO_TIMEOUT,
        result_ttl=0,
    )


def enqueue_finalise(connection: SyncRedis, name: str, batch_id: str) -> None:
    """Queue the finaliser, ahead of other work, unless it is queued or running. Raises StoreUnavailable."""
    with translated():
        if _absent(connection, [finalise_job_id(batch_id)]):
            _enqueue_finalise(connection, name, batch_id)


def _enqueue_finalise(connection: SyncRedis, name: str, batch_id: str) -> None:
    queue(connection, name).enqueue(
        jobs.FINALISE_BATCH,
        args=(batch_id,),
        job_id=finalise_job_id(batch_id),
        description=f"{batch_id} finalise",
        retry=Retry(max=_RETRIES, enqueue_at_front=True),
        job_timeout=_NO_TIMEOUT,
        result_ttl=0,
        at_front=True,
    )


def enqueue_request(
    connection: SyncRedis,
    name: str,
    body: dict[str, Any],
    *,
    url: str = "/v1/chat/completions",
    timeout_s: float | None = None,
    result_ttl_s: int = 3600,
) -> str:
    """Queue one inline request; returns the RQ job's id, by which RQ's API gives its result."""
    with translated():
        job = queue(connection, name).enqueue(
            jobs.RUN_REQUEST,
            args=(body,),
            kwargs={"url": url, "timeout_s": timeout_s},
            description=f"inline request {url}",
            retry=Retry(max=_RETRIES),
            job_timeout=_NO_TIMEOUT,
            result_ttl=result_ttl_s,
            failure_ttl=result_ttl_s,
        )
    return str(job.id)


def drop_shards(connection: SyncRedis, name: str, batch_id: str, shards: Iterable[int]) -> int:
    """Remove the queued jobs of a batch's shards; those running are their dispatcher's business.

    Returns how many were removed from the queue.
    """
    target = queue(connection, name)
    dropped = 0
    with translated():
        for shard in shards:
            try:
                job = PlainJob.fetch(
                    shard_job_id(batch_id, shard), connection=connection, serializer=JSONSerializer
                )
            except NoSuchJobError:
                continue
            if target.remove(job):  # else somebody has taken it off by now: it is theirs to end
                job.delete(remove_from_queue=False)
                dropped += 1
    return dropped


def call_off(connection: SyncRedis, name: str, batch_id: str, shards: int) -> None:
    """Drop what waits of a batch that is cancelling, and queue its end: the finaliser answers lines that
    nobody holds any more; what runs is its dispatcher's business. Raises StoreUnavailable.

    Takes several round trips a shard: who has heartbeats to send does it in parts (`mending`).
    """
    drop_shards(connection, name, batch_id, range(shards))
    enqueue_finalise(connection, name, batch_id)


def running_shards(connection: SyncRedis, name: str, batch_id: str) -> int:
    """How many of a batch's shards a live dispatcher holds."""
    with translated():
        registry = StartedJobRegistry(name, connection=connection, serializer=JSONSerializer)
        running = registry.get_job_ids(cleanup=False)
    return sum(1 for job_id in running if job_id.startswith(f"{batch_id}-") and not _is_finalise(job_id))


def _is_finalise(job_id: str) -> bool:
    return job_id.endswith("-finalise")


def waiting_jobs(connection: SyncRedis, names: Iterable[str] = QUEUES) -> dict[str, int]:
    """How many jobs wait in each queue; one that somebody spoiled is left out. Raises StoreUnavailable."""
    names = list(names)
    with translated(), connection.pipeline(transaction=False) as pipeline:
        for name in names:
            pipeline.llen(queue(connection, name).key)
        counts = pipeline.execute(raise_on_error=False)
    return {name: count for name, count in zip(names, counts, strict=True) if isinstance(count, int)}
