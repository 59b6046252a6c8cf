"""One shard's life: claim it, send the lines that have no durable result, keep what comes back, count it.

Reading and writing files is `batches`' subject, one request's life `attempts`'. The order of steps is the
point: a result is durable before it is counted, the shard counted done before its job is acknowledged.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from enum import StrEnum, auto

import structlog

from dispatcher.attempts import Answered, Attempts, Course, Request, Unanswered
from dispatcher.batches.ledger import Claim, Entry, Ledger
from dispatcher.batches.parse import Line
from dispatcher.batches.parts import Entry as Result
from dispatcher.batches.parts import shard_entries
from dispatcher.batches.plan import Plan, PlannedRequest, open_plan, read_lines
from dispatcher.batches.results import Detail, Usage, error_line, read_usage, record_id, result_line
from dispatcher.batches.storage import BatchFiles, Storage
from dispatcher.keeper import Keeper
from dispatcher.placement import Closing, Placement
from dispatcher.scheduler.question import Need
from dispatcher.stop import Stop
from workers.errors import Fenced, ForebayError

log = structlog.get_logger(__name__)

_CHUNK = 32
"""Lines read at once: bounds what a shard of large lines holds in memory."""
LATE = "batch_expired"
STOPPED = "job_stopped"
_NO_USAGE = Usage(None, None)


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`owner` is unique among dispatchers, also over restarts: part files are named after it. `hedge`:
        whether requests of batches that do not say may get second attempts.
        """
        self.storage = storage
        self.ledger = ledger
        self.placement = placement
        self.attempts = attempts
        self.owner = owner
        self.part_lines = part_lines
        self.part_age_s = part_age_s
        self.hedge = hedge
        self.clock = clock
        self.feeding = 0
        """Shards that have lines left to send: while there are some, another shard brings nothing."""

    async def run(self, batch_id: str, shard: int, urgency: int, stop: Stop | None = None) -> ShardEnd:
        """Answer what is unanswered of a shard. Raises StorageError when its plan or input cannot be read,
        NoSuchShardError.

        Cancelling it closes its connections and keeps what came back so far; so does `stop`, after which
        every line that is left ends with an error, and the shard as ever.
        """
        self.feeding += 1
        try:
            run, todo = await self._begin(batch_id, shard, urgency, stop or Stop())
        except BaseException:
            self.feeding -= 1
            raise
        if run is None:
            self.feeding -= 1
            return ShardEnd.NOT_WANTED
        return await run.to_its_end(todo)

    async def _begin(
        self, batch_id: str, shard: int, urgency: int, stop: Stop
    ) -> tuple[_Run | None, Sequence[PlannedRequest]]:
        entry = await self.ledger.entry(batch_id)
        if entry is not None and not 0 <= shard < entry.shards:
            raise NoSuchShardError(f"{batch_id} has no shard {shard}")
        claim = await self.ledger.claim(batch_id, shard, self.owner) if entry else ""
        if entry is None or isinstance(claim, str):
            return None, ()
        files = self.storage.files(batch_id)
        plan = await asyncio.to_thread(open_plan, files)
        run = _Run(self, entry, claim, files, urgency, await self._deadline(entry), stop)
        return run, await asyncio.to_thread(run.pick_up, plan)

    async def _deadline(self, entry: Entry) -> float:
        return self.clock() + (entry.expires_at - await self.ledger.now())


