"""From parts to the two result files: every line exactly once, whatever happened to the claims."""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.batches import finalise as module
from dispatcher.batches.errors import ChangedInputError, DamagedPartError, MissingLinesError
from dispatcher.batches.finalise import Totals, fill_with, finalise
from dispatcher.batches.intake import Limits, take_in
from dispatcher.batches.parts import Entry, PartWriter
from dispatcher.batches.plan import Plan
from dispatcher.batches.results import Usage
from dispatcher.batches.storage import BatchFiles, Storage

CANCELLED = fill_with("batch_1", "batch_cancelled", "the batch was cancelled")


@pytest.fixture(params=["disk", "bucket"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BatchFiles]:
    if request.param == "disk":
        yield Storage(str(tmp_path)).files("batch_1")
        return
    root = f"memory://{tmp_path.name}"
    yield Storage(root).files("batch_1")
    fsspec.filesystem("memory").rm(root, recursive=True)


def planned(files: BatchFiles, good: int, bad: tuple[int, ...] = ()) -> Plan:
    """Take in a file of `good` requests, with bad lines before the lines of the given numbers."""
    lines = []
    for number in range(good):
        lines += [b"bad"] * bad.count(number)
        request = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions"}
        lines.append(json.dumps(request | {"body": {"prompt": "x" * (number * 37 % 500)}}).encode())
    taken = take_in(
        io.BytesIO(b"\n".join(lines)),
        files,
        bad_lines="skip",
        limits=Limits(),
        slots=2,
        mean_completion_tokens={},
    )
    assert taken.plan is not None
    return taken.plan


def record(line: int, claim: str, size: int = 0) -> bytes:
    return b'{"line": %d, "claim": "%s", "pad": "%s"}' % (line, claim.encode(), b"x" * size)


def answer(files: BatchFiles, shard: int, claim: str, lines: list[int], *, bad: tuple[int, ...] = ()) -> None:
    writer = PartWriter(files, shard, claim)
    for line in lines:
        writer.add(Entry(line, line not in bad, Usage(2, None if line in bad else 5), record(line, claim)))
    writer.flush()


def read(files: BatchFiles, name: str) -> list[Any]:
    return [json.loads(line) for line in files.read(name).splitlines()] if files.exists(name) else []


def both(files: BatchFiles) -> tuple[bytes, bytes]:
    output, errors = (
        files.read(name) if files.exists(name) else b"" for name in ("output.jsonl", "errors.jsonl")
    )
    return output, errors


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[int, str, list[tuple[int, bool]]]]]:
    """A batch, and parts in the order of becoming durable: claims that overlap, repeat and interleave."""
    total = draw(st.integers(1, 12))
    line = st.tuples(st.integers(1, total), st.booleans())
    part = st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.lists(line, min_size=1, max_size=6))
    return total, draw(st.lists(part, max_size=8))


@settings(deadline=None, max_examples=80)
@given(histories(), st.sampled_from(["input", "completed"]))
def test_every_line_ends_exactly_once_with_its_first_answer_however_claims_interleave(
    history: tuple[int, list[tuple[int, str, list[tuple[int, bool]]]]], order: Any
) -> None:
    total, parts = history
    first: dict[int, tuple[bool, bytes]] = {}
    with TemporaryDirectory() as folder:
        files = Storage(folder).files("batch_1")
        plan = planned(files, total)
        writers: dict[tuple[int, str], PartWriter] = {}
        for moment, (shard, claim, answers) in enumerate(parts, 1):
            writer = writers.setdefault((shard, claim), PartWriter(files, shard, claim))
            for line, ok in answers:
                kept = record(line, claim, moment)
                writer.add(Entry(line, ok, Usage(1, 1), kept))
                first.setdefault(line, (ok, kept))
            writer.flush()
            _date_newest_part(Path(folder), moment)
        totals = finalise(files, plan, order=order, fill=CANCELLED)
        output, errors = (data.split(b"\n")[:-1] for data in both(files))
        assert sorted(output) == sorted(kept for ok, kept in first.values() if ok)
        kept_errors = [data for data in errors if b"batch_cancelled" not in data]
        assert sorted(kept_errors) == sorted(kept for ok, kept in first.values() if not ok)
        assert len(output) + len(errors) == total == totals.completed + totals.failed
        before = both(files)
        assert finalise(files, plan, order=order, fill=CANCELLED) == totals
        assert both(files) == before


def _date_newest_part(folder: Path, moment: int) -> None:
    """Set a part's age, since parts of a fast test may be equally old by the disk's clock."""
    for part in folder.rglob("parts/*/*.jsonl"):
        if part.stat().st_mtime > 1_000_000:
            os.utime(part, (moment, moment))


