"""One shard's life: claim it, send the lines that have no durable result, keep what comes back, count it.

Reading and writing files is `batches`' subject, one request's life `attempts`'. The order of steps is the
point: a result is durable before it is counted, the shard counted done before its job is acknowledged.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto

import structlog

from dispatcher.attempts import Answered, Attempts, Course, Request, Unanswered
from dispatcher.batches.errors import StorageError
from dispatcher.batches.ledger import Claim, Entry, Ledger, Standing, Tally
from dispatcher.batches.parse import Line
from dispatcher.batches.parts import Entry as Result
from dispatcher.batches.parts import PartWriter, shard_entries
from dispatcher.batches.plan import Plan, PlannedRequest, open_plan, read_lines
from dispatcher.batches.results import Detail, Usage, error_line, read_usage, record_id, result_line
from dispatcher.batches.storage import BatchFiles, Storage
from dispatcher.placement import Closing, Placement
from dispatcher.scheduler.question import Need
from dispatcher.stop import Stop
from workers.errors import Fenced, StoreUnavailable

log = structlog.get_logger(__name__)

_CHUNK = 32
"""Lines read at once: bounds what a shard of large lines holds in memory."""
_MOST_UNWRITTEN = 4
"""Parts' worth of results that may wait for the storage before no more lines are sent."""
_PAUSE_S = (0.5, 30.0)
LATE = "batch_expired"
STOPPED = "job_stopped"
_NO_USAGE = Usage(None, None)


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


