"""One shard's life against a real Redis and a real folder; only the requests' lives are played."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from dispatcher.attempts import Answered, Course, Unanswered
from dispatcher.batches.errors import StorageError, StorageFullError
from dispatcher.batches.ledger import Ledger
from dispatcher.batches.parts import Entry, PartWriter, done_lines, shard_entries
from dispatcher.batches.plan import open_plan, read_lines
from dispatcher.batches.record import BatchStatus
from dispatcher.batches.results import Usage, error_line
from dispatcher.batches.storage import INPUT, BatchFiles, Storage
from dispatcher.held_lines import HeldLines
from dispatcher.placement import Closing
from dispatcher.reply import Reply
from dispatcher.shard import LATE, STOPPED, ShardEnd, ShardRunner
from dispatcher.stop import Stop
from forebay.submission import Options, prepare, publish
from workers.connection import connect_sync

pytestmark = pytest.mark.integration

LINES = 20
ANSWER = b'{"usage":{"prompt_tokens":3,"completion_tokens":5},"id":"x"}'


class Room:
    """A fleet that always has room, save for the models that are full until they are freed."""

    def __init__(self):
        self.full = set()
        self.freed = asyncio.Event()
        self.coming = Counter()

    async def room(self, models, urgency):
        if not set(models) - self.full:
            await self.freed.wait()
            self.full.clear()
        return set(models) - self.full

    @contextlib.contextmanager
    def announced(self, coming, urgency):
        self.coming[urgency] += coming.total()
        try:
            yield
        finally:
            self.coming[urgency] -= coming.total()

    def saw_answer(self, *_, **__):
        return None


class Answers:
    """Answers each request at once, unless told otherwise; remembers what was asked."""

    def __init__(self):
        self.asked = Counter()
        self.requests = []
        self.wait_after = None
        self.reached = asyncio.Event()
        self.let_go = asyncio.Event()
        self.special = {}
        self.on_answer = lambda: None

    async def run(self, request):
        name = json.loads(request.body)["messages"][0]["content"]
        self.asked[name] += 1
        self.requests.append(request)
        if self.wait_after is not None and self.asked.total() > self.wait_after:
            self.reached.set()
            await self.let_go.wait()
        self.on_answer()
        ending = self.special.get(name)
        if isinstance(ending, Exception):
            raise ending
        return ending or Answered(Reply(200, ANSWER, 0.1), Course("w:1", 1, 0.0, 0.1))


@pytest.fixture
def rq_redis(redis_url):
    client = connect_sync(redis_url)
    yield client
    client.close()


@pytest.fixture
def ledger(valkey):
    return Ledger(valkey)


@pytest.fixture
def storage(tmp_path):
    return Storage(str(tmp_path))


@pytest.fixture
async def answers():
    return Answers()


@pytest.fixture
def make_runner(storage, ledger, answers):
    def make(owner="d1", room=None, answers=answers, **changes):
        settings = {"part_lines": 4, "part_age_s": 0.01, "hedge": True} | changes
        return ShardRunner(storage, ledger, room or Room(), answers, owner=owner, **settings)

    return make


def batch_of(lines, models=("m",), prompt=""):
    rows = (
        {
            "custom_id": f"c{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": models[n % len(models)],
                "max_tokens": 5,
                "messages": [{"role": "user", "content": f"{prompt}q{n}"}],
            },
        }
        for n in range(lines)
    )
    return io.BytesIO(b"".join(json.dumps(row).encode() + b"\n" for row in rows))


@pytest.fixture
def submit(storage, ledger, rq_redis):
    """Puts a batch in progress; gives its id."""

    async def submit(models=("m",), lines=LINES, prompt="", **options):
        now_s = await ledger.now()
        record = prepare(
            storage,
            batch_of(lines, models, prompt),
            name="in",
            options=Options(**options),
            now_s=now_s,
            slots=1,
        )
        await publish(ledger, rq_redis, storage.files(record.id))
        return record.id

    return submit


@pytest.fixture
async def batch(submit):
    return await submit()


async def run_all(runner, ledger, batch):
    shards = (await ledger.entry(batch)).shards
    return [await runner.run(batch, shard, 1) for shard in range(shards)]


def lines_of(storage, batch, shards):
    return [line for shard in range(shards) for line in done_lines(storage.files(batch), shard)]


async def test_every_line_is_sent_once_and_durable_when_the_shard_is_done(
    make_runner, ledger, storage, batch, answers
):
    ends = await run_all(make_runner(), ledger, batch)
    assert ends == [ShardEnd.DONE] * (len(ends) - 1) + [ShardEnd.BATCH_DONE]
    assert sorted(lines_of(storage, batch, len(ends))) == list(range(1, LINES + 1))
    assert set(answers.asked.values()) == {1}
    entry = await ledger.entry(batch)
    assert (entry.completed, entry.failed, entry.prompt_tokens, entry.completion_tokens) == (
        LINES,
        0,
        3 * LINES,
        5 * LINES,
    )
    assert entry.cost_done == entry.cost_total


async def test_lines_whose_model_has_room_are_sent_while_others_wait(make_runner, ledger, submit, answers):
    room = Room()
    room.full = {"slow"}
    batch = await submit(models=("slow", "fast"))
    runner = make_runner(room=room)
    shards = (await ledger.entry(batch)).shards
    running = asyncio.gather(*(runner.run(batch, shard, 1) for shard in range(shards)))
    async with asyncio.timeout(30):
        while answers.asked.total() < LINES // 2 or runner.feeding.total() > runner.blocked.total():  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
    assert {request.need.model for request in answers.requests} == {"fast"}
    room.freed.set()
    assert (await running).count(ShardEnd.BATCH_DONE) == 1
    assert sorted(answers.asked.values()) == [1] * LINES
    assert (runner.feeding.total(), runner.blocked.total()) == (0, 0)


@pytest.mark.parametrize("fails", [False, True])
async def test_lines_are_announced_while_they_are_read_and_no_longer(
    make_runner, batch, answers, monkeypatch, fails
):
    room, announced = Room(), []
    runner = make_runner(room=room)

    def read(files, chunk):
        announced.append((dict(room.coming), dict(runner.feeding), len(chunk)))
        if fails:
            raise ValueError("spoiled")
        return read_lines(files, chunk)

    monkeypatch.setattr("dispatcher.shard.read_lines", read)
    with pytest.raises(ExceptionGroup) if fails else contextlib.nullcontext():
        await runner.run(batch, 0, 2)
    assert announced
    assert all((coming, feeding) == ({2: count}, {2: 1}) for coming, feeding, count in announced)
    assert (room.coming.total(), runner.feeding.total()) == (0, 0)


class Burdened(Answers):
    """Answers nothing until it is let go, then one after the other; notes what was read and unanswered."""

    def __init__(self):
        super().__init__()
        self.held = 0
        self.most = 0
        self.turn = asyncio.Semaphore(0)

    async def run(self, request):
        self.held += len(request.body)
        self.most = max(self.most, self.held)
        self.reached.set()
        try:
            async with self.turn:
                return await super().run(request)
        finally:
            self.held -= len(request.body)


async def test_of_large_lines_so_many_bytes_are_held_and_the_rest_goes_when_they_are_answered(
    make_runner, ledger, submit
):
    bound = 160_000
    answers, held = Burdened(), HeldLines(bound)
    batch = await submit(lines=64, prompt="x" * 10_000)
    runner = make_runner(held=held, answers=answers)
    shards = (await ledger.entry(batch)).shards
    running = asyncio.gather(*(runner.run(batch, shard, 1) for shard in range(shards)))
    async with asyncio.timeout(30):
        while not held.waiting or runner.feeding.total() > len(held.waiting):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
        assert bound * 3 / 4 < answers.held <= held.bytes <= bound + held.portion
        assert runner.blocked.total() == 0
        answers.turn.release()
        assert (await running).count(ShardEnd.BATCH_DONE) == 1
    assert sorted(answers.asked.values()) == [1] * 64
    assert answers.most <= bound + held.portion
    assert held.bytes == 0


async def test_a_stop_also_ends_the_wait_for_memory(make_runner, ledger, submit):
    answers, held, stop = Burdened(), HeldLines(1), Stop()
    batch = await submit()
    running = asyncio.create_task(make_runner(held=held, answers=answers).run(batch, 0, 1, stop))
    async with asyncio.timeout(30):
        while not held.waiting:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0)
        assert len(answers.asked) == 0
        stop.want()
        assert await running in (ShardEnd.DONE, ShardEnd.BATCH_DONE)
    assert held.bytes == 0


@pytest.mark.parametrize(
    ("wish", "usual", "hedge"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
async def test_a_batch_says_by_which_strategy_it_goes_and_whether_it_gets_second_attempts(
    make_runner, ledger, submit, answers, wish, usual, hedge
):
    batch = await submit(strategy="chat", hedge=wish)
    await run_all(make_runner(hedge=usual), ledger, batch)
    assert {(request.need.strategy, request.hedge) for request in answers.requests} == {("chat", hedge)}


async def test_a_shard_that_is_run_again_sends_nothing_and_counts_nothing_twice(
    make_runner, ledger, batch, answers
):
    first = await run_all(make_runner("d1"), ledger, batch)
    again = await run_all(make_runner("d2"), ledger, batch)
    assert set(answers.asked.values()) == {1}
    assert again == [ShardEnd.BATCH_DONE] * len(first)
    assert (await ledger.entry(batch)).completed == LINES


async def test_what_a_cancelled_run_has_is_kept_and_only_the_rest_is_sent_again(
    make_runner, ledger, storage, batch, answers
):
    answers.wait_after = 0
    task = asyncio.create_task(make_runner("d1").run(batch, 0, 1))
    await answers.reached.wait()
    held = answers.asked.total()
    answers.wait_after = None
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert lines_of(storage, batch, 1) == []
    await run_all(make_runner("d2"), ledger, batch)
    assert sorted(answers.asked.values()).count(2) == held
    assert (await ledger.entry(batch)).completed == LINES


async def test_a_dispatcher_that_ends_leaves_the_shard_open(make_runner, ledger, batch, answers):
    answers.special["q3"] = Closing()
    runner = make_runner()
    ends = await run_all(runner, ledger, batch)
    assert ShardEnd.OPEN in ends
    assert runner.feeding.total() == 0
    answers.special.clear()
    assert ShardEnd.BATCH_DONE in await run_all(make_runner("d2"), ledger, batch)
    assert answers.asked.pop("q3") == 2
    assert set(answers.asked.values()) == {1}


async def test_a_shard_that_was_claimed_anew_during_its_last_lines_is_left_alone(
    make_runner, ledger, batch, answers
):
    answers.wait_after = 0
    runner = make_runner("slow")
    task = asyncio.create_task(runner.run(batch, 0, 1))
    await answers.reached.wait()
    await ledger.claim(batch, 0, "new")
    answers.let_go.set()
    assert await task is ShardEnd.FENCED
    assert runner.feeding.total() == 0


async def test_a_shard_that_was_claimed_anew_before_its_last_report_is_left_alone(
    make_runner, ledger, batch, monkeypatch
):
    plain = ledger.progress

    async def claimed_anew_before_done(claim, owner, tally, *, done):
        if done:
            await ledger.claim(batch, claim.shard, "new")
        return await plain(claim, owner, tally, done=done)

    monkeypatch.setattr(ledger, "progress", claimed_anew_before_done)
    assert await make_runner("slow").run(batch, 0, 1) is ShardEnd.FENCED


async def test_only_what_is_durable_is_counted(make_runner, ledger, storage, batch, answers, monkeypatch):
    told, plain = [], ledger.progress

    async def progress(claim, owner, tally, *, done):
        told.append((tally.completed, len(lines_of(storage, batch, 1))))
        answers.let_go.set()
        return await plain(claim, owner, tally, done=done)

    write_part = BatchFiles.write
    loop, all_answered = asyncio.get_running_loop(), threading.Event()

    def write(files, name, data, **how):
        loop.call_soon_threadsafe(answers.let_go.set)
        assert all_answered.wait(10)
        write_part(files, name, data, **how)

    monkeypatch.setattr(ledger, "progress", progress)
    monkeypatch.setattr(BatchFiles, "write", write)
    answers.wait_after = 2
    answers.on_answer = lambda: all_answered.set() if answers.let_go.is_set() else None
    runner = make_runner(part_lines=2)
    assert await runner.run(batch, 0, 1) in (ShardEnd.DONE, ShardEnd.BATCH_DONE)
    assert len(told) > 2
    assert [counted for counted, _ in told] == [durable for _, durable in told]


async def test_a_full_storage_is_waited_out_and_told(make_runner, ledger, batch, monkeypatch):
    free = threading.Event()
    plain = BatchFiles.write

    def write(files, name, data, **how):
        if not free.is_set():
            raise StorageFullError("no room")
        plain(files, name, data, **how)

    monkeypatch.setattr(BatchFiles, "write", write)
    monkeypatch.setattr("dispatcher.keeper._PAUSE_S", (0.001, 0.002))
    task = asyncio.create_task(make_runner().run(batch, 0, 1))
    while "no room" not in (entry := await ledger.entry(batch)).fields.get("trouble", ""):
        assert not task.done()
    assert entry.completed == 0
    free.set()
    assert await task in (ShardEnd.DONE, ShardEnd.BATCH_DONE)
    entry = await ledger.entry(batch)
    assert entry.completed > 0
    assert entry.fields["trouble"] == ""


@pytest.fixture
def unreadable(monkeypatch):
    """After the first chunk the input cannot be read, until `readable` is set."""
    readable, plain = threading.Event(), BatchFiles.read_ranges
    reads = Counter()

    def read_ranges(files, name, ranges):
        reads[name] += name == INPUT
        if reads[INPUT] > 1 and not readable.is_set():
            raise StorageError("the mount is gone")
        return plain(files, name, ranges)

    monkeypatch.setattr(BatchFiles, "read_ranges", read_ranges)
    monkeypatch.setattr("dispatcher.shard._CHUNK", 2)
    monkeypatch.setattr("dispatcher.shard._READ_PAUSE_S", (0.001, 0.002))
    return readable


async def test_an_input_that_cannot_be_read_for_a_while_is_waited_for_and_told(
    make_runner, ledger, batch, answers, unreadable
):
    task = asyncio.create_task(make_runner().run(batch, 0, 1))
    while "the mount is gone" not in ((await ledger.entry(batch)).trouble or ""):
        assert not task.done()
    unreadable.set()
    assert await task in (ShardEnd.DONE, ShardEnd.BATCH_DONE)
    assert (await ledger.entry(batch)).trouble is None
    assert set(answers.asked.values()) == {1}


async def test_what_was_answered_is_kept_when_the_input_stays_unreadable(
    make_runner, storage, batch, answers, unreadable, monkeypatch
):
    monkeypatch.setattr("dispatcher.shard._READ_PATIENCE_S", 0.0)
    with pytest.raises(BaseExceptionGroup):
        await make_runner(part_age_s=1000.0, part_lines=1000).run(batch, 0, 1)
    assert len(lines_of(storage, batch, 1)) == answers.asked.total() == 2


async def test_a_write_that_still_waits_for_its_thread_survives_a_cancellation(
    make_runner, storage, batch, answers
):
    one, blocked, go_on = ThreadPoolExecutor(1), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(one)
    answers.wait_after = 6
    task = asyncio.create_task(make_runner().run(batch, 0, 1))
    await answers.reached.wait()
    loop.run_in_executor(None, lambda: (blocked.set(), go_on.wait(10)))
    while not blocked.is_set():  # noqa: ASYNC110 - a thread has no event for us
        await asyncio.sleep(0)
    answers.let_go.set()
    while one._work_queue.empty():  # noqa: ASYNC110 - until the part waits for the thread
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(lines_of(storage, batch, 1)) == answers.asked.total()


async def test_trouble_that_somebody_else_told_goes_with_the_first_part_that_is_written(
    make_runner, ledger, batch
):
    await ledger.set_fields(batch, {"trouble": "d0: the bucket does not exist"})
    assert (await ledger.entry(batch)).trouble == "d0: the bucket does not exist"
    assert await make_runner().run(batch, 0, 1) in (ShardEnd.DONE, ShardEnd.BATCH_DONE)
    assert (await ledger.entry(batch)).trouble is None


async def test_a_write_that_was_under_way_when_the_run_was_cancelled_is_not_disturbed(
    make_runner, ledger, storage, batch, answers, monkeypatch
):
    """The thread of a cancelled write goes on; the last results must wait for it."""
    started, go_on = asyncio.Event(), threading.Event()
    plain = BatchFiles.write
    loop = asyncio.get_running_loop()
    inside, most = 0, 0

    def write(files, name, data, **how):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        if not go_on.is_set():
            loop.call_soon_threadsafe(started.set)
            go_on.wait(10)
        plain(files, name, data, **how)
        inside -= 1

    monkeypatch.setattr(BatchFiles, "write", write)
    answers.wait_after = 6
    task = asyncio.create_task(make_runner().run(batch, 0, 1))
    await started.wait()
    answers.let_go.set()
    answered = answers.asked.total()
    task.cancel()
    await asyncio.sleep(0)
    loop.call_later(0.01, go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert most == 1
    kept = lines_of(storage, batch, 1)
    assert len(kept) == (await ledger.entry(batch)).completed >= 4
    assert len(kept) <= answered


async def test_lines_that_are_late_make_the_batch_late(make_runner, ledger, batch, answers):
    answers.special["q0"] = Unanswered(LATE, "too late", Course())
    await run_all(make_runner(), ledger, batch)
    entry = await ledger.entry(batch)
    assert (entry.completed, entry.failed, entry.fields["late"]) == (LINES - 1, 1, "1")


async def test_a_batch_is_late_too_when_whoever_wrote_its_late_line_died_before_telling(
    make_runner, ledger, storage, batch
):
    files = storage.files(batch)
    [first, *_] = open_plan(files).shard(0)
    late = error_line("q", LATE, "too late", None, record_id="r")
    writer = PartWriter(files, 0, "1.dead")
    writer.add(Entry(first.line, ok=False, usage=Usage(None, None), record=late))
    writer.flush()
    await run_all(make_runner(), ledger, batch)
    entry = await ledger.entry(batch)
    assert (entry.failed, entry.fields.get("late")) == (1, "1")


async def test_a_stopped_shard_keeps_its_answers_and_ends_every_other_line_with_an_error(
    make_runner, ledger, storage, batch, answers
):
    answers.wait_after = 3
    stop = Stop()
    task = asyncio.create_task(make_runner().run(batch, 0, 1, stop))
    await answers.reached.wait()
    stop.want()
    assert await task in (ShardEnd.DONE, ShardEnd.BATCH_DONE)
    answers.wait_after = None
    await run_all(make_runner("d2"), ledger, batch)
    entry = await ledger.entry(batch)
    assert (entry.completed + entry.failed, entry.shards_done) == (LINES, entry.shards)
    kept = list(shard_entries(storage.files(batch), 0))
    assert len({result.line for result in kept}) == len(kept) == len(open_plan(storage.files(batch)).shard(0))
    codes = [json.loads(result.record)["error"]["code"] for result in kept if not result.ok]
    assert set(codes) == {STOPPED}
    assert len(kept) - len(codes) == 3


async def test_a_shard_that_is_stopped_before_it_begins_sends_nothing(make_runner, ledger, batch, answers):
    stop = Stop()
    stop.want()
    runner = make_runner()
    assert await runner.run(batch, 0, 1, stop) in (ShardEnd.DONE, ShardEnd.BATCH_DONE)
    assert (answers.asked, runner.feeding.total()) == (Counter(), 0)
    assert (await ledger.entry(batch)).failed > 0


async def test_a_stop_ends_waiting_for_room(make_runner, batch, answers, monkeypatch):
    waits = asyncio.Event()

    async def no_room(_self, _models, _urgency):
        waits.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Room, "room", no_room)
    stop = Stop()
    task = asyncio.create_task(make_runner().run(batch, 0, 1, stop))
    await waits.wait()
    stop.want()
    assert await task in (ShardEnd.DONE, ShardEnd.BATCH_DONE)
    assert answers.asked == Counter()


async def test_a_cancellation_that_meets_a_stop_stays_a_cancellation(make_runner, batch, answers):
    answers.wait_after = 0
    stop = Stop()
    task = asyncio.create_task(make_runner().run(batch, 0, 1, stop))
    await answers.reached.wait()
    stop.want()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("status", [BatchStatus.CANCELLING, BatchStatus.CANCELLED])
async def test_a_shard_of_a_batch_that_ended_is_not_wanted(make_runner, ledger, batch, answers, status):
    await ledger.move(batch, status, among=[BatchStatus.IN_PROGRESS])
    runner = make_runner()
    assert await runner.run(batch, 0, 1) is ShardEnd.NOT_WANTED
    await ledger.forget(batch)
    assert await runner.run(batch, 0, 1) is ShardEnd.NOT_WANTED
    assert (answers.asked, runner.feeding.total()) == (Counter(), 0)