def test_output_is_in_the_order_of_the_input(files: BatchFiles) -> None:
    plan = planned(files, 6)
    answer(files, 1, "a", [6, 2, 4])
    answer(files, 0, "a", [5, 1, 3], bad=(3, 1))
    totals = finalise(files, plan, order="input")
    assert totals == Totals(completed=4, failed=2, prompt_tokens=12, completion_tokens=20)
    assert [line["line"] for line in read(files, "output.jsonl")] == [2, 4, 5, 6]
    assert [line["line"] for line in read(files, "errors.jsonl")] == [1, 3]


def test_output_may_be_in_the_order_of_completion(files: BatchFiles) -> None:
    plan = planned(files, 4)
    answer(files, 0, "a", [4, 2])
    answer(files, 0, "b", [3, 1])
    finalise(files, plan, order="completed")
    assert [line["line"] for line in read(files, "output.jsonl")] == [4, 2, 3, 1]


def test_a_file_that_would_be_empty_is_not_made(files: BatchFiles) -> None:
    plan = planned(files, 2)
    answer(files, 0, "a", [1, 2])
    finalise(files, plan, order="input")
    assert not files.exists("errors.jsonl")


def test_a_batch_whose_every_line_failed_has_no_output_file(files: BatchFiles) -> None:
    plan = planned(files, 2)
    answer(files, 0, "a", [1, 2], bad=(1, 2))
    assert finalise(files, plan, order="input").completed == 0
    assert not files.exists("output.jsonl")


def test_refused_lines_end_in_the_error_file_between_the_others(files: BatchFiles) -> None:
    plan = planned(files, 3, bad=(0, 2))
    answer(files, 0, "a", [2, 3, 5], bad=(3,))
    assert finalise(files, plan, order="input").failed == 3
    lines = files.read("errors.jsonl").splitlines()
    assert [b"invalid_line" in line for line in lines] == [True, False, True]


def test_missing_lines_are_counted_and_named_and_nothing_is_written(files: BatchFiles) -> None:
    plan = planned(files, 30)
    answer(files, 0, "a", [1, 2])
    with pytest.raises(MissingLinesError, match="28 accepted lines") as raised:
        finalise(files, plan, order="input")
    assert (raised.value.missing, raised.value.first) == (28, tuple(range(3, 13)))
    assert not files.exists("output.jsonl")


def test_missing_lines_may_be_filled_with_an_error_that_names_them(files: BatchFiles) -> None:
    plan = planned(files, 5, bad=(1,))
    answer(files, 0, "a", [1, 4])
    totals = finalise(files, plan, order="input", fill=CANCELLED)
    assert (totals.completed, totals.failed) == (2, 4)
    errors = read(files, "errors.jsonl")
    assert [line["custom_id"] for line in errors] == [None, "id-1", "id-3", "id-4"]
    assert [line["error"]["code"] for line in errors] == ["invalid_line", *["batch_cancelled"] * 3]


@pytest.mark.parametrize(("lost", "wrong"), [(True, "parts/invalid"), (False, "line 99")])
def test_a_result_of_no_line_of_the_file_is_refused(files: BatchFiles, *, lost: bool, wrong: str) -> None:
    plan = planned(files, 2, bad=(1,))
    if lost:
        files.remove("parts/invalid")
    # As many as were refused, so that counts alone would not tell.
    answer(files, 0, "a", [1, 3, 99])
    with pytest.raises(DamagedPartError, match=wrong):
        finalise(files, plan, order="input")


def test_refused_lines_whose_part_is_lost_are_noticed(files: BatchFiles) -> None:
    plan = planned(files, 2, bad=(1,))
    answer(files, 0, "a", [1, 3])
    files.remove("parts/invalid")
    with pytest.raises(DamagedPartError, match="parts/invalid"):
        finalise(files, plan, order="input")


def test_a_line_to_fill_whose_input_was_altered_is_noticed(files: BatchFiles) -> None:
    plan = planned(files, 1)
    files.write("input.jsonl", b"x" * 1000)
    with pytest.raises(ChangedInputError):
        finalise(files, plan, order="input", fill=CANCELLED)


def test_many_lines_are_copied_in_blocks(files: BatchFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK_LINES", 7)
    plan = planned(files, 100)
    answer(files, 0, "a", list(range(100, 20, -1)))
    finalise(files, plan, order="input", fill=CANCELLED)
    assert [line["line"] for line in read(files, "output.jsonl")] == list(range(21, 101))
    assert [line["custom_id"] for line in read(files, "errors.jsonl")] == [f"id-{n}" for n in range(20)]
