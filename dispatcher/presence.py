"""A dispatcher as RQ sees it: it appears, lives, hears commands, looks after jobs of the dead, and vanishes.

Synchronous as RQ is. What becomes of the jobs that it takes is `claims`' subject.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import structlog
from rq import Queue
from rq.command import parse_payload
from rq.job import Job
from rq.registry import clean_registries
from rq.serializers import JSONSerializer
from rq.suspension import is_suspended
from rq.utils import now
from rq.worker import BaseWorker, WorkerStatus
from rq.worker_registration import clean_worker_registry, register

from dispatcher.claimed import Claimed
from dispatcher.host_clock import HostClock
from dispatcher.plain_job import PlainJob
from dispatcher.upkeep import KeptQueue
from workers.connection import SyncRedis, translated
from workers.errors import SettingsError, StoreUnavailable

log = structlog.get_logger(__name__)

HEARTBEAT_S = 5
"""How often a claimed job is kept alive, in seconds."""
CLAIM_TTL_S = 20
"""How long a claimed job is safe from others after the last heartbeat, in seconds."""
MAINTENANCE_S = 10
"""How often the jobs of dead dispatchers are looked for, in seconds; RQ's default is ten minutes."""
_DEAF_S = 2.0
"""Pause before listening again for RQ's commands, in seconds."""


