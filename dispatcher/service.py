"""The dispatcher's life: it takes jobs off queues while it has room, and ends without losing any.

It only wires and supervises. RQ's bookkeeping is synchronous and runs in one thread (`bookkeeping`,
`claims`); everything else runs on one asyncio loop: `placement` gives leases, `attempts` runs requests,
`running` holds the jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import structlog

from dispatcher import lengths, shared_speeds, witness
from dispatcher.archive import Archive
from dispatcher.attempts import Attempts, Seen
from dispatcher.batches.ledger import Ledger
from dispatcher.batches.storage import Storage
from dispatcher.bookkeeping import PAUSE_S, Bookkeeping
from dispatcher.claims import JobClaims
from dispatcher.exporter import Exporter
from dispatcher.finaliser import Finaliser
from dispatcher.hedging import Hedging
from dispatcher.held_lines import HeldLines
from dispatcher.inline import InlineRunner
from dispatcher.lengths import AnswerLengths
from dispatcher.lookout import Lookout
from dispatcher.mending import LOOK_S, Mending
from dispatcher.placement import Placement
from dispatcher.presence import HEARTBEAT_S
from dispatcher.queues import waiting_jobs
from dispatcher.recorder import INTERVAL_S, Recorder
from dispatcher.running import FUNCTIONS, RunningJobs
from dispatcher.scheduler.strategies import Strategies
from dispatcher.send import Sender, make_transport
from dispatcher.server import LoopDoor, serving
from dispatcher.settings import DispatcherSettings
from dispatcher.shard import ShardRunner
from dispatcher.shared_demand import SharedDemand
from dispatcher.shared_speeds import SharedSpeeds
from dispatcher.speeds import Speeds
from dispatcher.survey import Survey, survey
from dispatcher.sweeping import Sweeping
from dispatcher.witness import Witness
from workers.connection import connect, connect_sync, server_facts
from workers.errors import StoreUnavailable
from workers.store import FleetStore

log = structlog.get_logger(__name__)

_MOST_FEEDING = 2
"""Shards that send their lines, of one urgency and all above it: each has up to 256 of them."""
_MOST_OPEN = 64
"""Shards with lines left to send, likewise, those included whose models all have to wait."""
_REST_S = 0.5
"""Time from one shard to the next, for each that waits for room already: those fill it at once."""
_MOST_REST_S = 5.0
"""It is no longer, however many wait: jobs that are no shards have to wait for it too."""
_IDLE_S = (0.02, 0.1)
_SUSPENSION_CHECK_S = 1.0


class Dispatcher:
    """One dispatcher. Make it inside a running loop."""

    def __init__(self, settings: DispatcherSettings, *, rng: Random | None = None) -> None:
        rng = rng or Random()
        self.settings = settings
        self._redis = connect(settings.redis_url)
        self._rq_redis = connect_sync(settings.redis_url)
        self._store = FleetStore(
            self._redis, policy=settings.breaker, lease_ttl_s=settings.lease_ttl_s, rng=rng
        )
        self._ledger = Ledger(self._redis)
        self._wire = make_transport(connect_timeout_s=settings.connect_timeout_s)
        strategies = Strategies(settings.scheduler)
        speeds = Speeds()
        self._shared_speeds = SharedSpeeds(self._redis, speeds)
        self._witness = Witness(self._store, stale_after_s=settings.scheduler.stale_after_s)
        lookout = Lookout(
            self._store,
            speeds,
            interval_s=settings.view_interval_s,
            stale_after_s=settings.scheduler.stale_after_s,
            dead_after_s=settings.scheduler.dead_after_s,
            shared_speeds=self._shared_speeds,
            shared_demand=SharedDemand(self._redis, settings.name),
            witness=self._witness,
        )
        self.placement = Placement(
            self._store, lookout, strategies, speeds, Hedging(speeds), owner=settings.name, rng=rng
        )
        self._door = LoopDoor(asyncio.get_running_loop())
        self.exporter = Exporter(self.placement, lambda: self._door.ask(self._look))
        self._recorder = Recorder(
            Archive(self._redis, keep=settings.explain_keep, ttl_s=settings.explain_ttl_s),
            dispatcher=settings.name,
            sample=settings.explain_sample,
            rng=Random(),  # of its own: whether there are records shall not change decisions
        )
        attempts = Attempts(
            self.placement,
            Sender(self._wire),
            strategies,
            settings.retry,
            request_timeout_s=settings.request_timeout_s,
            slowest_rate=settings.slowest_rate,
            rng=rng,
            onlooker=self._saw,
        )
        storage = Storage(settings.storage)
        self._sweeping = Sweeping(storage, self._ledger, settings.queues)
        self._lengths = AnswerLengths(self._redis)
        self._shards = ShardRunner(
            storage,
            self._ledger,
            self.placement,
            attempts,
            owner=settings.name,
            part_lines=settings.part_lines,
            part_age_s=settings.part_age_s,
            hedge=settings.may_hedge,
            lengths=self._lengths,
            held=HeldLines(settings.held_bytes),
            reserved=settings.reserved_keys.changes,
        )
        self._inline = InlineRunner(self.placement, attempts, deadline_s=settings.inline_deadline_s)
        self._finaliser = Finaliser(storage, self._ledger)
        self._ending = asyncio.Event()
        self._now = asyncio.Event()
        self._bookkeeping = Bookkeeping(self._ending, self._now)
        self._jobs: RunningJobs | None = None
        self._takes_jobs = False

    # -- its life -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until `end` is called, or SIGTERM or SIGINT comes; a second one stops at once."""
        self._listen_to_signals()
        claims = None
        try:
            with serving(
                self.exporter.registry,
                self.settings.metrics_port,
                self.settings.metrics_host,
                alive=self._door.answers,
                ready=lambda: self._takes_jobs and not self._ending.is_set(),
            ):
                claims = await self._open()
                if claims is not None:
                    await self._work(claims)
        finally:
            await self._close(claims)

    def end(self) -> None:
        """Stop claiming, let what is in flight finish for a while, hand back the rest; again: stop now."""
        if self._ending.is_set():
            self._now.set()
        self._ending.set()
        self.placement.close()

    async def _look(self) -> Survey:
        return await survey(
            self._ledger,
            lambda: self._bookkeeping.step(waiting_jobs, self._rq_redis, self.settings.queues),
        )

    def _saw(self, seen: Seen) -> None:
        self.exporter.saw(seen)
        if self.settings.explain_keep:
            self._recorder.saw(seen)

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, self.end)

    async def _open(self) -> JobClaims | None:
        """Appear to others, as soon as Redis answers; None: it did not before the end was asked for."""
        loop = asyncio.get_running_loop()

        def stop_from_thread(job_id: str) -> None:
            loop.call_soon_threadsafe(self._stop_job, job_id)

        def make() -> JobClaims:
            return JobClaims(
                self._rq_redis,
                self.settings.queues,
                name=self.settings.name,
                functions=FUNCTIONS,
                on_stop=stop_from_thread,
            )

        patiently = self._bookkeeping.until_redis_answers
        facts = await patiently(lambda: server_facts(self._redis))
        if facts is not None and facts.warning:
            log.warning(facts.warning)
        claims = await patiently(lambda: self._bookkeeping.step(make))
        if claims is not None:
            await patiently(lambda: self._bookkeeping.step(claims.open))
            log.info("dispatcher is ready", name=self.settings.name, queues=list(self.settings.queues))
        return claims

    def _stop_job(self, job_id: str) -> None:
        if self._jobs is not None:
            self._jobs.stop(job_id)

    async def _work(self, claims: JobClaims) -> None:
        held = self._jobs = RunningJobs(
            claims,
            self._bookkeeping,
            self._rq_redis,
            self._ledger,
            shards=self._shards,
            inline=self._inline,
            finaliser=self._finaliser,
            queue_names=self.settings.queues,
            owner=self.settings.name,
            ending=self._ending,
        )
        mending = Mending(self._ledger, self._bookkeeping, self._rq_redis)
        async with asyncio.TaskGroup() as group:
            chores = [
                group.create_task(chore)
                for chore in (
                    self.placement.run(),
                    self._every(self.settings.lease_ttl_s / 4, self.placement.renew),
                    self._every(INTERVAL_S, self._recorder.flush),
                    self._every(lengths.INTERVAL_S, self._lengths.flush),
                    self._every(shared_speeds.INTERVAL_S, self._shared_speeds.tell),
                    self._every(witness.INTERVAL_S, self._witness.tell),
                    self._every(HEARTBEAT_S, lambda: self._beat(claims, held)),
                    self._every(self.settings.watch_interval_s, held.interrupt_unwanted),
                    self._every(LOOK_S, mending.look),
                    self._every(self.settings.sweep_interval_s, self._sweeping.look),
                )
            ]
            await self._claim_jobs(claims, held, group)
            await self._drain(held)
            for chore in chores:
                chore.cancel()
            await asyncio.wait(chores)
        await self._settle_at_last()

    async def _drain(self, held: RunningJobs) -> None:
        """Give what is in flight its time, then hand back what is left."""
        deadline = asyncio.create_task(asyncio.sleep(self.settings.drain_timeout_s))
        at_once = asyncio.create_task(self._now.wait())
        while (tasks := held.tasks) and not deadline.done():
            await asyncio.wait([*tasks, deadline, at_once], return_when=asyncio.FIRST_COMPLETED)
            if at_once.done():
                break
        held.interrupt_all()
        if tasks := held.tasks:
            await asyncio.wait(tasks)
        for timer in (deadline, at_once):
            timer.cancel()

    async def _settle_at_last(self) -> None:
        with contextlib.suppress(StoreUnavailable):  # else the leases end by themselves
            await self.placement.settle_all()
            await self._recorder.flush()
            await self._lengths.flush()

    async def _close(self, claims: JobClaims | None) -> None:
        if claims is not None:
            with contextlib.suppress(StoreUnavailable):
                await self._bookkeeping.step(claims.close)
        self._bookkeeping.close()
        await self._wire.aclose()
        await self._redis.aclose()
        self._rq_redis.close()
        self._finaliser.close()
        log.info("dispatcher has ended", name=self.settings.name)

    # -- chores ---------------------------------------------------------------------------------------------

    async def _every(self, interval_s: float, chore: Callable[[], Any]) -> None:
        failing = False
        while True:
            await asyncio.sleep(interval_s)
            try:
                await chore()
                failing = False
            except StoreUnavailable as error:
                log.warning("a chore has to wait", error=str(error))
            except Exception:
                # It must end neither the service nor what is in flight, nor fill the log.
                if not failing:
                    log.exception("a chore failed")
                failing = True

    async def _beat(self, claims: JobClaims, held: RunningJobs) -> None:
        await self._bookkeeping.step(claims.beat, held.claimed)
        await self._bookkeeping.step(claims.maintain)

    # -- taking jobs ----------------------------------------------------------------------------------------

    async def _claim_jobs(self, claims: JobClaims, held: RunningJobs, group: asyncio.TaskGroup) -> None:
        """Take jobs while there is room for their requests, until the service ends.

        What is less urgent takes no room from them: it goes after them anyway.
        """
        idle_s = _IDLE_S[0]
        checked_at = float("-inf")
        suspended = False
        loop = asyncio.get_running_loop()
        while not self._ending.is_set():
            if claims.clock_is_off:
                await self._take_no_jobs(_IDLE_S[1])
                continue
            try:
                queues = self._queues_with_room
                if loop.time() - checked_at >= _SUSPENSION_CHECK_S:
                    suspended = await self._bookkeeping.step(claims.suspended)
                    checked_at = loop.time()
                claimed = None
                if queues and not suspended and not self._ending.is_set():
                    claimed = await self._bookkeeping.step(claims.claim, queues)
                nothing = claimed is None and not claims.more_waits and queues == len(self.settings.queues)
                feeding = self._shards.feeding.total() > 0
                self.placement.note_left(nothing=nothing and not feeding)
                self._takes_jobs = True
            except StoreUnavailable as error:
                log.warning("cannot take jobs now", error=str(error))
                await self._take_no_jobs(PAUSE_S[1])
                continue
            except Exception:  # a mistake of ours, or a key that somebody spoiled, must not end all that runs
                log.exception("cannot take jobs now", retry_in_s=PAUSE_S[1])
                await self._take_no_jobs(PAUSE_S[1])
                continue
            if claimed is None:
                idle_s = _IDLE_S[0] if claims.more_waits else min(idle_s * 1.5, _IDLE_S[1])
                if await self._something_changes(held, queues, idle_s):
                    idle_s = _IDLE_S[0]
                continue
            idle_s = _IDLE_S[0]
            held.start(claimed, group)
            await asyncio.sleep(0)  # lets its request join the backlog, so that it is counted

    async def _take_no_jobs(self, seconds: float) -> None:
        self._takes_jobs = False
        await self._pause(seconds)

    @property
    def _queues_with_room(self) -> int:
        """Of how many queues, the most urgent first, another job's requests have room."""
        urgencies = range(len(self.settings.queues))
        return next(
            (
                urgency
                for urgency in urgencies
                if self._shards_suffice(urgency) or not self.placement.has_room(urgency)
            ),
            len(urgencies),
        )

    def _shards_suffice(self, urgency: int) -> bool:
        """Whether shards that are so urgent, or more so, bring all that they should.

        Where some wait for room, it is seen for a moment only. Jobs are looked for then, or one that is no
        shard would wait for the end of all these; but not each time, or all shards would come to be here.
        """
        feeding, blocked = (_up_to(urgency, of) for of in (self._shards.feeding, self._shards.blocked))
        if feeding - blocked >= _MOST_FEEDING or feeding >= _MOST_OPEN:
            return True
        rest_s = min(_REST_S * blocked, _MOST_REST_S)
        rests = self._shards.clock() - self._shards.begun_s < rest_s
        return rests and not self.placement.others_idle

    async def _something_changes(self, held: RunningJobs, queues: int, within_s: float) -> bool:
        """Wait so long for room for jobs of more queues than so many, or for the end of one of our jobs: it
        may have queued another, a finaliser mostly.
        """
        hoped: list[asyncio.Task[Any]] = [asyncio.create_task(held.ended.wait())]
        if queues < len(self.settings.queues) and not self._shards_suffice(queues):
            hoped.append(asyncio.create_task(self.placement.any_room(queues)))
        try:
            changes, _ = await asyncio.wait(hoped, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in hoped:
                one.cancel()
        held.ended.clear()
        return bool(changes)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()


def _up_to(urgency: int, counts: Counter[int]) -> int:
    """How many there are of what is so urgent, or more so."""
    return sum(count for of, count in counts.items() if of <= urgency)
