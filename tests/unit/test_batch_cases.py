"""Files that broke other batch services, each with the lines it must have accepted and refused."""

import io
import json
from pathlib import Path
from typing import Any, Literal

import pytest

from dispatcher.batches.intake import Intake, Limits, take_in
from dispatcher.batches.plan import read_lines
from dispatcher.batches.storage import BatchFiles, Storage

DATA = Path(__file__).parent.parent / "data" / "batch"
CASES: list[dict[str, Any]] = json.loads((DATA / "cases.json").read_text())
BAD_CASES = [case for case in CASES if case["bad"]]


def name(case: dict[str, Any]) -> str:
    return str(case["file"]).removesuffix(".jsonl")


def take(files: BatchFiles, case: dict[str, Any], bad_lines: Literal["fail", "skip"]) -> Intake:
    data = io.BytesIO((DATA / case["file"]).read_bytes())
    return take_in(data, files, bad_lines=bad_lines, limits=Limits(), slots=4, mean_completion_tokens={})


@pytest.fixture
def files(tmp_path: Path) -> BatchFiles:
    return Storage(str(tmp_path)).files("batch_1")


@pytest.mark.parametrize("bad_lines", ["fail", "skip"])
@pytest.mark.parametrize("case", CASES, ids=name)
def test_exactly_the_named_lines_are_refused(
    files: BatchFiles, case: dict[str, Any], bad_lines: Literal["fail", "skip"]
) -> None:
    intake = take(files, case, bad_lines)
    assert [bad.number for bad in intake.bad_lines] == [bad["line"] for bad in case["bad"]]
    assert (intake.accepted, intake.refused) == (case["accepted_lines"], len(case["bad"]))


@pytest.mark.parametrize("case", BAD_CASES, ids=name)
def test_a_file_with_a_bad_line_leaves_nothing_behind_when_bad_lines_fail(
    files: BatchFiles, case: dict[str, Any]
) -> None:
    intake = take(files, case, "fail")
    assert intake.problem is not None
    assert intake.problem.code == "invalid_lines"
    assert intake.plan is None
    assert files.walk() == []


@pytest.mark.parametrize("case", [case for case in CASES if case["accepted_lines"]], ids=name)
def test_every_good_line_is_planned_with_its_body_byte_for_byte(
    files: BatchFiles, case: dict[str, Any]
) -> None:
    plan = take(files, case, "skip").plan
    assert plan is not None
    lines = [line for shard in range(plan.shard_count) for line in read_lines(files, plan.shard(shard))]
    written = (DATA / case["file"]).read_bytes().split(b"\n")
    assert len(lines) == case["accepted_lines"]
    for line in lines:
        assert written[line.number - 1].rstrip(b" \r}").endswith(line.body.rstrip(b"}"))


@pytest.mark.parametrize("case", BAD_CASES, ids=name)
def test_every_bad_line_becomes_an_error_line_when_bad_lines_are_skipped(
    files: BatchFiles, case: dict[str, Any]
) -> None:
    take(files, case, "skip")
    entries = [json.loads(line) for line in files.read("parts/invalid/0-0.jsonl").splitlines()]
    assert [entry["line"] for entry in entries] == [bad["line"] for bad in case["bad"]]
    assert all(entry["record"]["error"]["code"] == "invalid_line" for entry in entries)
    assert not any(entry["ok"] or entry["record"]["response"] for entry in entries)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_message_names_the_other_line_where_two_disagree(files: BatchFiles, case: dict[str, Any]) -> None:
    for bad, wanted in zip(take(files, case, "fail").bad_lines, case["bad"], strict=True):
        if "names_line" in wanted:
            assert f"line {wanted['names_line']}" in bad.message


@pytest.mark.parametrize(
    ("file", "params"),
    [
        ("missing_keys", ["custom_id", "method", "url", "body"]),
        ("wrong_method", ["method", "method"]),
        ("url_elsewhere", ["url"] * 5),
        ("custom_id_types", ["custom_id"] * 3),
        ("body_not_object", ["body", "body"]),
        ("stream_true", ["body.stream"]),
        ("duplicate_key_in_line", ["model"]),
        ("duplicate_custom_id", ["custom_id"]),
        ("cut_json", [None]),
    ],
)
def test_the_key_at_fault_is_named(files: BatchFiles, file: str, params: list[str | None]) -> None:
    intake = take(files, {"file": f"{file}.jsonl"}, "fail")
    assert [bad.param for bad in intake.bad_lines] == params


def test_an_empty_file_is_refused_as_holding_no_requests(files: BatchFiles) -> None:
    intake = take(files, {"file": "empty_file.jsonl"}, "skip")
    assert intake.problem is not None
    assert intake.problem.code == "empty_file"
    errors = intake.errors()
    assert errors is not None
    assert [(error.code, error.line) for error in errors.data] == [("empty_file", None)]


def test_the_custom_id_of_a_bad_line_is_kept_where_it_can_be_read(files: BatchFiles) -> None:
    ids = [bad.custom_id for bad in take(files, {"file": "missing_keys.jsonl"}, "fail").bad_lines]
    assert ids == [None, "a", "b", "c"]
    for file in ("cut_json", "invalid_utf8", "bom_in_the_middle"):
        [bad] = take(files, {"file": f"{file}.jsonl"}, "fail").bad_lines
        assert bad.custom_id == "r2"
