"""The Python client on a real Valkey: files, ledger and queue in that order, and every step repeatable."""

from __future__ import annotations

import io
import os
from pathlib import Path

import msgspec
import pytest
import redis

from dispatcher import queues
from dispatcher.batches.errors import StorageMissingError
from dispatcher.batches.ledger import Tally
from dispatcher.batches.parts import Entry, PartWriter
from dispatcher.batches.record import BatchStatus
from dispatcher.batches.results import Usage
from dispatcher.batches.storage import ERRORS, OUTPUT
from dispatcher.finaliser import Finaliser
from forebay import Forebay
from forebay.errors import RefusedInput, TooOld, UnknownBatch, UnknownJob, WaitedTooLong
from forebay.progress import Progress
from workers.breaker import BreakerState
from workers.connection import ServerFacts
from workers.errors import InvalidWorkerUrl, SettingsError, StoreUnavailable, UnknownWorker
from workers.fleet import WorkerState

pytestmark = pytest.mark.integration

LINES = 40


def a_file(lines=LINES, bad=0):
    good = [
        msgspec.json.encode(
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": "m", "prompt": "a", "max_tokens": 10 + number},
            }
        )
        for number in range(lines)
    ]
    return io.BytesIO(b"\n".join([*good, *[b"no json"] * bad]) + b"\n")


@pytest.fixture
def forebay(redis_url, tmp_path):
    with Forebay(redis_url, str(tmp_path / "storage")) as client:
        yield client


def queued(forebay, batch_id):
    """The shards whose jobs wait, in the order of the queue."""
    names = queues.queue(forebay.desk.connection, "default").job_ids
    return [name for name in names if name.startswith(batch_id)]


def answer(forebay, batch_id, shard, *, ok=True, done=True):
    """What a dispatcher does with a shard: durable results, then a report."""
    portal, ledger = forebay._portal, forebay.desk.ledger
    claim = portal.call(ledger.claim, batch_id, shard, "test")
    from dispatcher.batches.plan import open_plan

    files = forebay.desk.storage.files(batch_id)
    requests = open_plan(files).shard(shard)
    writer = PartWriter(files, shard, f"{claim.number}.test")
    for request in requests:
        record = msgspec.json.encode({"custom_id": f"line-{request.line - 1}", "response": None})
        writer.add(Entry(request.line, ok, Usage(1, 2), record))
    writer.flush()
    count = len(requests)
    tally = Tally(count if ok else 0, 0 if ok else count, count, 2 * count, 10 * count)

    async def report():
        return await ledger.progress(claim, "test", tally, done=done)

    portal.call(report)
    return count


def test_a_submitted_file_is_known_in_progress_and_queued(forebay):
    record = forebay.submit(a_file(), metadata={"team": "a"})
    assert record.input_file_id == f"batches/{record.id}/input.jsonl"
    assert record.status is BatchStatus.IN_PROGRESS
    assert record.request_counts.total == LINES
    assert record.model == "m"
    assert record.metadata == {"input_name": "input", "team": "a"}
    assert record.expires_at == record.created_at + 86_400
    assert len(queued(forebay, record.id)) == record.forebay.shards
    assert [found.id for found in forebay.batches()] == [record.id]


def test_the_queue_holds_the_shards_in_the_order_of_the_plan(forebay):
    record = forebay.submit(a_file())
    expected = [queues.shard_job_id(record.id, shard) for shard in range(record.forebay.shards)]
    assert queued(forebay, record.id) == expected


def test_publishing_again_changes_nothing(forebay):
    record = forebay.submit(a_file())
    before = queued(forebay, record.id)
    assert forebay.publish(record.id) == record
    assert queued(forebay, record.id) == before


def test_a_crash_between_ledger_and_queue_is_repaired_by_publishing_again(forebay, monkeypatch):
    def dies(*_args):
        raise StoreUnavailable("the process died here")

    with monkeypatch.context() as patch:
        patch.setattr(queues, "enqueue_shards", dies)
        with pytest.raises(StoreUnavailable):
            forebay.submit(a_file())
    [left] = forebay.batches()
    assert queued(forebay, left.id) == []
    assert forebay.publish(left.id).status is BatchStatus.IN_PROGRESS
    assert len(queued(forebay, left.id)) == left.forebay.shards