class Presence(BaseWorker):
    """One dispatcher's. Every method raises StoreUnavailable when Redis does not answer."""

    job_class = PlainJob
    log_result_lifespan = False

    def __init__(
        self,
        connection: SyncRedis,
        queues: Iterable[str],
        *,
        name: str,
        on_stop: Callable[[str], None],
        host_clock: Callable[[], float] = time.time,
    ) -> None:
        """`on_stop` gets a job's id, in another thread. `host_clock` is the one that RQ goes by."""
        with translated():
            super().__init__(
                [
                    KeptQueue(queue, connection=connection, serializer=JSONSerializer, job_class=PlainJob)
                    for queue in queues
                ],
                name=name,
                connection=connection,
                job_class=PlainJob,
                serializer=JSONSerializer,
                worker_ttl=CLAIM_TTL_S,
                job_monitoring_interval=HEARTBEAT_S,
                maintenance_interval=MAINTENANCE_S,
                log_job_description=False,
            )
        self._on_stop = on_stop
        self._host_clock = HostClock(connection, host_clock)
        self._neglected: set[str] = set()
        """Queues in which nobody could look for jobs of the dead at the last try."""
        self._born = False
        self._suspended = False

    def open(self) -> None:
        """Appear in `rq info`, and listen for RQ's commands. May be repeated when Redis did not answer.

        Raises SettingsError when another dispatcher of this name lives.
        """
        with translated():
            self._host_clock.compare()
            if not self._born:
                self._register()
            if self.pubsub_thread is None:
                self.subscribe()
            self.set_state(WorkerStatus.STARTED)

    def _register(self) -> None:
        try:
            self.register_birth()
        except ValueError as error:
            if not self._is_registered():
                raise SettingsError(f"a dispatcher named {self.name} is alive, or died just now") from error
        self._born = True

    def _is_registered(self) -> bool:
        """Whether the record of our name is ours: Redis may go away between a birth and its answer."""
        if self.birth_date is None:
            return False
        told = self.serialize()
        names = ("hostname", "pid", "birth")
        return self.connection.hmget(self.key, names) == [str(told[name]).encode() for name in names]

    def close(self) -> None:
        """Vanish from `rq info`."""
        try:
            with translated():
                self.register_death()
        finally:
            with contextlib.suppress(StoreUnavailable), translated():  # our hearing ends with us anyway
                self.unsubscribe()

    def suspended(self) -> bool:
        """Whether someone ran `rq suspend`; `rq info` says so of this dispatcher too."""
        with translated():
            suspended = bool(is_suspended(self.connection))
            if suspended != self._suspended:
                self._suspended = suspended
                self.set_state(WorkerStatus.BUSY if self.executions and not suspended else self._at_rest)
        return suspended

    @property
    def _at_rest(self) -> WorkerStatus:
        return WorkerStatus.SUSPENDED if self._suspended else WorkerStatus.IDLE

    @property
    def clock_is_off(self) -> bool:
        """Whether RQ would go by a wrong clock here: none is claimed, and nobody's taken over, meanwhile."""
        return self._host_clock.is_off

    def maintain(self) -> None:
        """Requeue the jobs of dead dispatchers, when it is time."""
        if self.should_run_maintenance_tasks and not self.clock_is_off:
            self.clean_registries()

    def clean_registries(self) -> None:
        """What RQ's does, but that a spoiled key of one queue keeps no other's jobs from coming back."""
        for queue in self.queues:
            try:
                with translated():
                    self._look_after(queue)
                self._neglected.discard(queue.name)
            except StoreUnavailable:
                raise
            except Exception:
                if queue.name not in self._neglected:
                    log.exception("cannot look for jobs of dead dispatchers", queue=queue.name)
                self._neglected.add(queue.name)
        self.last_cleaned_at = now()  # type: ignore[assignment]  # RQ declares it as None alone

    def _look_after(self, queue: Queue) -> None:
        if not queue.acquire_maintenance_lock():
            return
        try:
            clean_registries(queue)
            clean_worker_registry(queue)
            queue.intermediate_queue.cleanup(self, queue)
        finally:
            queue.release_maintenance_lock()

    def beat(self, claimed: Iterable[Claimed]) -> None:
        """Keep this dispatcher and all it holds alive, and look whether RQ goes by a right clock."""
        with translated():
            self._host_clock.compare()
            self._reappear()
            self.heartbeat(CLAIM_TTL_S)
            for one in claimed:
                self.maintain_heartbeats(one.job, one.execution)

    def _reappear(self) -> None:
        """Be in `rq info` again when Redis has forgotten us: it was emptied, or away for long.

        RQ's heartbeat would make a record of its own stamp alone, which nobody could read.
        """
        with self.connection.pipeline(transaction=False) as asking:
            asking.hexists(self.key, "birth")
            asking.sismember(self.redis_workers_keys, self.key)
            known = all(asking.execute())
        if known:
            return
        with self.connection.pipeline() as pipeline:
            pipeline.hset(self.key, mapping=self.serialize())
            register(self, pipeline)
            self.set_state(WorkerStatus.BUSY if self.executions else self._at_rest, pipeline=pipeline)
            pipeline.expire(self.key, CLAIM_TTL_S)
            pipeline.execute()
        log.warning("Redis had forgotten this dispatcher", name=self.name)

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        return CLAIM_TTL_S

    def _now_idle(self) -> None:
        # Only for show: were it to fail, the step before it, which was done, would be repeated.
        if not self.executions:
            with contextlib.suppress(StoreUnavailable), translated():
                self.set_state(self._at_rest)

    def _pubsub_exception_handler(self, exc: Exception, pubsub: Any, pubsub_thread: Any) -> None:
        """Listen on after an outage; RQ's own ends the thread when Redis stalls, and is deaf from then on."""
        with contextlib.suppress(StoreUnavailable), translated():
            raise exc
        log.warning("RQ's commands are not heard now", error=str(exc))
        time.sleep(_DEAF_S)

    def handle_payload(self, message: Any) -> None:
        """Route RQ's commands: stop-job and stop-execution to whoever runs it; the others as RQ does."""
        payload = parse_payload(message)
        match payload.get("command"):
            case "stop-job":
                self._on_stop(str(payload.get("job_id", "")))
            case "stop-execution":
                execution = self.executions.get(str(payload.get("execution_id", "")))
                if execution is not None:
                    self._on_stop(execution.job_id)
            case _:
                super().handle_payload(message)

    def execute_job(self, job: Job, queue: Queue) -> NoReturn:
        raise AssertionError("a dispatcher runs jobs on its own loop, not in RQ's")
