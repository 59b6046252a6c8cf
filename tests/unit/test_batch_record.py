"""What users see of a batch, and how its status may change."""

import json
import random
from graphlib import TopologicalSorter
from typing import Any

import pytest
from pydantic import ValidationError

from dispatcher.batches.errors import IllegalMoveError
from dispatcher.batches.record import (
    MOVES,
    BatchErrorItem,
    BatchErrors,
    BatchOptions,
    BatchRecord,
    BatchStatus,
    BatchUsage,
    RequestCounts,
    new_batch_id,
)
from dispatcher.batches.storage import checked_name

PAIRS = [(left, right) for left in BatchStatus for right in BatchStatus if left is not right]


def record(status: BatchStatus = BatchStatus.VALIDATING) -> BatchRecord:
    return BatchRecord(id="batch_1", created_at=100, status=status)


@pytest.mark.parametrize(("left", "right"), PAIRS)
def test_a_status_moves_only_as_the_table_says(left: BatchStatus, right: BatchStatus) -> None:
    if right in MOVES[left]:
        moved = record(left).moved(right, 200.9)
        assert moved.status is right
        assert getattr(moved, f"{right}_at") == 200
    else:
        with pytest.raises(IllegalMoveError, match=f"from {left} to {right}"):
            record(left).moved(right, 200)


@pytest.mark.parametrize("status", BatchStatus)
def test_moving_to_the_same_status_changes_nothing(status: BatchStatus) -> None:
    assert record(status).moved(status, 200) == record(status)


def test_the_only_way_back_is_from_finalizing_to_run_what_vanished() -> None:
    forward = {status: set(moves) for status, moves in MOVES.items()}
    forward[BatchStatus.FINALIZING].remove(BatchStatus.IN_PROGRESS)
    order = list(TopologicalSorter(forward).static_order())  # raises CycleError
    assert set(order) == set(BatchStatus)


@pytest.mark.parametrize("status", BatchStatus)
def test_an_end_can_be_reached_from_every_status(status: BatchStatus) -> None:
    reached = {status}
    while not any(one.final for one in reached):
        further = reached.union(*(MOVES[one] for one in reached))
        assert further > reached
        reached = further


def test_the_final_statuses_are_the_four_ends() -> None:
    assert {status for status in BatchStatus if status.final} == {
        "completed",
        "failed",
        "expired",
        "cancelled",
    }


def test_a_new_record_has_openais_fields_and_null_for_what_is_not_there() -> None:
    fields = json.loads(record().to_json())
    for name in (
        "output_file_id",
        "error_file_id",
        "errors",
        "usage",
        "completed_at",
        "expires_at",
        "metadata",
    ):
        assert fields[name] is None
    assert fields["object"] == "batch"
    assert fields["status"] == "validating"
    assert fields["request_counts"] == {"total": 0, "completed": 0, "failed": 0}


def with_news(written: Any) -> Any:
    """What was written as JSON, with one more field in every object, as a newer version might have it."""
    match written:
        case dict():
            return {name: with_news(value) for name, value in written.items()} | {"news": [1]}
        case list():
            return [with_news(one) for one in written]
        case _:
            return written


def test_a_record_with_fields_that_are_not_known_here_reads_as_without_them() -> None:
    written = json.loads(full_record().to_json())
    assert BatchRecord.from_json(json.dumps(with_news(written | {"metadata": None}))) == (
        full_record().model_copy(update={"metadata": None})
    )


def full_record() -> BatchRecord:
    return BatchRecord(
        id="batch_1",
        endpoint="/v1/completions",
        model="m",
        errors=BatchErrors(data=(BatchErrorItem(code="c", message="é", line=3, param="url"),)),
        input_file_id="in",
        status=BatchStatus.COMPLETED,
        output_file_id="out",
        created_at=1,
        completed_at=9,
        request_counts=RequestCounts(total=3, completed=2, failed=1),
        usage=BatchUsage(input_tokens=1, output_tokens=2, total_tokens=3),
        metadata={"a": "b"},
        forebay=BatchOptions(
            queue="low", bad_lines="skip", order="completed", priority=-1, slots=8, shards=4
        ),
    )


def test_a_record_comes_back_from_json_as_it_was() -> None:
    assert BatchRecord.from_json(full_record().to_json()) == full_record()
    assert BatchRecord.from_json(record().to_json()) == record()


@pytest.mark.parametrize("field", ["output_file_id", "error_file_id", "input_file_id", "id"])
def test_a_file_id_is_null_and_never_empty(field: str) -> None:
    with pytest.raises(ValidationError):
        BatchRecord.model_validate({"id": "batch_1", "created_at": 1} | {field: ""})


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        record().status = BatchStatus.FAILED  # type: ignore[misc] # that it is frozen is what is tested


def test_a_batch_id_follows_from_the_random_source_and_may_be_a_folder() -> None:
    assert new_batch_id(random.Random(1)) == new_batch_id(random.Random(1))
    ids = {new_batch_id(random.Random(seed)) for seed in range(100)}
    assert len(ids) == 100
    assert {len(one) for one in ids} == {30}
    assert all(checked_name(one, "batch id") == one for one in ids)