def test_a_batch_is_opened_again_from_its_files_alone(forebay, redis_url):
    record = forebay.submit(a_file(), order="completed", detail=False, strategy="chat", hedge=False)
    before = dict(forebay._portal.call(forebay.desk.entry, record.id).fields)
    with redis.Redis.from_url(redis_url) as server:
        server.flushall()
    with pytest.raises(UnknownBatch):
        forebay.status(record.id)
    forebay.publish(record.id, window_s=1000)
    after = dict(forebay._portal.call(forebay.desk.entry, record.id).fields)
    assert len(queued(forebay, record.id)) == record.forebay.shards
    told_anew = {"expires_at", "record", "in_progress_at"}
    assert {k: v for k, v in after.items() if k not in told_anew} == {
        k: v for k, v in before.items() if k not in told_anew
    }
    told = {name: after[name] for name in ("order", "detail", "strategy", "hedge")}
    assert told == {"order": "completed", "detail": "0", "strategy": "chat", "hedge": "0"}
    assert int(after["expires_at"]) < int(before["expires_at"])


def test_shards_that_are_done_are_not_queued_again(forebay):
    record = forebay.submit(a_file())
    answer(forebay, record.id, 0)
    queues.drop_shards(forebay.desk.connection, "default", record.id, range(record.forebay.shards))
    forebay.publish(record.id)
    assert queues.shard_job_id(record.id, 0) not in queued(forebay, record.id)
    assert len(queued(forebay, record.id)) == record.forebay.shards - 1


def test_a_batch_whose_shards_are_all_done_gets_its_finaliser(forebay):
    record = forebay.submit(a_file())
    for shard in range(record.forebay.shards):
        answer(forebay, record.id, shard)
    queues.drop_shards(forebay.desk.connection, "default", record.id, range(record.forebay.shards))
    forebay.publish(record.id)
    assert queued(forebay, record.id) == [queues.finalise_job_id(record.id)]


def test_a_bad_file_is_refused_with_its_lines_and_leaves_nothing(forebay, tmp_path):
    with pytest.raises(RefusedInput) as refused:
        forebay.submit(a_file(3, bad=2))
    assert [bad.number for bad in refused.value.intake.bad_lines] == [4, 5]
    assert forebay.batches() == []
    assert [path for path in (tmp_path / "storage").rglob("*") if path.is_file()] == []


def test_bad_lines_that_are_skipped_count_as_failed(forebay):
    record = forebay.submit(a_file(3, bad=2), bad_lines="skip")
    assert (record.request_counts.total, record.request_counts.failed) == (5, 2)
    assert [item.line for item in record.errors.data] == [4, 5]


def test_a_strategy_is_one_of_ours_or_configured_here(forebay, monkeypatch):
    with pytest.raises(
        SettingsError, match="no strategy is named quick; there are chat, batch, long-context"
    ):
        forebay.submit(a_file(), strategy="quick")
    assert forebay.desk.storage.batch_ids() == []
    monkeypatch.setenv("FOREBAY_SCHEDULER__STRATEGIES", '{"quick": {"weights": {"queue": 1}}}')
    assert forebay.submit(a_file(), strategy="quick").forebay.strategy == "quick"


def test_a_path_is_submitted_under_its_name(forebay, tmp_path):
    source = tmp_path / "prompts.jsonl"
    source.write_bytes(a_file().getvalue())
    assert forebay.submit(source).metadata["input_name"] == "prompts.jsonl"


def test_a_file_whose_name_is_no_text_is_submitted_under_one_that_can_be_read(forebay, tmp_path):
    source = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    source.write_bytes(a_file().getvalue())
    record = forebay.submit(source)
    assert record.metadata["input_name"] == r"caf\udce9.jsonl"
    assert forebay.status(record.id) == record


