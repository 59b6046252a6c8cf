"""Decision records as a workload: what is replayed, what a sample stands for, what is told of it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from dispatcher.outcome import Label
from dispatcher.records import DecisionRecord
from dispatcher.scheduler.strategies import SchedulerPolicy, Strategies
from forebay import explanations
from forebay.cli.main import app
from forebay.policy.recorded import check_strategies, read
from forebay.policy.replay import Setup, replay
from workers.breaker import Verdict
from workers.errors import SettingsError

START_S = 1_800_000_000.0


def record(name, at=0.0, **changes):
    facts = {
        "request_id": name, "custom_id": name, "batch_id": "batch_1", "attempt": 1, "beside": False,
        "sample": 1.0, "urgency": 1, "model": "m", "prompt_tokens": 10, "asked_tokens": 500,
        "cost_tokens": 510, "answer_tokens": 100, "at": START_S + at, "waited_s": 0.0, "strategy": "batch",
        "picker": "max-score",
        "weights": {}, "dropped": {}, "refusals": {}, "candidates": (), "candidate_count": 1, "picked": "a:1",
        "worker": "a:1", "outcome": Label.OK, "verdict": Verdict.SUCCESS, "elapsed_s": 1.0, "dispatcher": "d",
    }  # fmt: skip
    return DecisionRecord(**(facts | changes))


def workload(told, **how):
    return told.workload(**({"at_once": False, "slots": 4} | how))


def test_requests_come_when_they_came_with_what_was_known_and_answered():
    told = read(
        [record("b", 5.0, waited_s=2.0, answer_tokens=7, urgency=0), record("a", 1.0, strategy="chat")]
    )
    work = workload(told)
    assert list(work.arrivals) == [0.0, 2.0]
    first, second = work.requests
    assert (first.need.strategy, first.answer_tokens, first.urgency) == ("chat", 100, 1)
    assert (second.need.prompt_tokens, second.need.asked_tokens, second.need.cost_tokens) == (10, 500, 510)
    assert (second.answer_tokens, second.urgency, second.batch_id) == (7, 0, "batch_1")


def test_a_request_that_failed_first_came_before_its_failure_and_has_the_answer_of_its_last_attempt():
    failed = record("a", 1.0, waited_s=0.5, outcome=Label.SERVER_ERROR, answer_tokens=None)
    won = record("a", 9.0, attempt=2, waited_s=0.0, worker="b:1", answer_tokens=3)
    told = read([won, failed])
    assert workload(told).requests[0].answer_tokens == 3
    happened = told.as_it_was(workload(told), told.fleet())
    assert (happened.makespan_s, happened.waited_mean_s) == (9.5, 0.5)
    assert [share.worker for share in happened.workers] == ["b:1"]


def test_a_sampled_request_stands_for_others_that_come_before_the_next_one():
    told = read([record("a", 0.0, sample=0.25), record("b", 8.0), record("c", 9.0, sample=0.5)])
    assert (told.requests, told.stand_for) == (3, 7)
    work = workload(told)
    assert list(work.arrivals) == [0.0, 2.0, 4.0, 6.0, 8.0, 9.0, 9.0]
    assert any("a sample that stands for 7" in note for note in told.notes(100, work))
    assert "3 answered requests of 100 lines" in told.notes(100, work)[0]


def test_a_whole_record_claims_no_sample_and_all_at_once_no_arrivals():
    told = read([record("a"), record("b", 1.0)])
    assert not any("sample" in note for note in told.notes(None, workload(told)))
    at_once = workload(told, at_once=True)
    assert (at_once.arrivals, sum(at_once.shards)) == (None, 2)
    assert not any("when they came" in note for note in told.notes(None, at_once))


def test_what_cannot_be_replayed_is_left_out_and_counted():
    told = read(
        [
            record("good"),
            record("unanswered", outcome=Label.TIMEOUT, answer_tokens=None),
            record("untold", answer_tokens=None),
            record("old", prompt_tokens=None, cost_tokens=None),
        ]
    )
    assert (told.requests, told.left_out) == (1, 3)
    assert any("3 more have no answer" in note for note in told.notes(None, workload(told)))
    with pytest.raises(SettingsError, match="of 1 recorded requests none can be replayed"):
        read([record("untold", answer_tokens=None)])
    with pytest.raises(SettingsError, match="no decision is recorded there"):
        read([])


def test_models_that_the_replay_takes_as_one_are_told():
    told = read([record("a"), record("b", model="n")])
    assert any("for 2 models" in note for note in told.notes(None, workload(told)))


def test_the_fleet_has_the_speed_of_its_answers_and_the_slots_that_were_taken_at_once():
    told = read(
        [
            record("a1", 0.0),
            record("a2", 0.5),
            record("a3", 1.0),  # when the first has just ended
            record("b1", 0.0, worker="b:1", elapsed_s=0.25),
        ]
    )
    assert [(spec.name, spec.speed, spec.slots) for spec in told.fleet()] == [
        ("a:1", 100, 2),
        ("b:1", 400, 1),
    ]


def test_what_happened_is_told_in_shares_time_and_waiting():
    told = read(
        [record(f"a{n}", n, waited_s=float(n)) for n in range(3)]
        + [record("b", 1.0, worker="b:1", beside=True, attempt=2, waited_s=None, answer_tokens=300)]
    )
    happened = told.as_it_was(workload(told), told.fleet())
    assert (happened.requests, happened.tokens, happened.makespan_s) == (4, 600, 3.0)
    assert [(share.requests, share.token_share) for share in happened.workers] == [(3, 0.5), (1, 0.5)]
    assert (happened.waited_mean_s, happened.second_attempts, happened.second_tokens) == (0.75, 1, None)


def test_a_replay_starts_nothing_before_it_came_and_ends_near_what_happened():
    told = read([record(f"r{number}", number * 0.25) for number in range(40)])
    work, fleet = workload(told), told.fleet()
    replayed = replay(work, fleet, Strategies(SchedulerPolicy()), Setup())
    assert all(ticket.leased_s >= ticket.joined_s for ticket in replayed.tickets)
    assert replayed.elapsed_s == pytest.approx(told.as_it_was(work, fleet).makespan_s, rel=0.05)


def test_strategies_that_the_policy_lacks_are_named():
    work = workload(read([record("a", strategy="mine"), record("b")]))
    with pytest.raises(SettingsError, match="went by mine, which the policy does not have"):
        check_strategies(work, {"batch": 1})
    check_strategies(work, {"batch": 1, "mine": 1})


# -- the command --


@pytest.fixture
def simulate(monkeypatch, tmp_path):
    monkeypatch.delenv("FOREBAY_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "records.jsonl"
    explanations.write([record(f"r{number}", number * 0.25, sample=0.5) for number in range(20)], file)

    def run(*words):
        result = CliRunner().invoke(app, ["simulate-policy", "--records", str(file), *words])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.output
        return result

    return run


def test_the_command_sets_a_replay_beside_what_happened(simulate):
    result = simulate()
    assert result.exit_code == 0
    assert "(what happened)" in result.stdout
    assert "(as recorded)" in result.stdout
    assert "a sample that stands for 40" in result.stderr


def test_the_command_tries_other_strategies_on_another_fleet(simulate):
    result = simulate("--strategy", "chat", "--fleet", "speed=200,slots=8", "--at-once", "--json")
    happened, tried = json.loads(result.stdout)
    assert (happened["strategy"], tried["strategy"]) == ("(what happened)", "chat")
    assert tried["requests"] == happened["requests"] == 40
    assert tried["makespan_s"] < happened["makespan_s"]
    assert [share["worker"] for share in tried["workers"]] == ["worker-0"]


@pytest.mark.parametrize("words", [("--batch", "x"), ("--lengths", "lognormal:median=1,sigma=1")])
def test_recorded_requests_take_no_other_lengths(simulate, words):
    result = simulate(*words)
    assert result.exit_code == 2
    assert "recorded requests have their lengths" in result.output
