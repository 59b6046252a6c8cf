"""The jobs that a dispatcher holds: what each kind does, and how its end is told to RQ.

Which jobs are taken, and when all have to end, is `service`'s subject; the work itself that of the three
runners: `shard`, `inline`, `finaliser`.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from enum import StrEnum, auto

import structlog

from dispatcher import jobs, queues
from dispatcher.batches.errors import BatchError
from dispatcher.batches.ledger import Ledger
from dispatcher.batches.record import BatchStatus
from dispatcher.bookkeeping import PAUSE_S, Bookkeeping
from dispatcher.claims import Claimed, JobClaims
from dispatcher.finaliser import Finaliser
from dispatcher.inline import InlineRequestError, InlineRunner
from dispatcher.placement import Closing
from dispatcher.shard import ShardEnd, ShardRunner
from workers.connection import SyncRedis
from workers.errors import StoreUnavailable

log = structlog.get_logger(__name__)

FUNCTIONS = (jobs.RUN_SHARD, jobs.RUN_REQUEST, jobs.FINALISE_BATCH)
"""What a dispatcher runs; a job that names anything else is failed."""
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
        batch_id = str(claimed.args[0]) if claimed.function == jobs.RUN_SHARD and claimed.args else None
        task = group.create_task(self._run_job(claimed))
        self._running[claimed.id] = _Running(claimed, task, batch_id)

    # -- interruptions --------------------------------------------------------------------------------------

    def stop(self, job_id: str) -> None:
        """Stop a job because someone asked through RQ; nothing happens when it is not held."""
        running = self._running.get(job_id)
        if running is not None:
            running.interrupt(Interruption.STOPPED)

    def interrupt_all(self) -> None:
        """Stop everything that is left: the service ends. Jobs are handed back."""
        for one in list(self._running.values()):
            one.interrupt(Interruption.ENDING)

    async def interrupt_unwanted(self) -> None:
        """Stop the shards of batches that were cancelled or removed. Raises StoreUnavailable."""
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

    # -- one job --------------------------------------------------------------------------------------------

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
            await self._bookkeeping.surely(self._claims.hand_back, claimed)
        except InlineRequestError as error:
            await self._bookkeeping.surely(self._claims.fail, claimed, error, retry=False)
        except (BatchError, BaseExceptionGroup) as error:
            await self._after_trouble(claimed, error)
        except Exception as error:
            log.exception("a job failed", job=claimed.id)
            await self._bookkeeping.surely(self._claims.fail, claimed, error, retry=True)
        finally:
            self._running.pop(claimed.id, None)

    async def _do(self, claimed: Claimed) -> None:
        urgency = self._queue_names.index(claimed.queue.name)
        match claimed.function:
            case jobs.RUN_SHARD:
                batch_id, shard = claimed.args
                await self._after_shard(claimed, await self._shards.run(str(batch_id), int(shard), urgency))
            case jobs.RUN_REQUEST:
                answer = await self._inline.run(claimed.id, urgency, *claimed.args, **claimed.kwargs)
                await self._bookkeeping.surely(self._claims.finish, claimed, answer)
            case jobs.FINALISE_BATCH:
                (batch_id,) = claimed.args
                await self._finalise(claimed, str(batch_id))
            case other:
                raise AssertionError(f"claimed {other}")

    # -- its end --------------------------------------------------------------------------------------------

    async def _after_shard(self, claimed: Claimed, end: ShardEnd) -> None:
        match end:
            case ShardEnd.OPEN:
                await self._bookkeeping.surely(self._claims.hand_back, claimed)
            case ShardEnd.FENCED:
                self._claims.drop(claimed)
            case ShardEnd.BATCH_DONE | ShardEnd.NOT_WANTED:
                await self._queue_finaliser(claimed, str(claimed.args[0]))
                await self._bookkeeping.surely(self._claims.finish, claimed)
            case ShardEnd.DONE:
                await self._bookkeeping.surely(self._claims.finish, claimed)

    async def _queue_finaliser(self, claimed: Claimed, batch_id: str) -> None:
        entry = await self._bookkeeping.until_redis_answers(lambda: self._ledger.entry(batch_id), ever=True)
        if entry is not None and not BatchStatus(entry.status).final:
            await self._bookkeeping.surely(
                queues.enqueue_finalise, self._rq_redis, claimed.queue.name, batch_id
            )

    async def _finalise(self, claimed: Claimed, batch_id: str) -> None:
        while await self._still_kept(claimed.queue.name, batch_id):  # noqa: ASYNC110 - see below
            await asyncio.sleep(PAUSE_S[0])  # other processes have no event for us
        await self._finaliser.run(batch_id)
        await self._bookkeeping.surely(self._claims.finish, claimed)

    async def _still_kept(self, queue: str, batch_id: str) -> bool:
        """Whether somebody still runs a shard of a cancelled batch: it stops soon, keeping what it has."""
        entry = await self._ledger.entry(batch_id)
        if entry is None or entry.status != BatchStatus.CANCELLING:
            return False
        return await self._bookkeeping.step(queues.running_shards, self._rq_redis, queue, batch_id) > 0

    async def _after_interruption(self, running: _Running) -> None:
        match running.interruption:
            case Interruption.STOPPED:
                await self._bookkeeping.surely(self._claims.stop, running.claimed)
            case Interruption.UNWANTED:
                await self._after_shard(running.claimed, ShardEnd.NOT_WANTED)
            case Interruption.ENDING | None:
                await self._bookkeeping.surely(self._claims.hand_back, running.claimed)

    async def _after_trouble(self, claimed: Claimed, error: BaseException) -> None:
        """Files that cannot be read now: say so where people look, and leave the job to whoever can."""
        batch_id = str(claimed.args[0])
        log.error("a batch's files cannot be used", job=claimed.id, error=str(error))
        with contextlib.suppress(StoreUnavailable):
            await self._ledger.set_fields(batch_id, {"trouble": f"{self._owner}: {error}"})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STORAGE_PAUSE_S):
                await self._ending.wait()
        await self._bookkeeping.surely(self._claims.hand_back, claimed)