@pytest.mark.parametrize(
    ("value", "why"),
    [(1, r"metadata\.n: .*valid string"), (None, r"metadata\.n"), ("caf\udce9", "not all .* is text")],
)
def test_metadata_that_is_no_text_is_refused_and_nothing_of_the_file_stays(forebay, tmp_path, value, why):
    with pytest.raises(SettingsError, match=why):
        forebay.submit(a_file(), metadata={"n": value})
    assert list((tmp_path / "storage" / "batches").iterdir()) == []
    assert forebay.batches() == []


def test_whatever_ends_a_submission_takes_its_files_along(forebay, tmp_path, monkeypatch):
    def interrupted(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr("forebay.submission.BatchRecord.to_json", interrupted)
    with pytest.raises(KeyboardInterrupt):
        forebay.submit(a_file())
    assert list((tmp_path / "storage" / "batches").iterdir()) == []


def test_a_cancelled_batch_waits_for_nobody(forebay):
    record = forebay.submit(a_file())
    cancelled = forebay.cancel(record.id)
    assert cancelled.status is BatchStatus.CANCELLING
    assert queued(forebay, record.id) == [queues.finalise_job_id(record.id)]
    assert forebay.cancel(record.id) == cancelled


def test_an_unknown_batch_is_said_to_be_unknown(forebay):
    for ask in (forebay.status, forebay.cancel, forebay.wait, forebay.results, forebay.save_results):
        with pytest.raises(UnknownBatch, match="batch_none"):
            ask("batch_none", *(["out"] if ask == forebay.save_results else []))


def test_results_of_a_running_batch_are_those_that_are_durable(forebay, tmp_path):
    record = forebay.submit(a_file())
    good = answer(forebay, record.id, 0)
    bad = answer(forebay, record.id, 1, ok=False)
    assert len(list(forebay.results(record.id))) == good + bad
    saved = forebay.save_results(record.id, tmp_path / "out.jsonl")
    assert saved.errors == tmp_path / "out.errors.jsonl"
    assert len(saved.output.read_bytes().splitlines()) == good
    assert len(saved.errors.read_bytes().splitlines()) == bad
    counts = forebay.status(record.id).request_counts
    assert (counts.completed, counts.failed) == (good, bad)


def test_there_is_no_error_file_when_nothing_failed(forebay, tmp_path):
    record = forebay.submit(a_file())
    answer(forebay, record.id, 0)
    saved = forebay.save_results(record.id, tmp_path / "out.jsonl")
    assert saved.errors is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "storage"]


@pytest.mark.parametrize("ends", [True, False], ids=["ended", "running"])
def test_in_another_storage_there_are_no_results_and_earlier_ones_stay(forebay, redis_url, tmp_path, ends):
    record = forebay.submit(a_file())
    for shard in range(record.forebay.shards):
        answer(forebay, record.id, shard, ok=bool(shard))
    if ends:
        forebay._portal.call(Finaliser(forebay.desk.storage, forebay.desk.ledger).run, record.id)
    saved = forebay.save_results(record.id, tmp_path / "out.jsonl")
    before = saved.output.read_bytes(), saved.errors.read_bytes()
    elsewhere = str(tmp_path / "elsewhere")
    refused = f"the files of {record.id} are not in {elsewhere}; name the storage .* with --storage"
    with Forebay(redis_url, elsewhere) as stranger:
        with pytest.raises(StorageMissingError, match=refused):
            stranger.save_results(record.id, tmp_path / "out.jsonl")
        with pytest.raises(StorageMissingError, match=refused):
            stranger.results(record.id)
    assert (saved.output.read_bytes(), saved.errors.read_bytes()) == before


@pytest.mark.parametrize("lost", [OUTPUT, ERRORS])
def test_a_result_file_that_is_gone_is_no_batch_without_such_lines(forebay, tmp_path, lost):
    record = forebay.submit(a_file())
    for shard in range(record.forebay.shards):
        answer(forebay, record.id, shard, ok=bool(shard))
    forebay._portal.call(Finaliser(forebay.desk.storage, forebay.desk.ledger).run, record.id)
    saved = forebay.save_results(record.id, tmp_path / "out.jsonl")
    forebay.desk.storage.files(record.id).remove(lost)
    with pytest.raises(StorageMissingError):
        forebay.save_results(record.id, tmp_path / "out.jsonl")
    assert saved.output.exists()
    assert saved.errors.exists()


