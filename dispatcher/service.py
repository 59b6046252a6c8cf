"""The dispatcher: takes jobs off queues while it has room, runs many at once, ends without losing any.

It only wires and supervises. RQ's bookkeeping is synchronous and runs in one thread (`claims`); everything
else runs on one asyncio loop: `placement` gives leases, `attempts` runs requests, `shard`, `inline` and
`finaliser` are the three kinds of jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum, auto
from random import Random
from typing import Any, ParamSpec, TypeVar

import structlog

from dispatcher import jobs, queues
from dispatcher.attempts import Attempts
from dispatcher.batches.errors import BatchError
from dispatcher.batches.ledger import Ledger
from dispatcher.batches.record import BatchStatus
from dispatcher.batches.storage import Storage
from dispatcher.claims import HEARTBEAT_S, Claimed, JobClaims
from dispatcher.exporter import Exporter
from dispatcher.finaliser import Finaliser
from dispatcher.inline import InlineRequestError, InlineRunner
from dispatcher.placement import Closing, Placement
from dispatcher.scheduler.strategies import Strategies
from dispatcher.send import Sender, make_transport
from dispatcher.settings import DispatcherSettings
from dispatcher.shard import ShardEnd, ShardRunner
from workers.connection import connect, connect_sync, server_facts
from workers.errors import StoreUnavailable
from workers.store import FleetStore

log = structlog.get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_MOST_FEEDING = 2
_IDLE_S = (0.02, 0.25)
_PAUSE_S = (0.2, 5.0)
_SUSPENSION_CHECK_S = 1.0
_STORAGE_PAUSE_S = 5.0


class Interruption(StrEnum):
    """Why a running job was cancelled.

    ending: this service stops. stopped: RQ's stop-job. unwanted: its batch was cancelled, or is gone.
    """

    ENDING = auto()
    STOPPED = auto()
    UNWANTED = auto()


@dataclass(slots=True, eq=False)
class _Running:
    claimed: Claimed
    task: asyncio.Task[None]
    batch_id: str | None
    interruption: Interruption | None = None

    def interrupt(self, why: Interruption) -> None:
        if self.interruption is None:
            self.interruption = why
            self.task.cancel()


class Dispatcher:
    """One dispatcher. Make it inside a running loop."""

    def __init__(self, settings: DispatcherSettings, *, rng: Random | None = None) -> None:
        rng = rng or Random()
        self.settings = settings
        self._redis = connect(settings.redis_url)
        self._rq_redis = connect_sync(settings.redis_url)
        self._rq_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rq")
        self._store = FleetStore(
            self._redis, policy=settings.breaker, lease_ttl_s=settings.lease_ttl_s, rng=rng
        )
        self._ledger = Ledger(self._redis)
        self._wire = make_transport(connect_timeout_s=settings.connect_timeout_s)
        strategies = Strategies(settings.scheduler)
        self.placement = Placement(
            self._store,
            strategies,
            owner=settings.name,
            rng=rng,
            view_interval_s=settings.view_interval_s,
            stale_after_s=settings.scheduler.stale_after_s,
            dead_after_s=settings.scheduler.dead_after_s,
        )
        self.exporter = Exporter(settings.name, self.placement)
        attempts = Attempts(
            self.placement,
            Sender(self._wire),
            strategies,
            settings.retry,
            request_timeout_s=settings.request_timeout_s,
            slowest_rate=settings.slowest_rate,
            rng=rng,
            onlooker=self.exporter.saw,
        )
        storage = Storage(settings.storage)
        self._shards = ShardRunner(
            storage,
            self._ledger,
            self.placement,
            attempts,
            owner=settings.name,
            part_lines=settings.part_lines,
            part_age_s=settings.part_age_s,
        )
        self._inline = InlineRunner(self.placement, attempts, deadline_s=settings.inline_deadline_s)
        self._finaliser = Finaliser(storage, self._ledger)
        self._claims: JobClaims
        self._running: dict[str, _Running] = {}
        self._ending = asyncio.Event()
        self._now = asyncio.Event()

    # -- its life -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until `end` is called, or SIGTERM or SIGINT comes; a second one stops at once."""
        self._listen_to_signals()
        with self.exporter.serving(self.settings.metrics_port):
            try:
                await self._open()
                if not self._ending.is_set():
                    await self._work()
            finally:
                await self._close()

    def end(self) -> None:
        """Stop claiming, let what is in flight finish for a while, hand back the rest; again: stop now."""
        if self._ending.is_set():
            self._now.set()
        self._ending.set()
        self.placement.close()

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self.end)

    async def _open(self) -> None:
        """Appear to others, as soon as Redis answers."""
        loop = asyncio.get_running_loop()

        def stop_from_thread(job_id: str) -> None:
            loop.call_soon_threadsafe(self._stop_job, job_id)

        def make() -> JobClaims:
            claims = JobClaims(
                self._rq_redis,
                self.settings.queues,
                name=self.settings.name,
                functions=(jobs.RUN_SHARD, jobs.RUN_REQUEST, jobs.FINALISE_BATCH),
                on_stop=stop_from_thread,
            )
            claims.open()
            return claims

        facts = await self._until_redis_answers(lambda: server_facts(self._redis))
        if facts is not None and facts.warning:
            log.warning(facts.warning)
        claims = await self._until_redis_answers(lambda: self._in_rq_thread(make))
        if claims is not None:
            self._claims = claims
            log.info("dispatcher is ready", name=self.settings.name, queues=list(self.settings.queues))

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as group:
            chores = [
                group.create_task(chore)
                for chore in (
                    self.placement.run(),
                    self._every(self.settings.lease_ttl_s / 4, self.placement.renew),
                    self._every(HEARTBEAT_S, self._beat),
                    self._every(self.settings.watch_interval_s, self._watch_batches),
                )
            ]
            await self._claim_jobs(group)
            await self._drain()
            await self._settle_at_last()
            for chore in chores:
                chore.cancel()

    async def _drain(self) -> None:
        """Give what is in flight its time, then hand back what is left."""
        deadline = asyncio.create_task(asyncio.sleep(self.settings.drain_timeout_s))
        at_once = asyncio.create_task(self._now.wait())
        while (running := [one.task for one in self._running.values()]) and not deadline.done():
            await asyncio.wait([*running, deadline, at_once], return_when=asyncio.FIRST_COMPLETED)
            if at_once.done():
                break
        for one in list(self._running.values()):
            one.interrupt(Interruption.ENDING)
        if tasks := [one.task for one in self._running.values()]:
            await asyncio.wait(tasks)
        for timer in (deadline, at_once):
            timer.cancel()

    async def _settle_at_last(self) -> None:
        with contextlib.suppress(StoreUnavailable):  # else the leases end by themselves
            await self.placement.settle_all()

    async def _close(self) -> None:
        if hasattr(self, "_claims"):
            with contextlib.suppress(StoreUnavailable):
                await self._in_rq_thread(self._claims.close)
        self._rq_thread.shutdown(wait=True)
        await self._wire.aclose()
        await self._redis.aclose()
        self._rq_redis.close()
        log.info("dispatcher has ended", name=self.settings.name)

    # -- chores ---------------------------------------------------------------------------------------------

    async def _every(self, interval_s: float, chore: Callable[[], Any]) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                await chore()
            except StoreUnavailable as error:
                log.warning("a chore has to wait", error=str(error))

    async def _beat(self) -> None:
        claimed = [one.claimed for one in self._running.values()]
        await self._in_rq_thread(self._claims.beat, claimed)
        await self._in_rq_thread(self._claims.maintain)

    async def _watch_batches(self) -> None:
        """Interrupt the shards of batches that were cancelled or removed."""
        by_batch: dict[str, list[_Running]] = {}
        for one in self._running.values():
            if one.batch_id is not None:
                by_batch.setdefault(one.batch_id, []).append(one)
        entries = await self._ledger.entries(list(by_batch))
        for batch_id, running in by_batch.items():
            entry = entries.get(batch_id)
            if entry is None or entry.status == BatchStatus.CANCELLING or BatchStatus(entry.status).final:
                for one in running:
                    one.interrupt(Interruption.UNWANTED)

    def _stop_job(self, job_id: str) -> None:
        running = self._running.get(job_id)
        if running is not None:
            running.interrupt(Interruption.STOPPED)

    # -- jobs -----------------------------------------------------------------------------------------------

    async def _claim_jobs(self, group: asyncio.TaskGroup) -> None:
        """Take jobs while there is room for their requests, until the service ends."""
        idle_s = _IDLE_S[0]
        checked_at = float("-inf")
        suspended = False
        loop = asyncio.get_running_loop()
        while not self._ending.is_set():
            try:
                await self.placement.room()
                if loop.time() - checked_at >= _SUSPENSION_CHECK_S:
                    suspended = await self._in_rq_thread(self._claims.suspended)
                    checked_at = loop.time()
                claimed = None
                if not suspended and self._shards.feeding < _MOST_FEEDING and not self._ending.is_set():
                    claimed = await self._in_rq_thread(self._claims.claim)
            except StoreUnavailable as error:
                log.warning("cannot take jobs now", error=str(error))
                await self._pause(_PAUSE_S[1])
                continue
            if claimed is None:
                await self._pause(idle_s)
                idle_s = _IDLE_S[0] if self._running else min(idle_s * 1.5, _IDLE_S[1])
                continue
            idle_s = _IDLE_S[0]
            self._start(claimed, group)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()

    def _start(self, claimed: Claimed, group: asyncio.TaskGroup) -> None:
        batch_id = str(claimed.args[0]) if claimed.function == jobs.RUN_SHARD and claimed.args else None
        task = group.create_task(self._run_job(claimed))
        self._running[claimed.id] = _Running(claimed, task, batch_id)

    async def _run_job(self, claimed: Claimed) -> None:
        try:
            await self._do(claimed)
        except asyncio.CancelledError:
            running = self._running[claimed.id]
            if running.interruption is None:
                raise
            running.task.uncancel()
            await self._after_interruption(running)
        except Closing:
            await self._acknowledge(self._claims.hand_back, claimed)
        except InlineRequestError as error:
            await self._acknowledge(self._claims.fail, claimed, error, retry=False)
        except (BatchError, BaseExceptionGroup) as error:
            await self._after_trouble(claimed, error)
        except Exception as error:
            log.exception("a job failed", job=claimed.id)
            await self._acknowledge(self._claims.fail, claimed, error, retry=True)
        finally:
            self._running.pop(claimed.id, None)

    async def _do(self, claimed: Claimed) -> None:
        urgency = self.settings.queues.index(claimed.queue.name)
        match claimed.function:
            case jobs.RUN_SHARD:
                batch_id, shard = claimed.args
                await self._after_shard(claimed, await self._shards.run(str(batch_id), int(shard), urgency))
            case jobs.RUN_REQUEST:
                answer = await self._inline.run(claimed.id, urgency, *claimed.args, **claimed.kwargs)
                await self._acknowledge(self._claims.finish, claimed, answer)
            case jobs.FINALISE_BATCH:
                (batch_id,) = claimed.args
                await self._finalise(claimed, str(batch_id))
            case other:
                raise AssertionError(f"claimed {other}")

    async def _after_shard(self, claimed: Claimed, end: ShardEnd) -> None:
        match end:
            case ShardEnd.OPEN:
                await self._acknowledge(self._claims.hand_back, claimed)
            case ShardEnd.FENCED:
                self._claims.drop(claimed)
            case ShardEnd.BATCH_DONE | ShardEnd.NOT_WANTED:
                await self._queue_finaliser(claimed, str(claimed.args[0]))
                await self._acknowledge(self._claims.finish, claimed)
            case ShardEnd.DONE:
                await self._acknowledge(self._claims.finish, claimed)

    async def _queue_finaliser(self, claimed: Claimed, batch_id: str) -> None:
        entry = await self._until_redis_answers(lambda: self._ledger.entry(batch_id), ever=True)
        if entry is not None and not BatchStatus(entry.status).final:
            await self._acknowledge(queues.enqueue_finalise, self._rq_redis, claimed.queue.name, batch_id)

    async def _finalise(self, claimed: Claimed, batch_id: str) -> None:
        while await self._still_kept(claimed.queue.name, batch_id):  # noqa: ASYNC110 - see below
            await asyncio.sleep(_PAUSE_S[0])  # other processes have no event for us
        await self._finaliser.run(batch_id)
        await self._acknowledge(self._claims.finish, claimed)

    async def _still_kept(self, queue: str, batch_id: str) -> bool:
        """Whether somebody still runs a shard of a cancelled batch: it stops soon, keeping what it has."""
        entry = await self._ledger.entry(batch_id)
        if entry is None or entry.status != BatchStatus.CANCELLING:
            return False
        return await self._in_rq_thread(queues.running_shards, self._rq_redis, queue, batch_id) > 0

    async def _after_interruption(self, running: _Running) -> None:
        match running.interruption:
            case Interruption.STOPPED:
                await self._acknowledge(self._claims.stop, running.claimed)
            case Interruption.UNWANTED:
                await self._after_shard(running.claimed, ShardEnd.NOT_WANTED)
            case Interruption.ENDING | None:
                await self._acknowledge(self._claims.hand_back, running.claimed)

    async def _after_trouble(self, claimed: Claimed, error: BaseException) -> None:
        """Files that cannot be read now: say so where people look, and leave the job to whoever can."""
        batch_id = str(claimed.args[0])
        log.error("a batch's files cannot be used", job=claimed.id, error=str(error))
        with contextlib.suppress(StoreUnavailable):
            await self._ledger.set_fields(batch_id, {"trouble": f"{self.settings.name}: {error}"})
        await self._pause(_STORAGE_PAUSE_S)
        await self._acknowledge(self._claims.hand_back, claimed)

    # -- patience -------------------------------------------------------------------------------------------

    async def _in_rq_thread(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._rq_thread, lambda: function(*args, **kwargs))

    async def _acknowledge(self, function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """A step of RQ's bookkeeping that must not be skipped: repeated until Redis answers."""
        await self._until_redis_answers(lambda: self._in_rq_thread(function, *args, **kwargs), ever=True)

    async def _until_redis_answers(self, step: Callable[[], Any], *, ever: bool = False) -> Any:
        """The step's result; None when the service was asked to end before (with `ever`, it goes on)."""
        pause_s = _PAUSE_S[0]
        while ever or not self._ending.is_set():
            try:
                return await step()
            except StoreUnavailable as error:
                log.warning("waiting for Redis", error=str(error), retry_in_s=pause_s)
                if ever and self._now.is_set():
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _PAUSE_S[1])
        return None
