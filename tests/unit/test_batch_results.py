"""Lines of result files, and the durable parts that hold them until the end."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.batches.errors import (
    DamagedPartError,
    InvalidNameError,
    StorageExistsError,
    StorageFullError,
)
from dispatcher.batches.parts import Entry, PartWriter, done_lines, durable_results, encode_entry
from dispatcher.batches.results import (
    Detail,
    Usage,
    error_code,
    error_line,
    read_usage,
    record_id,
    result_line,
)
from dispatcher.batches.storage import BatchFiles, Storage


@pytest.fixture
def files(tmp_path: Path) -> BatchFiles:
    return Storage(str(tmp_path)).files("batch_1")


def result(body: bytes, *, status_code: int = 200, detail: Detail | None = None) -> bytes:
    return result_line(
        "a", record_id="batch_req_1", request_id="req_1", status_code=status_code, body=body, detail=detail
    )


def entry(line: int, *, ok: bool = True, record: bytes | None = None) -> Entry:
    return Entry(line, ok, Usage(3, 4), b'{"n":%d}' % line if record is None else record)


def test_an_answer_is_written_as_the_contract_says() -> None:
    detail = Detail(worker="w1", attempts=2, queued_s=0.5, latency_s=1.25)
    assert json.loads(result(b'{"x":1}', detail=detail)) == {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "req_1", "body": {"x": 1}},
        "error": None,
        "forebay": {"worker": "w1", "attempts": 2, "queued_s": 0.5, "latency_s": 1.25},
    }


def test_what_is_no_answer_is_written_as_the_contract_says() -> None:
    assert json.loads(error_line("a", "batch_expired", "too late", None, record_id="batch_req_1")) == {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": None,
        "error": {"code": "batch_expired", "message": "too late"},
    }
    assert json.loads(error_line(None, "x", "y", None, record_id="z"))["custom_id"] is None


def test_an_engines_body_is_kept_byte_for_byte() -> None:
    body = b'{ "a": 1.0e2, "b":0.10, "c": "\\u00e9\xe2\x80\xa8", "d": 12345678901234567890123 }'
    assert b'"body":' + body + b"}" in result(body)


def test_a_body_over_several_lines_becomes_one_line_of_the_same_json() -> None:
    body = json.dumps({"a": ["x\ny", 1], "b": {}}, indent=2).replace("\n", "\r\n").encode()
    line = result(body)
    assert b"\n" not in line
    assert b"\r" not in line
    assert json.loads(line)["response"]["body"] == json.loads(body)


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        (b"", None),
        (b" \n", None),
        (b"<html>\n502</html>", "<html>\n502</html>"),
        (b'{"x": NaN}', '{"x": NaN}'),
        (b'{"x": 1e400}', '{"x": 1e400}'),
        (b'{"x": 1', '{"x": 1'),
        (b"\xff", "\ufffd"),
        (b"[" * 100_000, "[" * 100_000),
    ],
)
def test_a_body_that_is_not_json_becomes_text_so_that_the_line_is_json(body: bytes, kept: str | None) -> None:
    line = result(body, status_code=502)
    assert b"\n" not in line
    assert json.loads(line)["response"]["body"] == kept


@given(st.text(), st.binary())
def test_a_result_is_one_line_of_json_whatever_is_in_it(custom_id: str, body: bytes) -> None:
    line = result_line(
        custom_id, record_id="r", request_id=custom_id, status_code=200, body=body, detail=None
    )
    assert json.loads(line)["custom_id"] == custom_id
    assert b"\n" not in line


def test_a_record_id_depends_on_batch_and_line_alone() -> None:
    ids = {record_id(batch, line) for batch in ("batch_1", "batch_11") for line in (1, 2, 11)}
    assert len(ids) == 6
    assert record_id("batch_1", 1) == record_id("batch_1", 1)
    assert all(name.startswith("batch_req_") for name in ids)


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        ({"usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}, (3, 4)),
        ({"usage": {"input_tokens": 3, "output_tokens": 4}}, (3, 4)),
        ({"usage": {"prompt_tokens": 3, "total_tokens": 3}}, (3, None)),
        ({"usage": {"prompt_tokens": 3.0, "completion_tokens": None}}, (3, None)),
        ({"usage": {"prompt_tokens": True, "completion_tokens": "4"}}, (None, None)),
        ({"usage": {"prompt_tokens": -1, "completion_tokens": 1e300}}, (None, None)),
        ({"usage": None}, (None, None)),
        ({"usage": [1]}, (None, None)),
        ({}, (None, None)),
        ([], (None, None)),
    ],
)
def test_usage_is_read_as_far_as_it_is_said(body: Any, usage: tuple[int | None, int | None]) -> None:
    found = read_usage(json.dumps(body).encode())
    assert (found.prompt_tokens, found.completion_tokens) == usage


@given(st.binary())
def test_no_body_at_all_makes_reading_usage_raise(body: bytes) -> None:
    assert isinstance(read_usage(body), Usage)


def test_an_entry_has_the_form_that_parts_have() -> None:
    encoded = encode_entry(Entry(7, ok=False, usage=Usage(3, None), record=b'{"a":1}'))
    assert encoded == b'{"line":7,"ok":false,"tokens":[3,null],"record":{"a":1}}\n'


def test_results_are_durable_after_a_flush_and_not_before(files: BatchFiles) -> None:
    writer = PartWriter(files, 3, "claim-1")
    writer.add(entry(1))
    writer.add(entry(2, ok=False))
    assert writer.buffered == 2
    assert done_lines(files, 3) == {}
    assert writer.flush() == files.walk("parts/3")[0].size
    assert writer.buffered == 0
    assert done_lines(files, 3) == {1: True, 2: False}
    assert done_lines(files, 4) == {}


def test_a_line_that_two_claims_answered_is_done_as_the_first_said(files: BatchFiles) -> None:
    for claim, ok in (("a", False), ("b", True)):
        writer = PartWriter(files, 0, claim)
        writer.add(entry(1, ok=ok))
        writer.flush()
    assert done_lines(files, 0) == {1: False}


def test_each_flush_is_a_part_of_its_own_and_an_empty_one_is_none(files: BatchFiles) -> None:
    writer = PartWriter(files, 0, "a")
    assert writer.flush() == 0
    for line in (1, 2):
        writer.add(entry(line))
        writer.flush()
    assert {found.path for found in files.walk()} == {"parts/0/a-0.jsonl", "parts/0/a-1.jsonl"}


def test_a_part_is_never_overwritten(files: BatchFiles) -> None:
    for ok in (True, False):
        writer = PartWriter(files, 0, "a")
        writer.add(entry(1, ok=ok))
        if ok:
            writer.flush()
        else:
            with pytest.raises(StorageExistsError):
                writer.flush()
    assert done_lines(files, 0) == {1: True}


def test_results_that_could_not_be_stored_are_stored_by_the_next_flush(
    files: BatchFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise StorageFullError("no room")

    writer = PartWriter(files, 0, "a")
    writer.add(entry(1))
    with monkeypatch.context() as patch:
        patch.setattr(BatchFiles, "write", full)
        with pytest.raises(StorageFullError):
            writer.flush()
    assert writer.buffered == 1
    writer.add(entry(2))
    writer.flush()
    assert done_lines(files, 0) == {1: True, 2: True}


@pytest.mark.parametrize("claim", ["", "../a", "a/b", "a b"])
def test_a_claim_that_could_leave_its_folder_is_refused(files: BatchFiles, claim: str) -> None:
    with pytest.raises(InvalidNameError):
        PartWriter(files, 0, claim)
    with pytest.raises(InvalidNameError):
        done_lines(files, claim)


def test_the_results_that_are_durable_are_each_lines_first(files: BatchFiles) -> None:
    for claim, lines in (("a", [5, 1]), ("b", [1, 70_000])):
        writer = PartWriter(files, 0, claim)
        for line in lines:
            writer.add(entry(line, record=b'{"%s":%d}' % (claim.encode(), line)))
        writer.flush()
    assert list(durable_results(files)) == [b'{"a":5}', b'{"a":1}', b'{"b":70000}']


@pytest.mark.parametrize(
    "data",
    [
        b"hello\n",
        b"\n",
        b'{"line":1}\n',
        b'{"line":0,"ok":true,"tokens":[1,2],"record":{}}\n',
        b'{"line":99999999999,"ok":true,"tokens":[1,2],"record":{}}\n',
        b'{"line":1,"ok":true,"tokens":[1],"record":{}}\n',
        b'{"line":1,"ok":true,"tokens":[1,2],"record":{}}',
        b"\xff\n",
    ],
)
def test_a_foreign_or_damaged_part_is_named_with_its_line(files: BatchFiles, data: bytes) -> None:
    files.write("parts/0/a-0.jsonl", encode_entry(entry(1)) + data)
    with pytest.raises(DamagedPartError, match=r"parts/0/a-0\.jsonl, line 2"):
        done_lines(files, 0)


def test_the_code_of_an_error_is_read_from_its_line_whatever_its_custom_id_says():
    odd = '"error":{"code":"batch_cancelled"}'
    assert error_code(error_line(odd, "batch_expired", "why", None, record_id="r")) == "batch_expired"
    answer = result_line(odd, record_id="r", request_id="q", status_code=500, body=b"{}", detail=None)
    assert error_code(answer) is None
