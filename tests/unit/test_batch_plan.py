"""Taking a file in: what the plan holds, its order, its shards, and what is refused as a whole."""

import io
import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.batches import duplicates, intake, plan
from dispatcher.batches.errors import (
    ChangedInputError,
    DamagedPlanError,
    StorageFullError,
    StorageMissingError,
)
from dispatcher.batches.intake import Intake, Limits, take_in
from dispatcher.batches.plan import Plan, PlannedRequest, open_plan, read_lines
from dispatcher.batches.shards import cost_steps, cut
from dispatcher.batches.storage import BatchFiles, Storage


@pytest.fixture
def files(tmp_path: Path) -> BatchFiles:
    return Storage(str(tmp_path)).files("batch_1")


def request(custom_id: str, url: str = "/v1/completions", **body: Any) -> bytes:
    line = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return json.dumps(line).encode()


def take(
    files: BatchFiles,
    data: bytes,
    bad_lines: Literal["fail", "skip"] = "fail",
    *,
    limits: Limits | None = None,
    means: dict[str, float] | None = None,
    slots: int = 4,
) -> Intake:
    return take_in(
        io.BytesIO(data),
        files,
        bad_lines=bad_lines,
        limits=limits or Limits(),
        slots=slots,
        mean_completion_tokens=means or {},
    )


def planned(files: BatchFiles, data: bytes, **options: Any) -> Plan:
    taken = take(files, data, **options)
    assert taken.plan is not None, taken.problem
    return taken.plan


def all_requests(of: Plan) -> list[PlannedRequest]:
    return [found for number in range(of.shard_count) for found in of.shard(number)]


good = st.builds(
    request,
    st.uuids().map(str),
    st.sampled_from(["/v1/completions", "/v1/embeddings"]),
    prompt=st.sampled_from(["", "a", "b" * 300, "c" * 3000]),
    max_tokens=st.sampled_from([None, 0, 1, 500]),
    model=st.sampled_from(["m", "n", None]),
)
other = st.sampled_from([b"", b"  ", b"not json", b"[]", b'{"custom_id": "x"}'])


@settings(deadline=None, max_examples=60)
@given(st.lists(good | other, max_size=40), st.integers(1, 20))
def test_each_accepted_line_is_in_exactly_one_shard(lines: list[bytes], slots: int) -> None:
    with TemporaryDirectory() as folder:
        files = Storage(folder).files("b")
        taken = take(files, b"\n".join(lines), "skip", slots=slots)
        wanted = {number for number, line in enumerate(lines, 1) if b'"body"' in line}
        assert taken.accepted == len(wanted)
        if taken.plan is None:
            assert not wanted
            return
        found = all_requests(open_plan(files))
        assert Counter(one.line for one in found) == dict.fromkeys(wanted, 1)
        for one, line in zip(found, read_lines(files, found), strict=True):
            assert json.loads(lines[one.line - 1])["custom_id"] == line.custom_id
            assert (one.model, one.asked_tokens, one.prefix_key) == (
                line.model,
                line.asked_tokens,
                line.prefix_key,
            )


