"""The failed lines of an ended batch, byte for byte as they came in; no Redis is needed."""

from __future__ import annotations

import io
import json
import random

import pytest

from dispatcher.batches.errors import ChangedInputError, DamagedFileError, StorageMissingError
from dispatcher.batches.failed import failed_lines, read_inputs
from dispatcher.batches.finalise import fill_with, finalise
from dispatcher.batches.intake import Limits, take_in
from dispatcher.batches.parts import Entry, PartWriter
from dispatcher.batches.plan import open_plan
from dispatcher.batches.results import Usage, error_line, record_id, result_line
from dispatcher.batches.storage import ERRORS, INPUT, Storage

LINES = 60


def line(number):
    """One request, spelled in ways that no program would choose."""
    body = {"model": "m", "prompt": f"ü{number}\u2028", "max_tokens": 3}
    spelled = json.dumps(body, ensure_ascii=number % 2 == 0, indent=None if number % 3 else 1).replace(
        "\n", " "
    )
    head = f'{{"custom_id": "c{number}",   "method": "POST", "url": "/v1/completions"'
    return f'{head}, "body": {spelled}}}'.encode() + (b"\r" if number % 5 == 0 else b"")


@pytest.fixture
def files(tmp_path):
    return Storage(str(tmp_path)).files("batch_0123456789abcdef01234567")


def take(files, lines):
    data = b"\n".join(lines)
    intake = take_in(
        io.BytesIO(data), files, bad_lines="skip", limits=Limits(), slots=4, mean_completion_tokens={}
    )
    return intake.plan


def end(files, plan, failed, unanswered=frozenset()):
    """Every line answered but those; the failed ones by an HTTP answer or by none, in turn."""
    for shard in range(plan.shard_count):
        writer = PartWriter(files, shard, "1.d")
        for request in plan.shard(shard):
            if request.line in unanswered:
                continue
            name, custom_id = record_id(files.batch_id, request.line), f"c{request.line}"
            ok = request.line not in failed
            if not ok and request.line % 2:
                record = error_line(custom_id, "max_attempts", "gone", None, record_id=name)
            else:
                status = 200 if ok else 400
                record = result_line(
                    custom_id, record_id=name, request_id=name, status_code=status, body=b"{}", detail=None
                )
            writer.add(Entry(request.line, ok, Usage(None, None), record))
        writer.flush()
    finalise(files, plan, order="completed", fill=fill_with(files.batch_id, "batch_cancelled", "x"))


def read(files):
    found = failed_lines(files, open_plan(files))
    return b"".join(read_inputs(files, found.rows)), found


def test_failed_lines_come_in_the_order_of_the_input_and_byte_for_byte(files):
    lines = [b"\xef\xbb\xbf" + line(1), *(line(number) for number in range(2, LINES + 1))]
    failed = set(random.Random(3).sample(range(2, LINES), 17)) | {1, LINES}
    end(files, take(files, lines), failed)
    data, found = read(files)
    assert data == b"".join(lines[number - 1] + b"\n" for number in sorted(failed))
    assert (len(found.rows), found.left_out) == (len(failed), 0)


def test_cancelled_lines_are_among_them_and_lines_that_are_no_requests_are_counted(files):
    lines = [line(1), b"no json", line(3), b"", line(5), line(1), line(7)]
    end(files, take(files, lines), failed={3}, unanswered={7})
    data, found = read(files)
    assert data == lines[2] + b"\n" + lines[6] + b"\n"
    assert found.left_out == 2  # no json, and a custom_id that is taken


def test_what_is_not_of_this_batch_is_damage(files, tmp_path):
    end(files, take(files, [line(1), line(2)]), failed={2})
    strange = error_line("c9", "max_attempts", "x", None, record_id=record_id(files.batch_id, 9))
    for damage in (strange, b"no json", b'{"id": "batch_req_12"}', b'{"id": "line two"}'):
        files.write(ERRORS, damage + b"\n")
        with pytest.raises(DamagedFileError):
            read(files)


def test_an_input_that_was_cut_off_is_noticed(files):
    end(files, take(files, [line(1), line(2)]), failed={2})
    files.write(INPUT, files.read(INPUT)[:-1])
    with pytest.raises(ChangedInputError):
        read(files)


def test_files_that_are_gone_are_named(files):
    end(files, take(files, [line(1), line(2)]), failed={2})
    files.remove(ERRORS)
    with pytest.raises(StorageMissingError):
        read(files)