@dataclass(slots=True)
class _Sums:
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: int = 0
    late: int = 0

    def add(self, *, ok: bool, usage: Usage, cost: int) -> None:
        self.completed += ok
        self.failed += not ok
        self.prompt_tokens += usage.prompt_tokens or 0
        self.completion_tokens += usage.completion_tokens or 0
        self.cost += cost

    def tally(self) -> Tally:
        return Tally(self.completed, self.failed, self.prompt_tokens, self.completion_tokens, self.cost)


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
        """Answer what is unanswered of a shard. Raises StorageError when its plan or input cannot be read.

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
        self._writer = PartWriter(files, claim.shard, f"{claim.number}.{runner.owner}")
        self._one_writes = threading.Lock()
        """A cancelled write goes on in its thread, beside which the last results are written."""
        self._unwritten: list[Result] = []
        self._sums = _Sums()
        self._durable = Tally()
        """What of the sums is durable, and may be told."""
        self._left_open = False
        self._sent_all = False
        self._written = asyncio.Event()
        self._due = asyncio.Event()

    def pick_up(self, plan: Plan) -> list[PlannedRequest]:
        """Count what earlier claims made durable; returns the rest. Blocks on the storage."""
        costs = {request.line: request for request in plan.shard(self._claim.shard)}
        for result in shard_entries(self._files, self._claim.shard):
            request = costs.pop(result.line, None)
            if request is not None:
                self._sums.add(ok=result.ok, usage=result.usage, cost=request.cost_tokens)
        self._durable = self._sums.tally()
        return list(costs.values())

    async def to_its_end(self, todo: Sequence[PlannedRequest]) -> ShardEnd:
        try:
            await self._answer_all(todo)
            return ShardEnd.OPEN if self._left_open else await self._done()
        except asyncio.CancelledError:
            await self._write_last()
            raise
        except Fenced:
            return self._taken_over()
        except BaseExceptionGroup as group:
            fenced, others = group.split(Fenced)
            if fenced is None or others is not None:
                raise
            return self._taken_over()

    async def _done(self) -> ShardEnd:
        standing = await self._report(done=True)
        return ShardEnd.BATCH_DONE if standing.all_done else ShardEnd.DONE

    def _taken_over(self) -> ShardEnd:
        log.info("shard was taken over", batch=self._batch_id, shard=self._claim.shard)
        return ShardEnd.FENCED

    async def _answer_all(self, todo: Sequence[PlannedRequest]) -> None:
        async with asyncio.TaskGroup() as keeping:
            keeping.create_task(self._keep_results())
            async with asyncio.TaskGroup() as lines:
                await self._send(todo, lines)
            self._sent_all = True
            self._due.set()

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
            await self._storage_keeps_up()
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

    async def _storage_keeps_up(self) -> None:
        while len(self._unwritten) > _MOST_UNWRITTEN * self._runner.part_lines:
            self._written.clear()
            await self._written.wait()

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
        if isinstance(answer, Unanswered) and answer.code == LATE:
            self._sums.late += 1
        self._sums.add(ok=result.ok, usage=result.usage, cost=planned.cost_tokens)
        if result.ok and answer.course.worker is not None:
            self._runner.placement.saw_answer(
                answer.course.worker,
                result.usage.completion_tokens,
                answer.course.latency_s,
                planned.asked_tokens,
            )
        self._unwritten.append(result)
        if len(self._unwritten) in (1, self._runner.part_lines):
            self._due.set()

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

    # -- keeping --------------------------------------------------------------------------------------------

    async def _keep_results(self) -> None:
        """Write parts as results come: when enough are there, or the oldest has waited long enough."""
        while not (self._sent_all and not self._unwritten):
            await self._due.wait()
            self._due.clear()
            if not self._sent_all and len(self._unwritten) < self._runner.part_lines:
                await self._until_old_or_many()
            if self._unwritten:
                await self._write()
                await self._report_if_possible()

    async def _until_old_or_many(self) -> None:
        try:
            async with asyncio.timeout(self._runner.part_age_s):
                await self._due.wait()
        except TimeoutError:
            pass

    async def _write(self) -> None:
        """Make all results durable that are there now; a storage that cannot is asked until it can."""
        batch, sums = self._take()
        pause_s = _PAUSE_S[0]
        while True:
            try:
                await asyncio.to_thread(self._write_part, batch)
            except StorageError as error:
                log.error("cannot keep results", batch=self._batch_id, error=str(error), retry_in_s=pause_s)
                await self._tell_trouble(f"results cannot be stored: {error}")
                batch = []  # the writer holds them by now
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _PAUSE_S[1])
            else:
                break
        self._durable = sums
        if pause_s > _PAUSE_S[0]:
            await self._tell_trouble("")
        self._written.set()

    def _take(self) -> tuple[list[Result], Tally]:
        """The results that wait to be written, and what the sums are once they are."""
        batch, self._unwritten = self._unwritten, []
        return batch, self._sums.tally()

    def _write_part(self, results: Sequence[Result]) -> None:
        with self._one_writes:
            for result in results:
                self._writer.add(result)
            self._writer.flush()

    async def _write_last(self) -> None:
        """What came back before a cancellation is kept, if the storage takes it at once."""
        results, sums = self._take()
        try:
            await asyncio.shield(asyncio.to_thread(self._write_part, results))
            self._durable = sums
            await asyncio.shield(self._report_if_possible())
        except (StorageError, Fenced) as error:
            log.warning("last results were not kept", batch=self._batch_id, error=str(error))

    async def _tell_trouble(self, text: str) -> None:
        try:
            await self._runner.ledger.set_fields(self._batch_id, {"trouble": text})
        except StoreUnavailable as error:
            log.warning("cannot tell the batch's trouble", batch=self._batch_id, error=str(error))

    async def _report_if_possible(self) -> None:
        """Progress on the way: the next report says it all again, so one that fails is no loss."""
        try:
            await self._progress(done=False)
        except StoreUnavailable as error:
            log.warning("cannot report progress", batch=self._batch_id, error=str(error))

    async def _report(self, *, done: bool) -> Standing:
        pause_s = _PAUSE_S[0]
        while True:
            try:
                return await self._progress(done=done)
            except StoreUnavailable as error:
                log.warning("cannot report a shard", batch=self._batch_id, error=str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _PAUSE_S[1])

    async def _progress(self, *, done: bool) -> Standing:
        if self._sums.late:
            await self._runner.ledger.set_fields(self._batch_id, {"late": "1"})
        return await self._runner.ledger.progress(self._claim, self._runner.owner, self._durable, done=done)


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