@settings(deadline=None, max_examples=30)
@given(st.lists(good, min_size=1, max_size=40))
def test_the_order_is_by_cost_bucket_then_prefix_then_line(lines: list[bytes]) -> None:
    with TemporaryDirectory() as folder:
        found = all_requests(planned(Storage(folder).files("b"), b"\n".join(lines)))
    scouts = min(1, len(found) // 16)  # four slots
    keys = [(-one.cost_tokens.bit_length(), one.prefix_key, one.line) for one in found]
    assert keys[scouts:] + keys[:scouts] == sorted(keys)


@given(st.integers(0, 30_000), st.integers(1, 500))
def test_shards_never_grow_and_the_last_are_small(total: int, slots: int) -> None:
    sizes = cut(total, slots)
    smallest = min(32, max(1, slots // 4))
    assert sum(sizes) == total
    assert all(left >= right for left, right in pairwise(sizes))
    assert all(smallest <= size <= 256 for size in sizes[:-1])
    assert all(1 <= size <= smallest for size in sizes[-1:])
    shares = min(2 * slots, max(8, slots // 4))
    assert sizes[:1] == ([min(total, 256, max(smallest, total // shares))] if total else [])


def test_a_cost_is_the_prompt_and_what_is_asked_or_else_the_models_mean(files: BatchFiles) -> None:
    data = b"\n".join(
        [
            request("asked", model="m", prompt="x" * 40, max_tokens=5),
            request("mean", model="m", prompt="x" * 40),
            request("unknown", model="n", prompt="x" * 40),
            request("embedding", "/v1/embeddings", model="m", input="x" * 40, max_tokens=5),
        ]
    )
    plan = planned(files, data, means={"m": 99.6})
    costs = {one.line: one.cost_tokens for one in all_requests(plan)}
    assert costs == {1: 15, 2: 110, 3: 10 + int(intake.DEFAULT_COMPLETION_TOKENS), 4: 10}
    assert plan.cost_total == sum(costs.values())
    assert plan.models == ("m", "n")


def test_a_plan_is_a_numpy_file_like_any_other(files: BatchFiles, tmp_path: Path) -> None:
    planned(files, request("a") + b"\n" + request("b"))
    table = np.load(tmp_path / "batches" / "batch_1" / "plan.npy")
    assert table.dtype == plan.ROW
    assert sorted(table["line"].tolist()) == [1, 2]


def test_a_plan_opened_again_is_the_same(files: BatchFiles) -> None:
    first = planned(files, b"\n".join(request(str(number), prompt="x" * number) for number in range(50)))
    again = open_plan(files)
    assert all_requests(again) == all_requests(first)
    assert (again.total, again.shard_count, again.cost_total) == (50, first.shard_count, first.cost_total)
    with pytest.raises(IndexError):
        again.shard(again.shard_count)


def test_the_input_is_stored_byte_for_byte(files: BatchFiles) -> None:
    data = b"\xef\xbb\xbf" + request("a") + b"\r\n\n" + request("b")
    planned(files, data)
    assert files.read("input.jsonl") == data


def test_all_later_lines_with_a_taken_custom_id_are_refused_by_line(files: BatchFiles) -> None:
    ids = ["a", "b", "a", "c", "b", "a"]
    taken = take(files, b"\n".join(map(request, ids)), "skip")
    assert [(bad.number, bad.custom_id) for bad in taken.bad_lines] == [(3, "a"), (5, "b"), (6, "a")]
    assert [bad.message[-6:] for bad in taken.bad_lines] == ["line 1", "line 2", "line 1"]
    assert taken.plan is not None
    assert sorted(one.line for one in all_requests(taken.plan)) == [1, 2, 4]


def test_a_collision_of_hashes_is_no_duplicate(files: BatchFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "hash64", len)
    taken = take(files, b"\n".join(map(request, ["a", "b", "a", "cc", "b"])), "skip")
    assert [bad.number for bad in taken.bad_lines] == [3, 5]


def test_duplicates_are_found_across_blocks_of_rereading(
    files: BatchFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duplicates, "_BLOCK_LINES", 2)
    ids = [str(number % 5) for number in range(20)]
    assert take(files, b"\n".join(map(request, ids))).refused == 15


def test_bad_lines_are_listed_in_line_order_and_counted_beyond_a_hundred(files: BatchFiles) -> None:
    lines = [b"bad" if number % 2 else request("same") for number in range(1, 501)]
    taken = take(files, b"\n".join(lines), "skip")
    # The 250 bad lines are found in the pass, 249 duplicates between them afterwards.
    assert taken.refused == 499
    assert [bad.number for bad in taken.bad_lines] == [1, *range(3, 102)]
    errors = taken.errors()
    assert errors is not None
    assert len(errors.data) == 100
    assert len(files.read("parts/invalid/0-0.jsonl").splitlines()) == 499


def test_a_refused_file_says_how_many_lines_when_not_all_are_listed(files: BatchFiles) -> None:
    few = take(files, b"bad\nbad").errors()
    assert few is not None
    assert [error.line for error in few.data] == [1, 2]
    many = take(files, b"bad\n" * 150).errors()
    assert many is not None
    assert (len(many.data), many.data[-1].code) == (101, "invalid_lines")
    assert "150 of 150" in many.data[-1].message


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (Limits(max_lines=2), "too_many_lines"),
        (Limits(max_bytes=100), "file_too_large"),
    ],
)
def test_a_file_beyond_a_limit_is_refused_and_leaves_nothing(
    files: BatchFiles, limits: Limits, code: str
) -> None:
    taken = take(files, b"\n".join(map(request, "abc")), "skip", limits=limits)
    assert taken.problem is not None
    assert (taken.problem.code, taken.plan) == (code, None)
    assert files.walk() == []


def test_a_file_at_its_limits_is_accepted(files: BatchFiles) -> None:
    data = b"\n".join(map(request, "abc"))
    longest = max(map(len, data.split(b"\n")))
    limits = Limits(max_lines=3, max_bytes=len(data), max_line_bytes=longest)
    assert take(files, data, limits=limits).problem is None


def test_blank_lines_are_bounded_too(files: BatchFiles) -> None:
    taken = take(files, b"\n" * 3 + request("a"), limits=Limits(max_lines=2))
    assert taken.problem is not None
    assert taken.problem.code == "too_many_lines"


def test_a_line_that_is_too_long_is_refused_and_the_next_ones_are_read(files: BatchFiles) -> None:
    data = b"\n".join([request("a"), request("long", prompt="x" * 3_000_000), request("b")])
    taken = take(files, data, "skip", limits=Limits(max_line_bytes=1000))
    assert [(bad.number, bad.code) for bad in taken.bad_lines] == [(2, "line_too_long")]
    assert taken.plan is not None
    found = all_requests(taken.plan)
    assert [line.custom_id for line in read_lines(files, found)] == ["a", "b"]


def test_a_file_with_no_good_line_is_refused_as_empty(files: BatchFiles) -> None:
    taken = take(files, b"bad\n\nbad", "skip")
    assert taken.problem is not None
    assert taken.problem.code == "empty_file"
    assert files.walk() == []


def test_more_models_than_a_plan_can_name_are_refused(
    files: BatchFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MOST_MODELS", 2)
    taken = take(
        files, b"\n".join(request(str(number), model=model) for number, model in enumerate("mnom")), "skip"
    )
    assert [(bad.number, bad.code, bad.param) for bad in taken.bad_lines] == [
        (3, "too_many_models", "body.model")
    ]


def test_a_source_that_breaks_leaves_nothing_behind(files: BatchFiles) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell():
                raise ConnectionResetError
            return super().read(50)

    with pytest.raises(ConnectionResetError):
        take_in(
            Broken(b"bad\n" * 100),
            files,
            bad_lines="skip",
            limits=Limits(),
            slots=1,
            mean_completion_tokens={},
        )
    assert files.walk() == []


def test_a_plan_that_cannot_be_stored_leaves_nothing_behind(
    files: BatchFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise StorageFullError("no room")

    monkeypatch.setattr(intake, "write_plan", full)
    with pytest.raises(StorageFullError):
        take(files, request("a") + b"\nbad", "skip")
    assert files.walk() == []


def test_lines_are_read_for_any_choice_of_requests(files: BatchFiles) -> None:
    plan = planned(files, b"\n".join(request(str(number)) for number in range(100)))
    some = random.Random(3).sample(all_requests(plan), 30)
    assert [line.number for line in read_lines(files, some)] == [one.line for one in some]


def test_an_input_that_was_altered_is_noticed(files: BatchFiles) -> None:
    plan = planned(files, request("a"))
    files.write("input.jsonl", request("a")[:-1])
    with pytest.raises(ChangedInputError, match="line 1"):
        read_lines(files, plan.shard(0))


def test_a_plan_that_is_not_there_or_damaged_is_named(files: BatchFiles) -> None:
    with pytest.raises(StorageMissingError):
        open_plan(files)
    planned(files, request("a") + b"\n" + request("b"))
    stored, shards = files.read("plan.npy"), files.read("shards.json")
    for damaged in (b"", stored[:20], b"x" + stored[1:], stored.replace(b"(2,)", b"(3,)")):
        files.write("plan.npy", damaged)
        with pytest.raises(DamagedPlanError):
            open_plan(files)
    files.write("plan.npy", stored[:-1])
    with pytest.raises(DamagedPlanError):
        all_requests(open_plan(files))
    files.write("plan.npy", stored)
    for bad in (b"", b"{}", shards.replace(b'"version":1', b'"version":2')):
        files.write("shards.json", bad)
        with pytest.raises(DamagedPlanError):
            open_plan(files)


def test_a_plan_says_in_a_few_steps_what_its_shards_cost(files: BatchFiles) -> None:
    lines = [request(f"c{n}", prompt="x" * 4, max_tokens=1 + n * n % 911) for n in range(1500)]
    made = planned(files, b"\n".join(lines), slots=16)
    costs = [sum(row.cost_tokens for row in made.shard(shard)) for shard in range(made.shard_count)]
    steps = open_plan(files).cost_steps
    assert steps == cost_steps(costs)
    assert steps[0][0] == 0
    assert 8 < len(steps) <= 16 < made.shard_count
    assert steps[0][1] > 2 * steps[-1][1]


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=70))
def test_cost_steps_add_up_to_what_the_shards_cost(costs: list[int]) -> None:
    steps = cost_steps(costs)
    assert len(steps) <= 16
    ends = [*(first for first, _ in steps[1:]), len(costs)]
    total = sum(mean * (end - first) for (first, mean), end in zip(steps, ends, strict=True))
    assert total == pytest.approx(sum(costs), abs=len(costs))