def test_progress_ends_with_the_end_of_the_batch(forebay):
    record = forebay.submit(a_file())
    seen: list[Progress] = []

    def on_progress(look):
        seen.append(look)
        shard = len(seen) - 1
        if shard < record.forebay.shards:
            answer(forebay, record.id, shard)
        else:
            forebay._portal.call(_end, forebay.desk.ledger, record.id)

    looks = forebay.progress(record.id, interval_s=0)
    for look in looks:
        on_progress(look)
    assert [look.done for look in seen] == sorted(look.done for look in seen)
    assert seen[-1].status is BatchStatus.COMPLETED
    assert seen[-1].done == LINES
    assert seen[-2].status is BatchStatus.IN_PROGRESS


async def _end(ledger, batch_id):
    await ledger.move(batch_id, "finalizing", among=["in_progress"])
    await ledger.move(batch_id, "completed", among=["finalizing"])


def test_waiting_ends_when_the_callers_time_is_over(forebay):
    record = forebay.submit(a_file())
    looks = []
    with pytest.raises(WaitedTooLong, match=r"has not ended after 0\.01 s; it is in_progress"):
        forebay.wait(record.id, looks.append, timeout_s=0.01)
    assert looks


def test_waiting_ends_also_while_redis_is_away(forebay, monkeypatch):
    record = forebay.submit(a_file())

    async def away(_batch_id):
        raise StoreUnavailable("away")

    monkeypatch.setattr(forebay.desk, "entry", away)
    with pytest.raises(WaitedTooLong, match=r"has not ended after 0\.01 s"):
        forebay.wait(record.id, timeout_s=0.01)


def test_a_worker_is_added_shown_drained_and_removed(forebay):
    added = forebay.workers.add("http://GPU-1:8000/v1/", runtime="vllm", models=("m",), weight=2.0)
    assert (added.worker_id, added.outcome) == ("gpu-1:8000", "created")
    again = forebay.workers.add("http://gpu-1:8000", runtime="vllm", models=("m",), weight=2.0)
    assert (again.outcome, again.incarnation) == ("kept", added.incarnation)
    assert forebay.workers.add("http://gpu-1:8000", replace=True).outcome == "replaced"
    assert [worker.id for worker in forebay.workers.list()] == ["gpu-1:8000"]
    for spelling in ("gpu-1:8000", "http://gpu-1:8000/v1", "GPU-1:8000"):
        assert forebay.workers.show(spelling).id == "gpu-1:8000"
    forebay.workers.reset("http://gpu-1:8000")
    forebay.workers.drain("http://gpu-1:8000", deadline_s=5)
    assert forebay.workers.show("gpu-1:8000").state is WorkerState.DRAINING
    forebay.workers.remove("http://gpu-1:8000/")
    assert forebay.workers.list() == ()


def test_a_breaker_is_opened_by_hand_for_so_long_and_closed_again(forebay):
    forebay.workers.add("http://gpu-1:8000")
    forebay.workers.open("gpu-1:8000", seconds=600)
    opened = forebay.workers.show("gpu-1:8000")
    assert (opened.breaker, opened.breaker_reason) == (BreakerState.OPEN, "forced")
    assert 0 < opened.breaker_open_until - forebay.workers.view().now_s <= 600
    forebay.workers.open("gpu-1:8000", seconds=1200)
    assert forebay.workers.show("gpu-1:8000").breaker_open_until > opened.breaker_open_until + 500
    forebay.workers.reset("gpu-1:8000")
    assert forebay.workers.show("gpu-1:8000").breaker is BreakerState.CLOSED
    with pytest.raises(SettingsError, match="reset"):
        forebay.workers.open("gpu-1:8000", seconds=0)


def test_an_unknown_worker_is_said_to_be_unknown(forebay):
    for ask in (
        forebay.workers.show,
        forebay.workers.drain,
        forebay.workers.remove,
        forebay.workers.open,
        forebay.workers.reset,
    ):
        with pytest.raises(UnknownWorker, match="gpu-9"):
            ask("gpu-9:8000")


