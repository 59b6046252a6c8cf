"""What time does to the claims of a dispatcher that is dead or stands still, for tests that cannot wait."""

from __future__ import annotations

from rq.registry import StartedJobRegistry
from rq.serializers import JSONSerializer

from dispatcher.plain_job import PlainJob
from dispatcher.queues import QUEUES
from workers.connection import SyncRedis


def let_claims_run_out(connection: SyncRedis, owner: str) -> None:
    """Queue again what ``owner`` holds, as anybody's maintenance does 20 seconds after its last heartbeat.

    What somebody took off its queue and never registered comes back with the next maintenance, and not only
    after 70 seconds.
    """
    held = connection.smembers(f"rq:worker:{owner}:executions")
    for queue in QUEUES:
        registry = StartedJobRegistry(
            queue, connection=connection, job_class=PlainJob, serializer=JSONSerializer
        )
        for member in held:
            connection.zadd(registry.key, {member: 1}, xx=True)
        registry.cleanup()
        for job in connection.lrange(f"rq:queue:{queue}:intermediate", 0, -1):
            connection.set(f"rq:queue:{queue}:intermediate:first_seen:{job.decode()}", 1)
