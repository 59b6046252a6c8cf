"""A disk that is really full: what is asked for fails by name, and no file is ever seen half."""

from __future__ import annotations

import io
import json

import pytest
from typer.testing import CliRunner

from dispatcher.batches.errors import StorageFullError
from dispatcher.batches.intake import Limits, take_in
from dispatcher.batches.ledger import Ledger, Tally
from dispatcher.batches.parts import Entry, PartWriter, done_lines
from dispatcher.batches.plan import open_plan
from dispatcher.batches.results import Usage
from dispatcher.batches.storage import Storage
from dispatcher.finaliser import Finaliser
from forebay.cli.failures import said
from forebay.cli.main import app
from forebay.results import written_whole
from forebay.submission import Options, prepare, publish
from tests.small_disks import small_disk
from workers.connection import connect_sync

pytestmark = pytest.mark.integration

LINES = 8


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "small", "512k") as mounted:
        yield mounted


@pytest.fixture
def storage(disk):
    return Storage(str(disk.folder))


def a_file(lines=LINES, prompt="a"):
    request = {"method": "POST", "url": "/v1/completions", "body": {"prompt": prompt, "max_tokens": 5}}
    return b"".join(
        json.dumps({"custom_id": f"c{number}"} | request).encode() + b"\n" for number in range(lines)
    )


def files_on(disk):
    return [path.name for path in disk.folder.rglob("*") if path.is_file() and path.name != "ballast"]


@pytest.fixture
async def batch(storage, valkey, redis_url):
    """A batch in progress, of which nothing is done."""
    ledger = Ledger(valkey)
    record = prepare(
        storage, io.BytesIO(a_file()), name="in", options=Options(), now_s=await ledger.now(), slots=1
    )
    connection = connect_sync(redis_url)
    await publish(ledger, connection, storage.files(record.id))
    connection.close()
    return record.id


def test_a_file_that_does_not_fit_is_refused_by_name_and_leaves_nothing(storage, disk):
    big = io.BytesIO(a_file(lines=40, prompt="x" * 20_000))
    files = storage.files("batch_1")
    with pytest.raises(StorageFullError):
        take_in(big, files, bad_lines="fail", limits=Limits(), slots=1, mean_completion_tokens={})
    assert (files_on(disk), storage.batch_ids()) == ([], [])


def test_a_submit_on_a_full_disk_says_so_and_leaves_nothing(disk, tmp_path, redis_url):
    source = tmp_path / "in.jsonl"
    source.write_bytes(a_file(lines=40, prompt="x" * 20_000))
    words = ["submit", str(source), "--redis", redis_url, "--storage", str(disk.folder)]
    ended = CliRunner().invoke(app, words)
    assert (ended.exit_code, "No space left on device" in ended.stderr) == (4, True)
    assert files_on(disk) == []
    assert "Traceback" not in ended.stderr


def test_a_part_that_does_not_fit_is_not_there_and_later_whole(storage, disk):
    files = storage.files("batch_1")
    files.write("input.jsonl", b"x")
    writer = PartWriter(files, 0, "1.a")
    for line in range(1, 9):
        writer.add(Entry(line, True, Usage(1, 1), json.dumps("y" * 10_000).encode()))
    disk.fill()
    for _ in range(3):
        with pytest.raises(StorageFullError):
            writer.flush()
        assert (done_lines(files, 0), files_on(disk)) == ({}, ["input.jsonl"])
    disk.free()
    writer.flush()
    assert done_lines(files, 0) == dict.fromkeys(range(1, 9), True)


async def test_a_batch_that_cannot_be_finalised_for_want_of_room_is_finalised_later(
    storage, disk, valkey, batch
):
    ledger, files = Ledger(valkey), storage.files(batch)
    plan = open_plan(files)
    for shard in range(plan.shard_count):
        claim = await ledger.claim(batch, shard, "d1")
        writer = PartWriter(files, shard, "1.d1")
        for request in plan.shard(shard):
            writer.add(Entry(request.line, True, Usage(1, 1), json.dumps("z" * 10_000).encode()))
        writer.flush()
        await ledger.progress(claim, "d1", Tally(len(plan.shard(shard))), done=True)
    before = sorted(files_on(disk))
    disk.fill()
    for _ in range(2):
        with pytest.raises(StorageFullError):
            await Finaliser(storage, ledger).run(batch)
        assert sorted(files_on(disk)) == before
    assert (await ledger.entry(batch)).status == "finalizing"
    disk.free()
    await Finaliser(storage, ledger).run(batch)
    assert (await ledger.entry(batch)).status == "completed"
    assert len(files.read("output.jsonl").splitlines()) == LINES


async def test_a_record_that_could_not_be_written_at_the_end_is_written_by_the_next_finaliser(
    storage, valkey, batch, monkeypatch
):
    ledger, files = Ledger(valkey), storage.files(batch)
    await ledger.move(batch, "cancelling", among=["in_progress"])

    def full(*_args, **_how):
        raise StorageFullError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(type(files), "write", full)
        with pytest.raises(StorageFullError):
            await Finaliser(storage, ledger).run(batch)
    assert (await ledger.entry(batch)).status == "cancelled"
    assert json.loads(files.read("batch.json"))["status"] == "validating"
    await Finaliser(storage, ledger).run(batch)
    assert json.loads(files.read("batch.json"))["status"] == "cancelled"


def test_results_that_a_full_disk_does_not_take_are_said_by_name_and_older_ones_stay(disk):
    target = disk.folder / "out.jsonl"
    target.write_bytes(b"old")
    disk.fill()
    with pytest.raises(OSError, match="No space left") as full, written_whole(target) as sink:
        sink.write(b"new" * 10_000)
    assert said(full.value) == f"{target}: No space left on device"
    assert target.read_bytes() == b"old"
    disk.free()
    with written_whole(target) as sink:
        sink.write(b"new")
    assert target.read_bytes() == b"new"
