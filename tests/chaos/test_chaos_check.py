"""The check of the invariant finds what it is for: each way in which a batch can end wrongly."""

from __future__ import annotations

from random import Random

import msgspec
import pytest

from dispatcher.batches.results import Detail, error_line, record_id, result_line
from forebay.simulator import answers
from forebay.simulator.calls import asked_for
from tests.chaos.check import Ended, check
from tests.chaos.recovery import recovery_s
from tests.chaos.workload import SEED, Answer, Invalid, Refusal, lines

BATCH = "batch_" + "0" * 24
GIVEN = lines(Random(4), 400)
DETAIL = Detail("127.0.0.1:1", 1, 0.1, 0.2)


def answer(line, text=None, tokens=None):
    body = {
        "choices": [{"message": {"content": line.end.text if text is None else text}}],
        "usage": {"completion_tokens": line.end.tokens if tokens is None else tokens},
    }
    return result(line, 200, body)


def result(line, status, body):
    name = record_id(BATCH, line.number)
    return result_line(
        line.custom_id,
        record_id=name,
        request_id=name,
        status_code=status,
        body=msgspec.json.encode(body),
        detail=DETAIL,
    )


def failure(line, code):
    return error_line(line.custom_id, code, "why", None, record_id=record_id(BATCH, line.number))


def result_of(line):
    match line.end:
        case Answer():
            return answer(line)
        case Refusal(status):
            return result(line, status, {"error": "too long"})
        case Invalid():
            return failure(line, "invalid_line")


def is_answered(line):
    return isinstance(line.end, Answer)


def ended(*, replaced=None, dropped=(), twice=(), status="completed", asked=None, **record):
    """A batch that ended well, but for what is said."""
    results = {line.custom_id: result_of(line) for line in GIVEN} | (replaced or {})
    files = {True: b"", False: b""}
    tokens = {True: 0, False: 0}
    count = {True: 0, False: 0}
    for line in GIVEN:
        if line.custom_id in dropped:
            continue
        data = results[line.custom_id]
        good = b'"status_code":200' in data
        for _ in range(2 if line.custom_id in twice else 1):
            files[good] += data + b"\n"
            count[good] += 1
            if good:
                tokens[good] += msgspec.json.decode(data)["response"]["body"]["usage"]["completion_tokens"]
    counts = {"total": len(GIVEN), "completed": count[True], "failed": count[False]}
    told = {
        "id": BATCH,
        "status": status,
        "request_counts": counts,
        "output_file_id": "o",
        "error_file_id": "e",
        "usage": {"output_tokens": tokens[True]},
    }
    return Ended(GIVEN, told | record, files[True] or None, files[False] or None, **(asked or {}))


ANSWERED = [line for line in GIVEN if is_answered(line)]
REFUSED = next(line for line in GIVEN if isinstance(line.end, Refusal))
INVALID = next(line for line in GIVEN if isinstance(line.end, Invalid))


def test_a_batch_that_ended_well_has_no_findings():
    findings = check(ended())
    assert (findings.good, findings.lines) == (True, 400)


def test_a_lost_line_is_found_by_its_name():
    findings = check(ended(dropped={ANSWERED[3].custom_id, REFUSED.custom_id}))
    assert sorted(findings.lost) == sorted([ANSWERED[3].custom_id, REFUSED.custom_id])


def test_a_doubled_line_is_found_by_its_name():
    assert check(ended(twice={ANSWERED[5].custom_id})).doubled == [ANSWERED[5].custom_id]


def test_a_line_in_both_files_is_doubled():
    good = ended()
    both = Ended(GIVEN, good.record, good.output, (good.errors or b"") + answer(ANSWERED[0]) + b"\n")
    assert check(both).doubled == [ANSWERED[0].custom_id]


