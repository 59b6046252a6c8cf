"""One shard's life: claim it, send the lines that have no durable result, keep what comes back, count it.

Reading and writing files is `batches`' subject, one request's life `attempts`'; lines become requests, and
answers results, in `exchange`. The order of steps is the point: a result is durable before it is counted, the
shard counted done before its job is acknowledged.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum, auto
from functools import partial
from typing import assert_never

import structlog

from dispatcher.attempts import Answered, Attempts, Course, Request, Unanswered
from dispatcher.batches.errors import StorageError
from dispatcher.batches.ledger import Claim, Entry, Ledger
from dispatcher.batches.parse import Line
from dispatcher.batches.parts import shard_entries
from dispatcher.batches.plan import Plan, PlannedRequest, open_plan, read_lines
from dispatcher.batches.poison import LONE_DEATHS, GiveUp, Send, next_step
from dispatcher.batches.results import error_code
from dispatcher.batches.storage import BatchFiles, Storage
from dispatcher.exchange import Exchange, shared_prefixes
from dispatcher.held_lines import HeldLines
from dispatcher.keeper import Keeper
from dispatcher.lengths import AnswerLengths
from dispatcher.placement import Closing, Placement
from dispatcher.reserved import Changes
from dispatcher.stop import Stop
from dispatcher.unsent import Unsent
from workers.errors import Fenced, ForebayError

log = structlog.get_logger(__name__)

_CHUNK = 32
"""Lines read at once; fewer where they are large."""
LATE = "batch_expired"
_READ_PATIENCE_S = 60.0
"""How long lines are tried to be read; then the shard is left to whoever can."""
_READ_PAUSE_S = (0.5, 5.0)
STOPPED = "job_stopped"
POISON = "poison_line"


class NoSuchShardError(ForebayError):
    """A job names a shard that its batch does not have."""


class ShardEnd(StrEnum):
    """How a run of a shard ended, for its job.

    DONE: every line has a durable result; acknowledge. BATCH_DONE: and it was the batch's last shard; queue
    the finaliser first. OPEN: lines are left, this dispatcher ends; hand back. NOT_WANTED: the batch is
    cancelled, ended or gone; acknowledge. FENCED: somebody else holds the shard by now; leave the job alone.
    """

    DONE = auto()
    BATCH_DONE = auto()
    OPEN = auto()
    NOT_WANTED = auto()
    FENCED = auto()


class ShardRunner:
    """Runs shards; one object for all of a dispatcher's."""

    def __init__(
        self,
        storage: Storage,
        ledger: Ledger,
        placement: Placement,
        attempts: Attempts,
        *,
        owner: str,
        part_lines: int,
        part_age_s: float,
        hedge: bool,
        lengths: AnswerLengths | None = None,
        reserved: Changes | None = None,
        held: HeldLines | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`owner` is unique among dispatchers, also over restarts: part files are named after it. `hedge`:
        whether requests of batches that do not say may get second attempts. `lengths` learns how long
        answers get; None: nobody does. `reserved` is done to all bodies. `held` bounds what all
        shards hold; None: with the usual bound.
        """
        self.storage = storage
        self.ledger = ledger
        self.placement = placement
        self.attempts = attempts
        self.owner = owner
        self.part_lines = part_lines
        self.part_age_s = part_age_s
        self.hedge = hedge
        self.lengths = lengths
        self.reserved = reserved
        self.held = held or HeldLines()
        self.clock = clock
        self.begun_s = -math.inf
        """When the last one was begun, on the clock."""
        self.feeding: Counter[int] = Counter()
        """Shards that have lines left to send, by urgency: while there are some, another brings nothing."""
        self.blocked: Counter[int] = Counter()
        """Those of them that wait for room: the workers of all their models have enough waiting here."""

    async def run(
        self,
        batch_id: str,
        shard: int,
        urgency: int,
        stop: Stop | None = None,
        on_claim: Callable[[Claim], object] = lambda _: None,
    ) -> ShardEnd:
        """Answer what is unanswered of a shard. Raises StorageError when its plan or input cannot be read,
        NoSuchShardError.

        Cancelling it closes its connections and keeps what came back so far; so does `stop`, after which
        every line that is left ends with an error, and the shard as ever. `on_claim` hears of the claim as
        soon as it is made: unless the shard is done, whoever goes on living hands it back to the ledger.
        """
        self.begun_s = self.clock()
        self.feeding[urgency] += 1
        try:
            run, todo = await self._begin(batch_id, shard, urgency, stop or Stop(), on_claim)
        except BaseException:
            self.feeding[urgency] -= 1
            raise
        if run is None:
            self.feeding[urgency] -= 1
            return ShardEnd.NOT_WANTED
        return await run.to_its_end(todo)

    async def _begin(
        self, batch_id: str, shard: int, urgency: int, stop: Stop, on_claim: Callable[[Claim], object]
    ) -> tuple[_Run | None, Sequence[PlannedRequest]]:
        entry = await self.ledger.entry(batch_id)
        if entry is not None and not 0 <= shard < entry.shards:
            raise NoSuchShardError(f"{batch_id} has no shard {shard}")
        claim = await self.ledger.claim(batch_id, shard, self.owner) if entry else ""
        if entry is None or isinstance(claim, str):
            return None, ()
        on_claim(claim)
        if claim.past.died:
            log.warning("claims of a shard died", batch=batch_id, shard=shard, died=claim.past.died)
        files = self.storage.files(batch_id)
        plan = await asyncio.to_thread(open_plan, files)
        exchange = Exchange(
            entry,
            urgency=urgency,
            deadline_s=await self._deadline(entry),
            late_code=LATE,
            usually_hedge=self.hedge,
            reserved=self.reserved,
        )
        troubled = entry.trouble is not None
        run = _Run(self, claim, files, exchange, stop, urgency=urgency, troubled=troubled)
        return run, await asyncio.to_thread(run.pick_up, plan)

    async def _deadline(self, entry: Entry) -> float:
        return self.clock() + (entry.expires_at - await self.ledger.now())


class _Run:
    """One claim's work on one shard."""

    def __init__(
        self,
        runner: ShardRunner,
        claim: Claim,
        files: BatchFiles,
        exchange: Exchange,
        stop: Stop,
        *,
        urgency: int,
        troubled: bool,
    ) -> None:
        self._runner = runner
        self._claim = claim
        self._files = files
        self._exchange = exchange
        self._stop = stop
        self._urgency = urgency
        self._keeper = Keeper(
            files,
            runner.ledger,
            claim,
            owner=runner.owner,
            part_lines=runner.part_lines,
            part_age_s=runner.part_age_s,
            troubled=troubled,
        )
        self._positions: dict[int, int] = {}
        """Line to its place in the shard's part of the plan."""
        self._left_open = False

    def pick_up(self, plan: Plan) -> list[PlannedRequest]:
        """Count what earlier claims made durable; returns the rest. Blocks on the storage."""
        planned = plan.shard(self._claim.shard)
        self._positions = {request.line: position for position, request in enumerate(planned)}
        costs = {request.line: request for request in planned}
        for result in shard_entries(self._files, self._claim.shard):
            request = costs.pop(result.line, None)
            if request is not None:
                late = not result.ok and error_code(result.record) == LATE
                self._keeper.count_durable(result, request.cost_tokens, late=late)
        return list(costs.values())

    async def to_its_end(self, todo: Sequence[PlannedRequest]) -> ShardEnd:
        try:
            await self._answer_all(todo)
            return ShardEnd.OPEN if self._left_open else await self._done()
        except asyncio.CancelledError:
            await self._keeper.write_last()
            raise
        except Fenced:
            return self._taken_over()
        except BaseExceptionGroup as group:
            fenced, others = group.split(Fenced)
            if fenced is None:
                await self._keeper.write_last()
            if fenced is None or others is not None:
                raise
            return self._taken_over()

    async def _done(self) -> ShardEnd:
        standing = await self._keeper.done()
        return ShardEnd.BATCH_DONE if standing.all_done else ShardEnd.DONE

    def _taken_over(self) -> ShardEnd:
        log.info("shard was taken over", batch=self._claim.batch_id, shard=self._claim.shard)
        return ShardEnd.FENCED

    async def _answer_all(self, todo: Sequence[PlannedRequest]) -> None:
        async with asyncio.TaskGroup() as keeping:
            keeping.create_task(self._keeper.run())
            async with asyncio.TaskGroup() as lines:
                await self._send(todo, lines)
            self._keeper.close()

    # -- sending --------------------------------------------------------------------------------------------

    async def _send(self, todo: Sequence[PlannedRequest], group: asyncio.TaskGroup) -> None:
        try:
            if self._claim.past.careful:
                await self._send_carefully(todo)
            else:
                await self._send_in_chunks(todo, group)
        finally:
            self._runner.feeding[self._urgency] -= 1

    async def _send_carefully(self, todo: Sequence[PlannedRequest]) -> None:
        """One group at a time, each durable before the next: earlier claims died, and a line may be why."""
        left = {self._positions[request.line]: request for request in todo}
        while left and not self._left_open:
            match next_step(self._claim.past, list(left), len(self._positions)):
                case GiveUp(position):
                    await self._give_up(left.pop(position))
                case Send(positions):
                    group = range(positions[0], positions[-1] + 1)
                    await self._send_group([left.pop(position) for position in positions], group)
                case other:
                    assert_never(other)

    async def _send_group(self, requests: Sequence[PlannedRequest], group: range) -> None:
        note = partial(self._keeper.note_group, group)
        alone = note if len(requests) == 1 else None
        if alone is None:
            await note()
        async with asyncio.TaskGroup() as lines:
            await self._send_in_chunks(requests, lines, alone)
        if not self._left_open:
            await self._keeper.all_durable()

    async def _give_up(self, planned: PlannedRequest) -> None:
        [line] = await self._read([planned])
        log.error("a line is given up", batch=self._claim.batch_id, line=line.number)
        message = f"{LONE_DEATHS} dispatchers died of it while they sent nothing else"
        self._keep(planned, line, Unanswered(POISON, message, Course()))

    async def _send_in_chunks(
        self,
        todo: Sequence[PlannedRequest],
        group: asyncio.TaskGroup,
        alone: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        shared = shared_prefixes(todo)
        unsent = Unsent(todo)
        while unsent:
            models = await self._room(unsent.models)
            if self._left_open:
                return
            if self._keeper.is_behind:
                await self._keeper.room()
                continue  # others may have taken the room meanwhile
            chunk = unsent.take(models, _CHUNK, self._runner.held.portion)
            with self._coming(chunk):
                lines = await self._read(chunk)
                for planned, line in zip(chunk, lines, strict=True):
                    request = self._exchange.request(planned, line, shared)
                    if self._claim.past.careful:
                        request = replace(request, hedge=False, alone=alone)
                    task = group.create_task(self._answer(planned, line, request))
                    self._runner.held.hold(planned, self._urgency, until=task)
                await asyncio.sleep(0)  # lets them join the backlog, so that room() sees them

    @contextlib.contextmanager
    def _coming(self, chunk: Sequence[PlannedRequest]) -> Iterator[None]:
        """Count lines, while they are read, as held and as waiting."""
        models = Counter(planned.model for planned in chunk)
        with (
            self._runner.held.reading(chunk, self._urgency),
            self._runner.placement.announced(models, self._urgency),
        ):
            yield

    async def _read(self, chunk: Sequence[PlannedRequest]) -> list[Line]:
        """Read lines of the input. A storage that cannot now is waited for a while: what is in flight, and
        what waits to be kept, would have to be asked again.
        """
        patient_until = self._runner.clock() + _READ_PATIENCE_S
        pause_s = _READ_PAUSE_S[0]
        while True:
            try:
                return await asyncio.to_thread(read_lines, self._files, chunk)
            except StorageError as error:
                if self._runner.clock() >= patient_until:
                    raise
                log.warning("cannot read lines", batch=self._claim.batch_id, error=str(error))
                await self._keeper.note_trouble(f"lines cannot be read: {error}")
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _READ_PAUSE_S[1])

    async def _room(self, models: Collection[str | None]) -> Collection[str | None]:
        """Wait until there is room for lines of some of these models, in memory too; returns of which."""
        held = self._runner.held
        while not self._stop.wanted:
            with self._stop.ends_waiting():
                placed = await self._placed(models)
                if fitting := held.with_room(placed, self._urgency):
                    return fitting
                await held.freed(self._urgency)
        return models

    async def _placed(self, models: Collection[str | None]) -> Collection[str | None]:
        """Wait until lines of some of these models should be brought here; returns of which."""
        self._runner.blocked[self._urgency] += 1
        try:
            return await self._runner.placement.room(models, self._urgency)
        finally:
            self._runner.blocked[self._urgency] -= 1

    async def _answer(self, planned: PlannedRequest, line: Line, request: Request) -> None:
        try:
            answer = await self._ask(request)
        except Closing:
            self._left_open = True
            return
        except Fenced:
            raise
        except Exception as error:
            # A fault of ours that one line brings out would do so for ever, and its shard never end.
            log.exception("a line failed", batch=self._claim.batch_id, line=line.number)
            answer = Unanswered("internal_error", f"the dispatcher failed: {type(error).__name__}", Course())
        self._keep(planned, line, answer)

    async def _ask(self, request: Request) -> Answered | Unanswered:
        if not self._stop.wanted:
            with self._stop.ends_waiting():
                return await self._runner.attempts.run(request)
        return Unanswered(STOPPED, "its job was stopped before it was answered", Course())

    def _keep(self, planned: PlannedRequest, line: Line, answer: Answered | Unanswered) -> None:
        result = self._exchange.result(line, answer)
        if result.ok and answer.course.worker is not None:
            self._runner.placement.saw_answer(
                answer.course.worker,
                result.usage.completion_tokens,
                answer.course.latency_s,
                planned.asked_tokens,
            )
            if self._runner.lengths is not None:
                tokens = result.usage.completion_tokens
                self._runner.lengths.saw(planned.model, tokens, asked_tokens=planned.asked_tokens)
        late = isinstance(answer, Unanswered) and answer.code == LATE
        self._keeper.add(result, planned.cost_tokens, late=late)