def test_what_is_impossible_of_a_worker_is_refused(forebay):
    with pytest.raises(InvalidWorkerUrl):
        forebay.workers.add("gpu-1:8000")
    with pytest.raises(SettingsError, match="weight"):
        forebay.workers.add("http://gpu-1:8000", weight=-1)


def test_a_load_that_cannot_be_read_is_unknown_with_its_reason(forebay):
    forebay.workers.add("http://127.0.0.1:1", runtime="vllm")
    [swept] = forebay.workers.loads()
    assert swept.load is None
    assert swept.reason


def test_a_plan_is_cut_for_the_fleet_that_is_there(forebay):
    without = forebay.submit(a_file())
    assert without.forebay.slots == 64
    forebay.workers.add("http://gpu-1:8000", max_running=3)
    assert forebay.submit(a_file()).forebay.slots == 3


def test_an_inline_request_is_queued_under_its_function(forebay):
    job_id = forebay.enqueue({"model": "m", "messages": []}, timeout_s=5)
    job = queues.queue(forebay.desk.connection, "default").fetch_job(job_id)
    assert job.func_name == "dispatcher.jobs.run_request"
    with pytest.raises(WaitedTooLong):
        forebay.answer(job_id, timeout_s=0.01)
    with pytest.raises(UnknownJob):
        forebay.answer("no-such-job")


def test_only_allowed_paths_are_queued(forebay):
    with pytest.raises(SettingsError, match="/v1/files is not allowed"):
        forebay.enqueue({}, url="/v1/files")


def test_the_environment_says_where_redis_and_storage_are(redis_url, tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_REDIS_URL", redis_url)
    monkeypatch.setenv("FOREBAY_STORAGE", str(tmp_path / "there"))
    with Forebay() as forebay:
        record = forebay.submit(a_file(2))
    assert Path(tmp_path / "there" / "batches" / record.id / "plan.npy").exists()


def test_a_redis_that_may_forget_is_warned_of(redis_url, tmp_path):
    with redis.Redis.from_url(redis_url) as server:
        server.config_set("maxmemory-policy", "allkeys-lru")
        try:
            with Forebay(redis_url, str(tmp_path)) as forebay:
                assert "set it to noeviction" in forebay.warning
        finally:
            server.config_set("maxmemory-policy", "noeviction")
    with Forebay(redis_url, str(tmp_path)) as forebay:
        assert forebay.warning is None


def test_a_redis_that_wants_a_password_is_told_at_once(redis_url, tmp_path):
    with redis.Redis.from_url(redis_url) as server:
        server.config_set("requirepass", "sesame")
        try:
            for url in (redis_url, redis_url.replace("unix://", "unix://:wrong@")):
                with pytest.raises(StoreUnavailable, match="cannot reach Redis at") as refused:
                    Forebay(url, str(tmp_path))
                assert "wrong" not in str(refused.value)
            Forebay(redis_url.replace("unix://", "unix://:sesame@"), str(tmp_path)).close()
        finally:
            server.config_set("requirepass", "")


def test_a_server_that_is_too_old_is_told(redis_url, tmp_path, monkeypatch):
    async def facts(_client):
        return ServerFacts(version="6.0.16", maxmemory_policy="noeviction")

    monkeypatch.setattr("forebay.desk.server_facts", facts)
    with pytest.raises(TooOld, match=r"is version 6\.0\.16; Forebay needs Redis 6\.2"):
        Forebay(redis_url, str(tmp_path))


def test_an_unreachable_redis_is_told_at_once_and_leaves_no_thread(tmp_path):
    import threading

    before = set(threading.enumerate())  # not their number: threads of earlier tests may end meanwhile
    with pytest.raises(StoreUnavailable, match="cannot reach Redis at unix:///nowhere"):
        Forebay("unix:///nowhere", str(tmp_path))
    begun = set(threading.enumerate()) - before
    for thread in begun:  # told to end by now, though it may not have come to it
        thread.join(timeout=10)
    assert not [thread.name for thread in begun if thread.is_alive()]
