"""What `forebay explain` prints of records in a file: for people, for programs, and when there is nothing."""

from __future__ import annotations

import msgspec
import pytest
from typer.testing import CliRunner

from dispatcher.outcome import Label
from dispatcher.records import DecisionRecord, Dropped
from dispatcher.scheduler.decision import CandidateScores
from forebay import explanations
from forebay.cli.main import app
from workers.breaker import Verdict

WEIGHTS = {"queue": 0.25, "inflight": 0.75}


def candidate(worker, total, *, over=False):
    return CandidateScores(
        worker=worker, total=total, over_kv_ceiling=over, scores={"queue": 1.0, "inflight": total}
    )


def record(**changes):
    facts = {
        "request_id": "batch_req_1",
        "custom_id": "c1",
        "batch_id": "batch_a",
        "attempt": 1,
        "beside": False,
        "at": 1_000_000.5,
        "waited_s": 0.25,
        "strategy": "batch",
        "picker": "max-score",
        "weights": WEIGHTS,
        "dropped": {},
        "refusals": {},
        "candidates": (candidate("a:1", 0.75), candidate("b:1", 0.5)),
        "candidate_count": 2,
        "picked": "a:1",
        "worker": "a:1",
        "outcome": Label.OK,
        "verdict": Verdict.SUCCESS,
        "elapsed_s": 1.5,
        "dispatcher": "d1",
    }
    return DecisionRecord(**(facts | changes))


@pytest.fixture
def explain(tmp_path):
    """Runs the command on records in a file; gives its exit code and the lines that it said."""

    def run(records, *words):
        path = tmp_path / "why.jsonl"
        explanations.write(records, path)
        result = CliRunner().invoke(app, ["explain", *words, "--from", str(path)], prog_name="forebay")
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        return result.exit_code, [line.rstrip() for line in result.output.splitlines()]

    return run


FAILED = record(outcome=Label.SERVER_ERROR, verdict=Verdict.FAILURE, elapsed_s=0.01)
AGAIN = record(
    attempt=2,
    at=1_000_002.0,
    dropped={
        "tried": Dropped(count=1, workers=("a:1",)),
        "limit": Dropped(count=20, workers=tuple(f"w{number}" for number in range(16))),
    },
    candidates=(candidate("b:1", 0.5),),
    candidate_count=1,
    picked="b:1",
    worker="b:1",
)


def test_attempts_stand_in_their_order_with_whom_filters_dropped_scores_and_outcomes(explain):
    code, lines = explain([AGAIN, FAILED], "c1")
    assert code == 0
    assert lines == [
        "line c1 of batch_a, request batch_req_1",
        "",
        "attempt 1: sent to a:1, ended server_error (failure for the worker)",
        "  at 1970-01-12 13:46:40.500Z by d1",
        "  waited 0.25 s, took 0.01 s",
        "  strategy batch, picker max-score",
        "  no filter dropped a worker",
        "  worker  total  queue  inflight",
        "  weight   1.00   0.25      0.75",
        "  a:1     0.750   1.00      0.75  <- picked",
        "  b:1     0.500   1.00      0.50",
        "",
        "attempt 2: sent to b:1, ended ok",
        "  at 1970-01-12 13:46:42.000Z by d1",
        "  waited 0.25 s, took 1.50 s",
        "  strategy batch, picker max-score",
        "  dropped by filter: tried 1 (a:1), limit 20",
        "  worker  total  queue  inflight",
        "  weight   1.00   0.25      0.75",
        "  b:1     0.500   1.00      0.50  <- picked",
    ]


def test_a_pick_that_had_no_room_any_more_is_told_from_who_took_the_request(explain):
    _, lines = explain([record(worker="b:1", refusals={"c:1": "limit"})], "c1")
    assert "  picked a:1, which had no room any more; the next that had some took it" in lines
    assert "  refused just before: c:1 (limit)" in lines
    assert [line.partition("<- ")[2] for line in lines if "<-" in line] == ["picked", "taken"]


def test_a_worker_over_the_kv_ceiling_and_those_left_out_are_marked(explain):
    crowd = (candidate("a:1", 0.75), candidate("b:1", 0.005, over=True))
    _, lines = explain([record(candidates=crowd, candidate_count=40)], "c1")
    assert any(line.endswith("<- KV over its ceiling") for line in lines)
    assert "  scored 40, 38 worse ones are not shown" in lines


def test_a_second_attempt_beside_one_that_ran_says_that_nothing_was_scored(explain):
    beside = record(
        attempt=2, beside=True, waited_s=None, strategy=None, picker=None, weights={}, candidates=(),
        candidate_count=0, picked=None,
    )  # fmt: skip
    _, lines = explain([beside], "c1")
    assert lines[-2:] == [
        "  did not wait, took 1.50 s",
        "  a second attempt beside one that ran: to the fastest free worker, nothing was scored",
    ]


def test_json_holds_the_records_as_they_are(explain):
    code, [line] = explain([FAILED, AGAIN], "batch_req_1", "--json")
    shown = msgspec.json.decode(line)
    assert code == 0
    assert {key: shown[key] for key in shown.keys() - {"attempts"}} == {
        "request_id": "batch_req_1", "custom_id": "c1", "batch_id": "batch_a", "also_in": [],
    }  # fmt: skip
    assert [DecisionRecord.model_validate_json(msgspec.json.encode(one)) for one in shown["attempts"]] == [
        FAILED,
        AGAIN,
    ]


def test_of_several_batches_the_newest_is_shown_unless_one_is_named(explain):
    other = record(request_id="batch_req_2", batch_id="batch_b", at=2_000_000.0)
    _, [line] = explain([other, FAILED], "c1", "--json")
    shown = msgspec.json.decode(line)
    assert (shown["batch_id"], shown["also_in"]) == ("batch_b", ["batch_a"])
    _, lines = explain([other, FAILED], "c1")
    assert lines[1] == "the newest; --batch chooses among others: batch_a"
    _, [line] = explain([other, FAILED], "c1", "--json", "--batch", "batch_a")
    shown = msgspec.json.decode(line)
    assert (shown["batch_id"], shown["also_in"]) == ("batch_a", [])


@pytest.mark.parametrize("words", [("c2",), ("c1", "--batch", "batch_z")])
def test_a_request_of_which_nothing_is_recorded_is_bad_input_and_says_what_may_be_the_matter(explain, words):
    code, lines = explain([FAILED], *words)
    assert code == 2
    assert f"no decision is recorded for {words[0]}" in lines[0]
    assert all(name in lines[0] for name in ("explain_sample", "explain_keep", "explain_ttl_s"))


def test_a_file_that_holds_something_else_is_refused_with_its_line(tmp_path):
    path = tmp_path / "why.jsonl"
    path.write_text(FAILED.model_dump_json() + '\n{"custom_id": "c1"}\n')
    result = CliRunner().invoke(app, ["explain", "c1", "--from", str(path)], prog_name="forebay")
    assert result.exit_code == 2
    assert "line 2: that is no decision record" in result.output


def test_an_inline_request_is_called_by_its_job(explain):
    inline = record(request_id="job-1", custom_id="", batch_id=None)
    assert explain([inline], "job-1")[1][0] == "inline request job-1"