@pytest.mark.parametrize(
    ("line", "data", "word"),
    [
        (ANSWERED[0], answer(ANSWERED[0], text=ANSWERED[1].end.text), "answer of another"),
        (ANSWERED[0], answer(ANSWERED[0], tokens=1), "answer of another"),
        (ANSWERED[0], failure(ANSWERED[0], "max_attempts"), "max_attempts"),
        (ANSWERED[0], failure(ANSWERED[0], "batch_cancelled"), "batch that is completed"),
        (ANSWERED[0], result(ANSWERED[0], 500, {}), "500"),
        (REFUSED, result(REFUSED, 500, {}), "refused with 500"),
        (INVALID, failure(INVALID, "batch_cancelled"), "batch_cancelled"),
    ],
)
def test_a_line_that_ended_as_it_must_not_is_found(line, data, word):
    [wrong] = check(ended(replaced={line.custom_id: data})).wrong
    assert line.custom_id in wrong
    assert word in wrong


def test_an_id_of_another_line_is_found():
    foreign = answer(ANSWERED[0]).replace(
        record_id(BATCH, ANSWERED[0].number).encode(), record_id(BATCH, ANSWERED[1].number).encode()
    )
    [wrong] = check(ended(replaced={ANSWERED[0].custom_id: foreign})).wrong
    assert "its id is" in wrong


def test_lines_out_of_order_are_found():
    good = ended()
    reversed_lines = b"".join(reversed((good.output or b"").splitlines(keepends=True)))
    assert check(Ended(GIVEN, good.record, reversed_lines, good.errors)).wrong == [
        "output: not in the order of the input"
    ]


def test_a_file_that_is_cut_off_is_found_and_its_lines_are_lost():
    good = ended()
    findings = check(Ended(GIVEN, good.record, (good.output or b"")[:-10], good.errors))
    assert len(findings.lost) == len(ANSWERED)
    assert "cut off" in findings.wrong[0]


def test_a_line_of_nobody_is_found():
    good = ended()
    foreign = answer(ANSWERED[0]).replace(b'"custom_id":"c', b'"custom_id":"x') + b"\n"
    findings = check(Ended(GIVEN, good.record, (good.output or b"") + foreign, good.errors))
    assert any("no line of the input" in wrong for wrong in findings.wrong)


def unanswered(code):
    return {line.custom_id: failure(line, code) for line in [*ANSWERED[100:], REFUSED]}


def test_a_cancelled_batch_may_leave_lines_unanswered_if_somebody_wanted_it():
    wanted = {"replaced": unanswered("batch_cancelled"), "status": "cancelled"}
    assert check(ended(**wanted, asked={"cancel_asked": True})).good
    assert check(ended(**wanted)).wrong == ["cancelled, and nobody asked for it"]


def test_an_expired_batch_may_leave_lines_unanswered_if_its_deadline_was_near():
    wanted = {"replaced": unanswered("batch_expired"), "status": "expired"}
    assert check(ended(**wanted, asked={"may_expire": True})).good
    assert check(ended(**wanted)).wrong == ["expired long before its deadline"]


def test_expired_lines_make_an_expired_batch_and_no_other():
    near = {"may_expire": True}
    without = check(ended(status="expired", asked=near))
    assert without.wrong == ["expired, and no line of it is"]
    assert len(check(ended(replaced=unanswered("batch_expired"), asked=near)).wrong) == len(ANSWERED) - 99


@pytest.mark.parametrize(
    ("record", "word"),
    [
        ({"status": "in_progress"}, "the batch is in_progress"),
        ({"request_counts": {"total": 400, "completed": 400, "failed": 0}}, "the record counts"),
        ({"output_file_id": None}, "output_file_id is None, and the file is there"),
        ({"usage": None}, "the record tells 0 tokens"),
    ],
)
def test_a_record_that_says_something_else_than_the_files_is_found(record, word):
    [wrong] = check(ended(**record)).wrong
    assert word in wrong


def test_prompts_are_all_different_and_answers_are_what_an_engine_says():
    assert len({line.data for line in GIVEN}) == len(GIVEN)
    body = msgspec.json.decode(ANSWERED[0].data)["body"]
    digest = answers.fingerprint(SEED, asked_for(body["messages"]))
    assert ANSWERED[0].end.text == answers.words(digest, 0, ANSWERED[0].end.tokens)


def test_a_recovery_lasts_from_a_faults_end_to_the_next_durable_result():
    assert recovery_s(2.0, [1.0, 1.9, 2.5, 3.0]) == pytest.approx(0.5)
    assert recovery_s(2.0, [2.0]) == 0.0
    assert recovery_s(2.0, [1.0]) is None
