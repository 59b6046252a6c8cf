"""A batch's files in a bucket, on moto's S3 server: all that a folder can, and every failure by its name."""

from __future__ import annotations

import io
import json

import pytest
import s3fs

from dispatcher.batches.errors import (
    StorageDeniedError,
    StorageError,
    StorageExistsError,
    StorageMissingError,
)
from dispatcher.batches.finalise import finalise
from dispatcher.batches.intake import Limits, take_in
from dispatcher.batches.parts import Entry, PartWriter, done_lines, durable_results
from dispatcher.batches.plan import open_plan, read_lines
from dispatcher.batches.results import Usage
from dispatcher.batches.storage import Storage
from forebay import results
from tests.buckets import s3_for_tests

pytestmark = pytest.mark.integration

LINES = 21


@pytest.fixture
def s3(monkeypatch):
    with s3_for_tests(monkeypatch) as server:
        yield server


@pytest.fixture
def storage(s3):
    return Storage(f"s3://{s3.bucket}/some/prefix")


@pytest.fixture
def files(storage):
    return storage.files("batch_1")


@pytest.fixture
def impatient(monkeypatch):
    """s3fs tries five times, with pauses that add up to seconds."""
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)


def a_file(bad=0):
    request = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "a ☃", "max_tokens": 5}}
    lines = [json.dumps({"custom_id": f"c{number}"} | request) for number in range(LINES)]
    return io.BytesIO("\n".join([*lines, *["no json"] * bad]).encode())


def taken_in(files, bad_lines="fail", bad=0):
    return take_in(
        a_file(bad), files, bad_lines=bad_lines, limits=Limits(), slots=4, mean_completion_tokens={}
    )


def answer(files, plan, shard, claim, lines=None):
    writer = PartWriter(files, shard, claim)
    for request in plan.shard(shard)[:lines]:
        record = json.dumps({"custom_id": f"c{request.line - 1}", "by": claim}).encode()
        writer.add(Entry(request.line, request.line % 7 != 0, Usage(1, 2), record))
        if writer.buffered == 4:
            writer.flush()
    writer.flush()


def test_a_batch_lives_its_whole_life_in_a_bucket(files, storage, tmp_path):
    intake = taken_in(files)
    assert (intake.accepted, intake.problem) == (LINES, None)
    plan = open_plan(files)
    read = [
        line.custom_id for shard in range(plan.shard_count) for line in read_lines(files, plan.shard(shard))
    ]
    assert sorted(read) == sorted(f"c{number}" for number in range(LINES))
    answer(files, plan, 0, "1.a", lines=1)  # its dispatcher is killed here
    assert len(done_lines(files, 0)) == 1
    for shard in range(plan.shard_count):
        answer(files, plan, shard, "2.b")
    assert len(list(durable_results(files))) == LINES
    so_far = results.save(files, final=False, output=tmp_path / "o", errors=tmp_path / "e")
    assert so_far.errors is not None
    totals = finalise(files, plan, order="input")
    assert (totals.completed, totals.failed) == (LINES - LINES // 7, LINES // 7)
    saved = results.save(files, final=True, output=tmp_path / "out", errors=tmp_path / "err")
    names = [json.loads(line)["custom_id"] for line in saved.output.read_bytes().splitlines()]
    assert names == [f"c{number}" for number in range(LINES) if (number + 1) % 7]
    assert len(saved.errors.read_bytes().splitlines()) == LINES // 7
    assert storage.batch_ids() == ["batch_1"]
    files.remove_all()
    assert (storage.batch_ids(), files.walk()) == ([], [])


def test_a_part_is_never_overwritten_and_is_seen_at_once(files, storage):
    assert files.walk("parts") == []
    files.write("parts/0/1.a-0.jsonl", b"one\n", replace=False)
    with pytest.raises(StorageExistsError):
        files.write("parts/0/1.a-0.jsonl", b"two\n", replace=False)
    again = storage.files("batch_1")
    assert again.read("parts/0/1.a-0.jsonl") == b"one\n"
    assert [(found.path, found.size) for found in again.walk("parts")] == [("parts/0/1.a-0.jsonl", 4)]
    assert again.walk("parts")[0].modified_s > 1e9


def test_ranges_are_read_as_asked_and_end_where_the_file_ends(files):
    files.write("x", b"0123456789")
    assert files.read_ranges("x", [(8, 1), (0, 2), (8, 5)]) == [b"8", b"01", b"89"]
    assert files.read_ranges("x", [(10, 5)]) == [b""]
    assert files.read_ranges("x", [(500_000, 5), (4, 2)]) == [b"", b"45"]


def test_a_refused_file_leaves_nothing_in_the_bucket(files, storage):
    assert taken_in(files, bad=1).problem is not None
    assert files.walk() == []
    assert taken_in(files, "skip", bad=1).refused == 1
    assert len(done_lines(files, "invalid")) == 1


def test_what_is_not_there_is_missing(files):
    for read in (files.read, lambda name: files.read_ranges(name, [(0, 1)])):
        with pytest.raises(StorageMissingError):
            read("nothing")
    with pytest.raises(StorageMissingError), files.open("nothing"):
        pass
    assert not files.exists("nothing")
    files.remove("nothing")


def test_a_bucket_that_is_not_there_is_named(s3):
    files = Storage("s3://no-such-bucket/x").files("batch_1")
    with pytest.raises(StorageMissingError, match="bucket does not exist"):
        files.write("x", b"")


@pytest.mark.parametrize(("how", "kind"), [("slow", StorageError), ("denied", StorageDeniedError)])
def test_a_bucket_that_refuses_raises_by_name_and_works_afterwards(files, s3, impatient, how, kind):
    files.write("x", b"first")
    with s3.refusing(how, "PUT", "POST", "GET"):
        for step in (
            lambda: files.write("x", b"second"),
            lambda: files.read("x"),
            files.walk,
            lambda: files.read_ranges("x", [(0, 1)]),
            lambda: whole(files, "y"),
        ):
            with pytest.raises(kind) as raised:
                step()
            assert "a secret" not in str(raised.value)
    assert s3.refused
    assert files.read("x") == b"first"
    assert [found.path for found in files.walk()] == ["x"]


def test_a_bucket_that_keeps_what_is_removed_is_found_out(files, s3):
    files.write("x", b"data")
    files.write("parts/0/1.a-0.jsonl", b"one\n")
    with s3.keeping():
        for remove in (lambda: files.remove("x"), files.remove_all):
            with pytest.raises(StorageDeniedError, match=r"batches/batch_1.*did not let it be deleted"):
                remove()
        files.remove("nothing")
    assert s3.refused == 2
    assert len(files.walk()) == 2
    files.remove_all()
    assert files.walk() == []


def test_a_refused_file_is_said_to_be_refused_also_where_nothing_can_be_deleted(files, s3):
    with s3.keeping():
        assert taken_in(files, bad=1).problem.code == "invalid_lines"
    assert s3.refused


def test_a_read_that_fails_on_the_way_is_a_failure_of_the_storage(files, s3, impatient):
    files.write("x", b"line\n" * 10)
    with s3.refusing("slow", "GET"), pytest.raises(StorageError), files.open("x") as lines:
        list(lines)


def whole(files, name):
    with files.writing(name) as sink:
        sink.write(b"data")
