"""What an installation must not keep when all batches have ended: leases, jobs, entries of RQ's lists."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from rq import Queue
from rq.job import Job
from rq.registry import (
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ScheduledJobRegistry,
    StartedJobRegistry,
)
from rq.serializers import JSONSerializer

from dispatcher.queues import QUEUES
from forebay.desk import Desk
from workers.connection import SyncRedis

_REGISTRIES = (
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ScheduledJobRegistry,
    StartedJobRegistry,
)


async def leftovers(desk: Desk) -> list[str]:
    """What is still there, in words; empty is good."""
    view = await desk.fleet.view()
    held = [f"{worker.id} has {worker.leases} leases" for worker in view.workers if worker.leases]
    return held + await asyncio.to_thread(lambda: list(_of_rq(desk.connection)))


def _of_rq(connection: SyncRedis) -> Iterator[str]:
    for name in QUEUES:
        queue = Queue(name, connection=connection, serializer=JSONSerializer)
        if queue.count:
            yield f"{queue.count} jobs wait in {name}"
        if stuck := queue.intermediate_queue.get_job_ids():
            yield f"between {name} and its registry: {stuck}"
        for kind in _REGISTRIES:
            registry = kind(name, connection=connection, serializer=JSONSerializer)
            if jobs := registry.get_job_ids(cleanup=False):
                yield f"{kind.__name__} of {name}: {jobs}"
    for key in connection.scan_iter(f"{Job.redis_job_namespace_prefix}*", count=1000):
        yield f"a job is left: {key.decode()}"