class _Run:
    """One claim's work on one shard."""

    def __init__(
        self,
        runner: ShardRunner,
        entry: Entry,
        claim: Claim,
        files: BatchFiles,
        urgency: int,
        deadline_s: float,
        stop: Stop,
    ) -> None:
        self._runner = runner
        self._batch_id = entry.id
        self._claim = claim
        self._files = files
        self._urgency = urgency
        self._deadline_s = deadline_s
        self._stop = stop
        self._detail = entry.fields.get("detail") != "0"
        self._hedge = {"0": False, "1": True}.get(entry.fields.get("hedge", ""), runner.hedge)
        self._strategy = entry.fields.get("strategy") or None
        self._lines = entry.total
        self._keeper = Keeper(
            files,
            runner.ledger,
            claim,
            owner=runner.owner,
            part_lines=runner.part_lines,
            part_age_s=runner.part_age_s,
        )
        self._left_open = False

    def pick_up(self, plan: Plan) -> list[PlannedRequest]:
        """Count what earlier claims made durable; returns the rest. Blocks on the storage."""
        costs = {request.line: request for request in plan.shard(self._claim.shard)}
        for result in shard_entries(self._files, self._claim.shard):
            request = costs.pop(result.line, None)
            if request is not None:
                self._keeper.count_durable(result, request.cost_tokens)
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
            if fenced is None or others is not None:
                raise
            return self._taken_over()

    async def _done(self) -> ShardEnd:
        standing = await self._keeper.done()
        return ShardEnd.BATCH_DONE if standing.all_done else ShardEnd.DONE

    def _taken_over(self) -> ShardEnd:
        log.info("shard was taken over", batch=self._batch_id, shard=self._claim.shard)
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
            await self._send_in_chunks(todo, group)
        finally:
            self._runner.feeding -= 1

    async def _send_in_chunks(self, todo: Sequence[PlannedRequest], group: asyncio.TaskGroup) -> None:
        shared = _shared_prefixes(todo)
        for start in range(0, len(todo), _CHUNK):
            await self._room()
            await self._keeper.room()
            if self._left_open:
                return
            chunk = todo[start : start + _CHUNK]
            lines = await asyncio.to_thread(read_lines, self._files, chunk)
            for planned, line in zip(chunk, lines, strict=True):
                group.create_task(self._answer(planned, line, shared))
            await asyncio.sleep(0)  # lets them join the backlog, so that room() sees them

    async def _room(self) -> None:
        if not self._stop.wanted:
            with self._stop.ends_waiting():
                await self._runner.placement.room()

    async def _answer(self, planned: PlannedRequest, line: Line, shared: frozenset[int]) -> None:
        try:
            answer = await self._ask(self._request(planned, line, shared))
        except Closing:
            self._left_open = True
            return
        except Exception as error:
            # A fault of ours that one line brings out would do so for ever, and its shard never end.
            log.exception("a line failed", batch=self._batch_id, line=line.number)
            answer = Unanswered("internal_error", f"the dispatcher failed: {type(error).__name__}", Course())
        result = self._result(line, answer)
        if result.ok and answer.course.worker is not None:
            self._runner.placement.saw_answer(
                answer.course.worker,
                result.usage.completion_tokens,
                answer.course.latency_s,
                planned.asked_tokens,
            )
        late = isinstance(answer, Unanswered) and answer.code == LATE
        self._keeper.add(result, planned.cost_tokens, late=late)

    async def _ask(self, request: Request) -> Answered | Unanswered:
        if not self._stop.wanted:
            with self._stop.ends_waiting():
                return await self._runner.attempts.run(request)
        return Unanswered(STOPPED, "its job was stopped before it was answered", Course())

    def _request(self, planned: PlannedRequest, line: Line, shared: frozenset[int]) -> Request:
        need = Need(
            model=planned.model,
            prompt_tokens=planned.prompt_tokens,
            asked_tokens=planned.asked_tokens,
            cost_tokens=planned.cost_tokens,
            strategy=line.strategy or self._strategy,
            prefix_key=f"{planned.prefix_key:016x}" if planned.prefix_key in shared else None,
        )
        return Request(
            id=record_id(self._batch_id, line.number),
            path=line.url,
            body=line.body,
            need=need,
            urgency=self._urgency,
            deadline_s=self._deadline_s,
            late_code=LATE,
            hedge=self._hedge,
            custom_id=line.custom_id,
            batch_id=self._batch_id,
            batch_lines=self._lines,
        )

    def _result(self, line: Line, answer: Answered | Unanswered) -> Result:
        name = record_id(self._batch_id, line.number)
        detail = _detail(answer.course) if self._detail else None
        match answer:
            case Answered(reply):
                ok = 200 <= reply.status < 300
                record = result_line(
                    line.custom_id,
                    record_id=name,
                    request_id=name,
                    status_code=reply.status,
                    body=reply.body,
                    detail=detail,
                )
                return Result(line.number, ok, read_usage(reply.body) if ok else _NO_USAGE, record)
            case Unanswered(code, message):
                record = error_line(line.custom_id, code, message, detail, record_id=name)
                return Result(line.number, False, _NO_USAGE, record)


def _shared_prefixes(planned: Sequence[PlannedRequest]) -> frozenset[int]:
    """Prefix keys that several neighbours share: only these are worth going to the same worker for."""
    return frozenset(
        left.prefix_key for left, right in itertools.pairwise(planned) if left.prefix_key == right.prefix_key
    )


def _detail(course: Course) -> Detail:
    return Detail(
        worker=course.worker,
        attempts=course.attempts,
        queued_s=round(course.queued_s, 6),
        latency_s=None if course.latency_s is None else round(course.latency_s, 6),
    )
