"""Batches whose time is over go, files and keys; everything else stays."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest

from dispatcher.batches.errors import StorageDeniedError
from dispatcher.batches.ledger import Ledger, record_of
from dispatcher.batches.plan import open_plan
from dispatcher.batches.record import BatchStatus
from dispatcher.batches.storage import BatchFiles, Storage
from dispatcher.sweeping import Sweeping
from forebay import submission
from forebay.submission import Options, prepare, publish
from tests.buckets import s3_for_tests
from workers.connection import connect_sync

pytestmark = pytest.mark.integration

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
HOUR = Options(keep_s=3600.0)


@pytest.fixture
def ledger(valkey):
    return Ledger(valkey)


@pytest.fixture
def storage(tmp_path):
    return Storage(str(tmp_path / "storage"))


@pytest.fixture
def sweeping(storage, ledger):
    return Sweeping(storage, ledger, ("high", "default", "low"))


@pytest.fixture
def submit(redis_url, storage, ledger):
    """A batch that is in progress; gives its id."""
    connection = connect_sync(redis_url)

    async def submit(options=HOUR, where=storage):
        now_s = await ledger.now()
        record = prepare(where, io.BytesIO(LINE), name="in", options=options, now_s=now_s)
        await publish(ledger, connection, where.files(record.id))
        return record.id

    yield submit
    connection.close()


async def end(ledger, batch_id, ago_s, status=BatchStatus.COMPLETED):
    """The batch ended so many seconds ago."""
    stamp = {f"{status}_at": str(await ledger.now() - ago_s)}
    await ledger.move(batch_id, status, among=[BatchStatus.IN_PROGRESS])
    await ledger.set_fields(batch_id, stamp)


@pytest.mark.parametrize(
    "status", [BatchStatus.COMPLETED, BatchStatus.CANCELLED, BatchStatus.EXPIRED, BatchStatus.FAILED]
)
async def test_a_batch_goes_with_all_its_files_and_keys_when_its_time_is_over(
    sweeping, ledger, storage, submit, status
):
    batch, younger = await submit(), await submit()
    await end(ledger, batch, 3601, status)
    await end(ledger, younger, 3000, status)
    await ledger.claim(younger, 0, "d")
    await sweeping.look()
    assert [entry.id for entry in await ledger.recent()] == [younger]
    assert storage.batch_ids() == [younger]
    left = [key for key in await ledger.client.keys("forebay:v1:batch*") if batch in key]
    assert left == []


async def test_what_runs_and_what_is_kept_for_ever_stays(sweeping, ledger, storage, submit):
    running, kept = await submit(replace(HOUR, keep_s=0.001)), await submit(Options())
    await end(ledger, kept, 10_000_000)
    await sweeping.look()
    assert set(storage.batch_ids()) == {running, kept}
    assert {entry.id for entry in await ledger.recent()} == {running, kept}


async def test_whoever_died_between_files_and_keys_is_followed_up(sweeping, ledger, storage, submit):
    batch = await submit()
    await end(ledger, batch, 4000)
    storage.files(batch).remove_all()
    await sweeping.look()
    assert await ledger.entry(batch) is None


async def test_files_that_cannot_be_removed_are_tried_again_and_hold_up_no_other_batch(
    sweeping, ledger, submit, monkeypatch
):
    first, second = await submit(), await submit()
    for batch in (first, second):
        await end(ledger, batch, 4000)
    plain = BatchFiles.remove_all

    def remove_all(files):
        if files.batch_id == first:
            raise StorageDeniedError("not permitted")
        plain(files)

    with monkeypatch.context() as patch:
        patch.setattr(BatchFiles, "remove_all", remove_all)
        await sweeping.look()
    assert [entry.id for entry in await ledger.recent()] == [first]
    await sweeping.look()
    assert await ledger.recent() == []


async def test_a_batch_stays_known_while_its_bucket_lets_nothing_be_deleted(ledger, submit, monkeypatch):
    with s3_for_tests(monkeypatch) as s3:
        bucket = Storage(f"s3://{s3.bucket}/x")
        sweeping = Sweeping(bucket, ledger, ("default",))
        batch = await submit(where=bucket)
        await end(ledger, batch, 4000)
        with s3.keeping():
            await sweeping.look()
        assert [entry.id for entry in await ledger.recent()] == [batch]
        await sweeping.look()
        assert await ledger.recent() == []
        assert bucket.batch_ids() == []


async def test_a_batch_of_another_queue_goes_only_if_its_files_are_here(
    sweeping, ledger, storage, submit, tmp_path
):
    elsewhere = Storage(str(tmp_path / "elsewhere"))
    own = replace(HOUR, queue="run-1")
    here, there = await submit(own), await submit(own, elsewhere)
    for batch in (here, there):
        await end(ledger, batch, 4000)
    await sweeping.look()
    assert [entry.id for entry in await ledger.recent()] == [there]
    assert (storage.batch_ids(), elsewhere.batch_ids()) == ([], [there])


async def test_where_no_batch_ever_was_nothing_is_forgotten(ledger, submit, tmp_path):
    batch = await submit()
    await end(ledger, batch, 4000)
    not_mounted = Sweeping(Storage(str(tmp_path / "not mounted")), ledger, ("default",))
    await not_mounted.look()
    assert [entry.id for entry in await ledger.recent()] == [batch]


async def test_a_folder_that_is_not_named_like_a_batch_is_never_removed(sweeping, ledger, storage):
    storage.files("mine").write("notes", b"x")
    fields = {"status": "completed", "completed_at": "1", "keep_s": "1", "queue": "default"}
    for name in ("mine", "..", "batch_1/../../x"):
        await ledger.open(name, 1.0, fields)
    await sweeping.look()
    assert storage.batch_ids() == ["mine"]
    assert len(await ledger.client.zrange("forebay:v1:batches", 0, -1)) == 3


async def test_more_batches_than_are_read_at_once_are_all_looked_at(sweeping, ledger, submit, monkeypatch):
    monkeypatch.setattr("dispatcher.batches.ledger._ENTRIES_AT_ONCE", 2)
    for _ in range(5):
        await end(ledger, await submit(), 4000)
    await sweeping.look()
    assert await ledger.recent() == []


async def test_a_record_says_how_long_it_is_kept_and_after_the_end_until_when(ledger, submit):
    batch = await submit()
    options = record_of(await ledger.entry(batch)).forebay
    assert (options.keep, options.remove_at) == ("1h", None)
    await end(ledger, batch, 100)
    record = record_of(await ledger.entry(batch))
    assert record.forebay.remove_at - record.completed_at in (3600, 3601)  # both are whole seconds


async def test_a_batch_that_is_known_again_still_goes(sweeping, ledger, storage, submit):
    batch = await submit()
    await end(ledger, batch, 4000)
    record = record_of(await ledger.entry(batch))
    await ledger.forget(batch)
    plan = open_plan(storage.files(batch))
    await ledger.open(batch, float(record.created_at), submission.ended_fields(record, plan))
    assert record_of(await ledger.entry(batch)) == record
    await sweeping.look()
    assert storage.batch_ids() == []
