"""RQ's bookkeeping for a dispatcher: claim jobs, acknowledge them, hand them back.

Synchronous as RQ is; the service calls it from one thread of its own. What a job does is `service`'s and its
runners' subject: nothing here imports or calls what a job names. RQ would also import callbacks and post to
webhooks that a job names; ours never do, since a Redis that others can write to must not mean code execution.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import structlog
from rq import Queue
from rq.exceptions import InvalidJobOperation, NoSuchJobError
from rq.job import Job
from rq.utils import utcformat

from dispatcher.claimed import Claimed, NotOurJobError
from dispatcher.plain_job import PlainJob
from dispatcher.presence import CLAIM_TTL_S, Presence
from dispatcher.turns import Turns
from workers.connection import SyncRedis, translated
from workers.errors import StoreUnavailable

log = structlog.get_logger(__name__)

AGING_S = 30.0
"""A queue that was passed over for so long goes first once."""
REST_S = 5.0
"""How long a queue that cannot be used is left alone, in seconds: a try may leave a job half taken."""
MOST_OTHERS = 32
"""So many jobs of a queue that are not ours, or that nobody could run, are done away with by one claim: each
takes some round trips, and beats wait meanwhile."""


class JobClaims(Presence):
    """The jobs that one dispatcher takes. Every method raises StoreUnavailable when Redis does not answer."""

    def __init__(
        self,
        connection: SyncRedis,
        queues: Iterable[str],
        *,
        name: str,
        functions: Mapping[str, Callable[..., object]],
        on_stop: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        host_clock: Callable[[], float] = time.time,
    ) -> None:
        """`functions`: dotted paths that may run, and what takes the arguments that each may have; none is
        called. The others as `Presence` has them.
        """
        super().__init__(connection, queues, name=name, on_stop=on_stop, host_clock=host_clock)
        self._signatures = {path: inspect.signature(function) for path, function in functions.items()}
        self._turns = Turns(connection)
        self._clock = clock
        self._served = dict.fromkeys(self.queue_names(), clock())
        self._unusable: dict[str, float] = {}
        """Queues that could not be used at their last try, and when each is tried again, on the clock."""
        self.more_waits = False
        """Whether the last `claim` stopped among jobs that are not ours."""

    def claim(self, queues: int | None = None) -> Claimed | None:
        """Take the next job, most urgent queue first, or None. A job that is not ours is failed on the way.

        None with `more_waits`: there were so many of those that ours may stand behind them; ask again soon.
        `queues`: only of so many, the most urgent; None: of all. In a queue `turns` says which job is next.

        Each queue is popped on its own, into RQ's intermediate queue: a pop over several queues would lose
        the job when this process dies before it is registered [rq/rq#1716].
        """
        self.more_waits = False
        if self.clock_is_off:
            return None
        for queue in self._by_turn(self.queues[:queues]):
            claimed = self._claim_from(queue)
            if claimed is not None:
                return claimed
        return None

    def finish(self, claimed: Claimed, result: Any = None) -> None:
        """Acknowledge a job; its result is kept as long as the job asks."""
        self._end(
            claimed, lambda: self._finalize_success(claimed.job, claimed.queue, claimed.execution, result)
        )

    def fail(self, claimed: Claimed, error: BaseException, *, retry: bool) -> None:
        """End a job that could not be done; with `retry` RQ queues it again as often as the job allows."""
        claimed.job.failed = True
        if not retry:
            claimed.job.retries_left = 0
        told = (type(error), error, error.__traceback__)
        self._end(
            claimed, lambda: self._finalize_failure(claimed.job, claimed.queue, claimed.execution, told)
        )

    def stop(self, claimed: Claimed) -> None:
        """End a job that someone stopped through RQ."""
        self._end(claimed, lambda: self._tell_stopped(claimed))

    def _tell_stopped(self, claimed: Claimed) -> None:
        # The write that this begins with fails loudly while Redis is away; the one below only logs.
        self.handle_execution_ended(claimed.job, claimed.queue, CLAIM_TTL_S)
        self._stopped_job_id = claimed.id
        self.handle_job_failure(
            claimed.job, claimed.queue, exc_string="stopped by a command", execution=claimed.execution
        )

    def hand_back(self, claimed: Claimed) -> None:
        """Put a job back at the front of its queue, charging it no retry."""
        self._end(claimed, lambda: self._put_back(claimed))

    def _put_back(self, claimed: Claimed) -> None:
        with self.connection.pipeline() as pipeline:
            self.cleanup_execution(claimed.job, pipeline=pipeline, execution=claimed.execution)
            queued_at = claimed.job.enqueued_at
            claimed.queue._enqueue_job(claimed.job, pipeline=pipeline, at_front=True)  # noqa: SLF001 - RQ's retry does the same, but charges it
            if queued_at is not None:  # its time goes on
                pipeline.hset(claimed.job.key, "enqueued_at", utcformat(queued_at))
            pipeline.execute()

    def _end(self, claimed: Claimed, tell: Callable[[], None]) -> None:
        """Tell RQ a job's end if the job is still ours; else there is none to tell, only our hold ends.

        Where our claim has run out, or Redis has lost it, what bears the name by now is somebody else's, or
        has its result, or waits to be taken up again: it stays. Or somebody deleted it.
        """
        try:
            with translated():
                ours = self._is_ours(claimed)
                if ours:
                    tell()
        except (InvalidJobOperation, NoSuchJobError):
            ours = False
        if ours:
            self._now_idle()
        else:
            log.warning("a job was taken over or deleted while it ran", job=claimed.id)
            self.drop(claimed)

    def _is_ours(self, claimed: Claimed) -> bool:
        registry = claimed.job.started_job_registry.key
        return self.connection.zscore(registry, claimed.execution.composite_key) is not None

    def drop(self, claimed: Claimed) -> None:
        """Forget a job that is not ours any more: our execution of it ends, anybody else's stays."""
        with translated(), self.connection.pipeline() as pipeline:
            self.cleanup_execution(claimed.job, pipeline=pipeline, execution=claimed.execution)
            pipeline.execute()
        self._now_idle()

    def _claim_from(self, queue: Queue) -> Claimed | None:
        """The next job of a queue, or None. One with a spoiled key keeps no other from being served."""
        try:
            claimed = self._next_of(queue)
        except StoreUnavailable:
            raise
        except Exception:
            if queue.name not in self._unusable:
                log.exception("cannot take jobs from a queue", queue=queue.name, tried_again_every_s=REST_S)
            self._unusable[queue.name] = self._clock() + REST_S
            return None
        self._unusable.pop(queue.name, None)
        return claimed

    def _next_of(self, queue: Queue) -> Claimed | None:
        self._served[queue.name] = self._clock()
        with translated():
            for count, found in enumerate(self._popped(queue), 1):
                claimed = None if found is None else self._begin(*found)
                if claimed is not None:
                    return claimed
                if count == MOST_OTHERS:
                    self.more_waits = True
                    break
        return None

    def _by_turn(self, queues: Sequence[Queue]) -> list[Queue]:
        now = self._clock()
        queues = [queue for queue in queues if self._unusable.get(queue.name, now) <= now]
        passed_over = [queue for queue in queues if now - self._served[queue.name] > AGING_S]
        return [*passed_over, *(queue for queue in queues if queue not in passed_over)]

    def _popped(self, queue: Queue) -> Iterator[tuple[PlainJob, Queue] | None]:
        """The jobs of a queue, as RQ's `dequeue_any` gives them but for which is next, until there is none.

        None for each that nobody could run: somebody deleted it, or its record cannot be read.
        """
        while True:
            found = None
            try:
                with translated():
                    job_id = self._turns.take(queue.name, queue.key, queue.intermediate_queue.key)
                    if job_id is None:
                        return
                    found = self.queue_class._fetch_dequeued_job(  # noqa: SLF001 - the half of dequeue_any that follows the pop
                        self.connection,
                        queue.key,
                        job_id,
                        job_class=self.job_class,
                        serializer=self.serializer,
                    )
            except StoreUnavailable:
                raise
            except Exception as error:  # noqa: BLE001 - whatever reading a stranger's record may raise
                self._leave_out(queue, error)
            yield cast("tuple[PlainJob, Queue] | None", found)  # of the class that was asked for

    def _leave_out(self, queue: Queue, error: Exception) -> None:
        """Forget a job whose record RQ cannot read: nor could it be failed, and maintenance would stumble."""
        job_id = getattr(error, "job_id", None)  # noted by RQ or `turns` on what reading raised
        if job_id is None:
            raise error
        queue.intermediate_queue.remove(job_id)
        log.error(
            "a job's record cannot be read", job=str(job_id), queue=queue.name, error=type(error).__name__
        )

    def _begin(self, job: PlainJob, queue: Queue) -> Claimed | None:
        function, args, kwargs, refusal = self._read(job)
        execution = self.prepare_execution(job)
        self.prepare_job_execution(job, remove_from_intermediate_queue=True)
        if job.origin != queue.name:  # then RQ looked for it where it says it is from
            queue.intermediate_queue.remove(job.id)
        claimed = Claimed(job, queue, execution, function, args, kwargs, _waited_s(job))
        if refusal is None:
            return claimed
        self.fail(claimed, NotOurJobError(refusal), retry=False)
        return None

    def _read(self, job: Job) -> tuple[str, tuple[Any, ...], dict[str, Any], str | None]:
        try:
            function, args, kwargs = str(job.func_name), tuple(job.args), dict(job.kwargs)
        except Exception:  # noqa: BLE001 - whatever a stranger wrote there, it is no job of ours
            job.func_name = "unreadable"
            return "unreadable", (), {}, "the job's data is not JSON; enqueue it with RQ's JSONSerializer"
        return function, args, kwargs, self._refusal(function, args, kwargs)

    def _refusal(self, function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        signature = self._signatures.get(function)
        if signature is None:
            return f"a dispatcher does not run {function!r}"
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            return f"{function}: {error}"
        return None


def _waited_s(job: Job) -> float:
    if job.enqueued_at is None:
        return 0.0
    return max(0.0, (datetime.now(UTC) - job.enqueued_at).total_seconds())
