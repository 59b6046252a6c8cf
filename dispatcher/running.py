"""The jobs that a dispatcher holds: what each kind does, and how its end is told to RQ.

Which jobs are taken, and when all have to end, is `service`'s subject; the work itself that of the three
runners: `shard`, `inline`, `finaliser`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any

import structlog

from dispatcher import jobs, queues
from dispatcher.batches.errors import BatchError, ShardsLeftError
from dispatcher.batches.ledger import Claim, Ledger
from dispatcher.batches.record import BatchStatus
from dispatcher.bookkeeping import PAUSE_S, Bookkeeping
from dispatcher.claimed import Claimed
from dispatcher.claims import JobClaims
from dispatcher.finaliser import Finaliser
from dispatcher.inline import InlineRunner
from dispatcher.inline_request import InlineRequestError
from dispatcher.placement import Closing
from dispatcher.shard import NoSuchShardError, ShardEnd, ShardRunner
from dispatcher.stop import Stop
from workers.connection import SyncRedis
from workers.errors import StoreUnavailable, TryAgain

log = structlog.get_logger(__name__)

FUNCTIONS: Mapping[str, Callable[..., object]] = {
    jobs.RUN_SHARD: jobs.run_shard,
    jobs.RUN_REQUEST: jobs.run_request,
    jobs.FINALISE_BATCH: jobs.finalise_batch,
}
"""What a dispatcher runs, and the arguments that each takes; a job that names anything else is failed."""
_STORAGE_PAUSE_S = 5.0


class Interruption(StrEnum):
    """Why a running job was cancelled.

    ending: this service stops. stopped: RQ's stop-job, on an inline request. unwanted: its batch was
    cancelled, or is gone.
    """

    ENDING = auto()
    STOPPED = auto()
    UNWANTED = auto()


@dataclass(slots=True, eq=False)
class _Running:
    claimed: Claimed
    task: asyncio.Task[None] = field(init=False)
    begun: bool = False
    """A task that is cancelled before its first step would never tell its end."""
    interruption: Interruption | None = None
    stop: Stop = field(default_factory=Stop)
    """RQ's stop-job, on a shard: it goes on to its end, sending nothing more."""
    claim: Claim | None = None
    """Its claim on its shard, once there is one."""
    ending: bool = False
    """Its end is being told: too late for an interruption, which would tell another one."""

    @property
    def batch_id(self) -> str | None:
        """The batch it works for; None: an inline request."""
        batch_id = _arguments(self.claimed).get("batch_id")
        return None if batch_id is None else str(batch_id)

    def hold(self, claim: Claim) -> None:
        self.claim = claim

    def interrupt(self, why: Interruption) -> None:
        if self.interruption is None and not self.ending:
            self.interruption = why
            if self.begun:
                self.task.cancel()


class RunningJobs:
    """All that one dispatcher holds now."""

    def __init__(
        self,
        claims: JobClaims,
        bookkeeping: Bookkeeping,
        rq_redis: SyncRedis,
        ledger: Ledger,
        *,
        shards: ShardRunner,
        inline: InlineRunner,
        finaliser: Finaliser,
        queue_names: tuple[str, ...],
        owner: str,
        ending: asyncio.Event,
    ) -> None:
        """`queue_names`, most urgent first, make the urgency of a job; `owner` names us to people."""
        self._claims = claims
        self._bookkeeping = bookkeeping
        self._rq_redis = rq_redis
        self._ledger = ledger
        self._shards = shards
        self._inline = inline
        self._finaliser = finaliser
        self._queue_names = queue_names
        self._owner = owner
        self._ending = ending
        self._running: dict[str, _Running] = {}
        """By execution: after an outage a job may be claimed anew beside its old claim."""
        self.ended = asyncio.Event()
        """Set whenever a job has ended, which may have queued another; whoever waits for it clears it."""

    def __len__(self) -> int:
        return len(self._running)

    @property
    def claimed(self) -> list[Claimed]:
        """What is held, for heartbeats."""
        return [one.claimed for one in self._running.values()]

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """One for each job; it ends when the job's end is told to RQ."""
        return [one.task for one in self._running.values()]

    def start(self, claimed: Claimed, group: asyncio.TaskGroup) -> None:
        """Begin a job's work as a task of the group."""
        running = self._running[claimed.execution.id] = _Running(claimed)
        running.task = group.create_task(self._run_job(running))

    # -- interruptions --------------------------------------------------------------------------------------

    def stop(self, job_id: str) -> None:
        """Stop a job because someone asked through RQ; nothing happens when it is not held.

        A finaliser is not stopped: its batch would never end.
        """
        for one in list(self._running.values()):
            if one.claimed.id != job_id:
                continue
            match one.claimed.function:
                case jobs.RUN_SHARD:
                    one.stop.want()
                case jobs.RUN_REQUEST:
                    one.interrupt(Interruption.STOPPED)
                case _:
                    log.warning("a finaliser is not stopped", job=job_id)

    def interrupt_all(self) -> None:
        """Stop everything that is left: the service ends. Jobs are handed back."""
        for one in list(self._running.values()):
            one.interrupt(Interruption.ENDING)

    async def interrupt_unwanted(self) -> None:
        """Stop the shards of batches that were cancelled or removed. Raises StoreUnavailable."""
        by_batch: dict[str, list[_Running]] = {}
        for one in self._running.values():
            if one.claimed.function == jobs.RUN_SHARD and one.batch_id is not None:
                by_batch.setdefault(one.batch_id, []).append(one)
        entries = await self._ledger.entries(list(by_batch))
        for batch_id, running in by_batch.items():
            entry = entries.get(batch_id)
            if entry is None or entry.status == BatchStatus.CANCELLING or entry.ended:
                for one in running:
                    one.interrupt(Interruption.UNWANTED)

    # -- one job --------------------------------------------------------------------------------------------

    async def _run_job(self, running: _Running) -> None:
        """One job's fault must not end the service: if its end cannot be told, our claim on it runs out."""
        running.begun = True
        try:
            await self._run_to_its_end(running)
        except Exception:
            log.exception("a job's end could not be told", job=running.claimed.id)
        finally:
            del self._running[running.claimed.execution.id]
            self.ended.set()

    async def _run_to_its_end(self, running: _Running) -> None:
        try:
            if running.interruption is None:
                await self._do(running)
            else:
                await self._after_interruption(running)
        except asyncio.CancelledError:
            if running.interruption is None:
                raise
            running.task.uncancel()
            await self._after_interruption(running)
        except (Closing, TryAgain):
            await self._hand_back(running)
        except (InlineRequestError, NoSuchShardError) as error:
            await self._tell(running, self._claims.fail, error, retry=False)
        except (BatchError, BaseExceptionGroup) as error:
            await self._after_trouble(running, error)
        except Exception as error:
            log.exception("a job failed", job=running.claimed.id)
            await self._did_not_die(running)
            await self._tell(running, self._claims.fail, error, retry=True)

    async def _do(self, running: _Running) -> None:
        claimed = running.claimed
        urgency = self._queue_names.index(claimed.queue.name)
        given = _arguments(claimed)
        match claimed.function:
            case jobs.RUN_SHARD:
                end = await self._shards.run(
                    str(given["batch_id"]),
                    _shard_number(given["shard"]),
                    urgency,
                    running.stop,
                    running.hold,
                )
                await self._after_shard(running, end)
            case jobs.RUN_REQUEST:
                answer = await self._inline.run(claimed, urgency, **given)
                await self._tell(running, self._claims.finish, answer)
            case jobs.FINALISE_BATCH:
                await self._finalise(running, str(given["batch_id"]))
            case other:
                raise AssertionError(f"claimed {other}")

    async def _finalise(self, running: _Running, batch_id: str) -> None:
        while await self._still_kept(running.claimed.queue.name, batch_id):  # noqa: ASYNC110 - see below
            await asyncio.sleep(PAUSE_S[0])  # other processes have no event for us
        try:
            await self._finaliser.run(batch_id)
        except ShardsLeftError as error:
            queue = running.claimed.queue.name
            await self._bookkeeping.surely(
                queues.enqueue_shards, self._rq_redis, queue, batch_id, error.shards
            )
            # This job stays: the last shard cannot queue it while it is there, and looks again for those
            # whose own jobs were just ending.
            await self._pause(PAUSE_S[0])
            await self._tell(running, self._claims.hand_back)
        else:
            await self._tell(running, self._claims.finish)
            await self._queue_finaliser(running)  # nothing happens, unless Redis has lost the batch's end

    async def _still_kept(self, queue: str, batch_id: str) -> bool:
        """Whether somebody still runs a shard of a cancelled batch: it stops soon, keeping what it has."""
        entry = await self._ledger.entry(batch_id)
        if entry is None or entry.status != BatchStatus.CANCELLING:
            return False
        return await self._bookkeeping.step(queues.running_shards, self._rq_redis, queue, batch_id) > 0

    # -- its end --------------------------------------------------------------------------------------------

    async def _tell(self, running: _Running, how: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Tell RQ a job's end: one of `claims`' ways, once, whatever interrupts."""
        running.ending = True
        await self._bookkeeping.surely(how, running.claimed, *args, **kwargs)

    async def _hand_back(self, running: _Running) -> None:
        stood = await self._did_not_die(running)
        await self._tell(running, self._claims.hand_back if stood else self._claims.drop)

    async def _did_not_die(self, running: _Running) -> bool:
        """Say of a shard's claim that it ends in an orderly way, whatever becomes of its job.

        False: somebody else claimed the shard meanwhile, through a job of the same name.
        """
        running.ending = True
        if (claim := running.claim) is None:
            return True
        stood = await self._bookkeeping.until_redis_answers(
            lambda: self._ledger.hand_back(claim, self._owner), ever=True
        )
        return bool(stood)

    async def _after_shard(self, running: _Running, end: ShardEnd) -> None:
        running.ending = True
        match end:
            case ShardEnd.OPEN:
                await self._hand_back(running)
            case ShardEnd.FENCED:
                await self._did_not_die(running)
                await self._tell(running, self._claims.drop)
            case ShardEnd.BATCH_DONE:
                await self._queue_finaliser(running)
                await self._acknowledge_done(running)
            case ShardEnd.NOT_WANTED:
                await self._queue_finaliser(running)
                await self._acknowledge(running)
            case ShardEnd.DONE:
                await self._acknowledge_done(running)

    async def _acknowledge(self, running: _Running) -> None:
        await self._tell(running, self._claims.stop if running.stop.wanted else self._claims.finish)

    async def _acknowledge_done(self, running: _Running) -> None:
        """Acknowledge a shard that was reported done, and queue it again if Redis has lost that report.

        A failover between the two may lose the one and keep the other, and nobody else would ever notice.
        """
        await self._acknowledge(running)
        batch_id, shard = str(running.batch_id), int(_arguments(running.claimed)["shard"])
        lost = await self._bookkeeping.until_redis_answers(
            lambda: self._ledger.left_open(batch_id, shard), ever=True
        )
        if lost:
            log.warning("redis lost the end of a shard", batch=batch_id, shard=shard)
            queue = running.claimed.queue.name
            await self._bookkeeping.surely(queues.enqueue_shards, self._rq_redis, queue, batch_id, [shard])

    async def _queue_finaliser(self, running: _Running) -> None:
        batch_id = str(running.batch_id)
        entry = await self._bookkeeping.until_redis_answers(lambda: self._ledger.entry(batch_id), ever=True)
        if entry is not None and not entry.ended:
            queue = running.claimed.queue.name
            await self._bookkeeping.surely(queues.enqueue_finalise, self._rq_redis, queue, batch_id)

    async def _after_interruption(self, running: _Running) -> None:
        match running.interruption:
            case Interruption.STOPPED:
                await self._tell(running, self._claims.stop)
            case Interruption.UNWANTED:
                await self._after_shard(running, ShardEnd.NOT_WANTED)
            case Interruption.ENDING | None:
                await self._hand_back(running)

    async def _after_trouble(self, running: _Running, error: BaseException) -> None:
        """Files that cannot be read now: say so where people look, and leave the job to whoever can."""
        running.ending = True
        causes = "; ".join(str(cause) for cause in _causes(error))
        log.error("a batch's files cannot be used", job=running.claimed.id, error=causes)
        if running.batch_id is not None:
            with contextlib.suppress(StoreUnavailable):
                await self._ledger.set_fields(running.batch_id, {"trouble": f"{self._owner}: {causes}"})
        await self._pause(_STORAGE_PAUSE_S)
        await self._hand_back(running)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()


def _arguments(claimed: Claimed) -> dict[str, Any]:
    """A job's arguments by name; `claims` has seen that they fit."""
    signature = inspect.signature(FUNCTIONS[claimed.function])
    return signature.bind(*claimed.args, **claimed.kwargs).arguments


def _shard_number(given: Any) -> int:
    if type(given) is not int:  # anybody may have written the job
        raise NoSuchShardError("a shard is a whole number")
    return given


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The errors that a group is made of, however deep."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _causes(inner)
    else:
        yield error
