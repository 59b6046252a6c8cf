"""Decision records: which attempts get one, what it tells, and that noting them disturbs nobody."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest

from dispatcher.archive import Archive
from dispatcher.attempts import Request, Seen, Turn
from dispatcher.outcome import CANCELLED, Label, Outcome, RequestFate
from dispatcher.recorder import MOST_NOTED, Recorder
from dispatcher.records import MOST_NAMES, DecisionRecord, Sighting, record_of, share_recorded
from dispatcher.reply import Reply
from dispatcher.scheduler.decision import Chosen, decide
from dispatcher.scheduler.fleet import FleetModel
from dispatcher.scheduler.question import Need
from dispatcher.scheduler.strategies import SchedulerPolicy, Strategies
from tests.fleets import NOW_S, view, worker
from workers.breaker import Verdict
from workers.errors import StoreUnavailable
from workers.fleet import WorkerState

OK = Outcome(Label.OK, RequestFate.DONE, Verdict.SUCCESS)
FAILED = Outcome(Label.SERVER_ERROR, RequestFate.ELSEWHERE, Verdict.FAILURE)
SECRET = "the prompt"


def chosen(*workers, tried=()):
    need = Need("llama", 10, 20, 30, tried=frozenset(tried))
    strategy = Strategies(SchedulerPolicy()).for_request(need)
    decision = decide(need, FleetModel(view(*workers)), strategy, random.Random(1), NOW_S)
    assert isinstance(decision, Chosen)
    return decision


def sighting(decision, **changes):
    facts = {
        "request_id": "batch_req_1",
        "custom_id": "c1",
        "batch_id": "batch_1",
        "attempt": 1,
        "decision": decision,
        "need": Need("llama", 10, 20, 30),
        "urgency": 1,
        "answer_tokens": 17,
        "sample": 0.5,
        "worker": "a",
        "granted_s": NOW_S,
        "waited_s": 0.25,
        "outcome": Label.OK,
        "verdict": Verdict.SUCCESS,
        "elapsed_s": 1.5,
    }
    return Sighting(**(facts | changes))


# -- which attempts get one --


def share_of(**changes):
    facts = {
        "attempt": 1,
        "raced": False,
        "outcome": Label.OK,
        "batch_lines": 10,
        "sample": 0.0,
    }
    return share_recorded(**(facts | changes))


@pytest.mark.parametrize("label", [label for label in Label if label is not Label.OK])
def test_an_attempt_that_failed_always_gets_a_record(label):
    assert share_of(outcome=label, batch_lines=10**6) == 1.0


def test_what_comes_after_a_failure_and_what_ran_beside_another_always_gets_one():
    assert share_of(attempt=2) == 1.0
    assert share_of(raced=True) == 1.0
    assert share_of() == 0.0


@pytest.mark.parametrize(
    ("lines", "sample", "share"),
    [(1, None, 1.0), (1000, None, 1.0), (1001, None, 0.01), (10**6, 1.0, 1.0), (1, 0.5, 0.5), (1, 0.0, 0.0)],
)
def test_of_good_attempts_so_large_a_share_gets_one(lines, sample, share):
    assert share_of(batch_lines=lines, sample=sample) == share


# -- what it tells --


def test_a_record_tells_whom_filters_dropped_what_was_scored_and_how_it_ended():
    decision = chosen(
        worker("a"),
        worker("b"),
        worker("c", leases=16),
        worker("d", state=WorkerState.UNREADY),
        worker("e", models=frozenset({"mistral"})),
        tried={"b"},
    )
    record = record_of(sighting(decision, attempt=2), "d1")
    assert {name: dropped.workers for name, dropped in record.dropped.items()} == {
        "model": ("e",), "ready": ("d",), "tried": ("b",), "limit": ("c",),
    }  # fmt: skip
    assert [candidate.worker for candidate in record.candidates] == ["a"]
    assert record.candidates[0].scores.keys() == record.weights.keys()
    assert (record.picked, record.worker, record.strategy, record.picker) == ("a", "a", "batch", "max-score")
    assert (record.attempt, record.beside, record.waited_s, record.elapsed_s) == (2, False, 0.25, 1.5)
    assert (record.outcome, record.verdict, record.at, record.dispatcher) == (
        Label.OK, Verdict.SUCCESS, NOW_S, "d1",
    )  # fmt: skip
    assert (record.model, record.prompt_tokens, record.asked_tokens, record.cost_tokens) == (
        "llama",
        10,
        20,
        30,
    )
    assert (record.answer_tokens, record.urgency, record.sample) == (17, 1, 0.5)


def test_a_record_of_a_large_fleet_names_the_best_and_the_pick_and_counts_the_others():
    ready = [worker(f"r{number}", leases=number % 16) for number in range(100)]
    decision = chosen(*ready, *(worker(f"u{number}", state=WorkerState.UNREADY) for number in range(50)))
    last = decision.account.explain(None).candidates[-1].worker
    record = record_of(sighting(Chosen((last,), decision.account)), "d1")
    assert (record.dropped["ready"].count, len(record.dropped["ready"].workers)) == (50, MOST_NAMES)
    assert (record.candidate_count, len(record.candidates)) == (100, MOST_NAMES + 1)
    assert record.candidates[-1].worker == last == record.picked
    assert record.candidates[0].total == max(candidate.total for candidate in record.candidates)


def test_a_record_of_a_second_attempt_says_so_and_claims_no_scores():
    record = record_of(sighting(None, attempt=2, waited_s=None), "d1")
    assert (record.beside, record.picked, record.candidates, record.waited_s) == (True, None, (), None)


def a_record():
    return record_of(
        sighting(chosen(worker("a"), worker("b", state=WorkerState.UNREADY)), outcome=Label.BUSY), "d1"
    )


def test_a_record_with_fields_that_are_not_known_here_reads_as_without_them():
    written = msgspec.json.decode(a_record().model_dump_json())
    for objects in (written, written["candidates"][0], written["dropped"]["ready"]):
        objects["news"] = [1]
    read = DecisionRecord.model_validate_json(msgspec.json.encode(written))
    assert read == a_record()
    assert (type(read.outcome), type(read.verdict)) == (Label, Verdict)


def test_how_an_attempt_ended_is_text_when_a_newer_version_has_a_word_of_its_own():
    written = msgspec.json.decode(a_record().model_dump_json()) | {"outcome": "melted", "verdict": "unsure"}
    read = DecisionRecord.model_validate_json(msgspec.json.encode(written))
    assert (read.outcome, read.verdict) == ("melted", "unsure")
    assert msgspec.json.decode(read.model_dump_json()) == written


# -- noting them --


class Shelf:
    """Keeps what it is given, unless it is away."""

    def __init__(self):
        self.kept = []
        self.trouble = None

    async def keep(self, records):
        if self.trouble is not None:
            raise self.trouble
        self.kept += records


def recorder(shelf, sample=1.0):
    return Recorder(shelf, dispatcher="d1", sample=sample, rng=random.Random(1))


def seen(number=1, outcome=OK, *, name="c1", hedge=False, join=None, decision=None):
    need = Need("llama", 10, 20, 30)
    request = Request(
        id=f"id-{name}", path="/v1/completions", body=SECRET.encode(), need=need, urgency=1, deadline_s=0.0,
        late_code="", hedge=hedge, custom_id=name, batch_id="batch_1", batch_lines=5000,
    )  # fmt: skip
    held = SimpleNamespace(
        worker_id="a", decision=decision or chosen(worker("a")), granted_s=NOW_S, join=join, url="http://a"
    )
    return Seen(request, held, outcome, 1.0, Turn(number, 0.1))


async def test_a_retried_request_is_recorded_whole_though_nothing_else_is():
    shelf = Shelf()
    notes = recorder(shelf, sample=0.0)
    for one in (seen(name="other"), seen(1, FAILED), seen(2)):
        notes.saw(one)
    await notes.flush()
    assert [(one.custom_id, one.attempt, one.outcome) for one in shelf.kept] == [
        ("c1", 1, Label.SERVER_ERROR),
        ("c1", 2, Label.OK),
    ]


async def test_both_attempts_of_a_race_are_recorded():
    shelf = Shelf()
    notes = recorder(shelf, sample=0.0)
    notes.saw(seen(name="alone", hedge=True, join=lambda _: None))
    notes.saw(seen(name="first", hedge=True))
    notes.saw(seen(2, CANCELLED, name="first"))
    await notes.flush()
    assert [(one.custom_id, one.attempt) for one in shelf.kept] == [("first", 1), ("first", 2)]


async def test_a_record_never_holds_what_was_asked():
    shelf = Shelf()
    notes = recorder(shelf)
    notes.saw(seen())
    await notes.flush()
    assert SECRET not in shelf.kept[0].model_dump_json()


async def test_records_wait_for_redis_in_order_and_only_so_many_of_them():
    shelf = Shelf()
    notes = recorder(shelf)
    shelf.trouble = StoreUnavailable("away")
    decision = chosen(worker("a"))
    for number in range(MOST_NOTED + 5):
        notes.saw(seen(name=f"c{number}", decision=decision))
    with pytest.raises(StoreUnavailable):
        await notes.flush()
    shelf.trouble = None
    await notes.flush()
    assert [one.custom_id for one in shelf.kept] == [f"c{number}" for number in range(5, MOST_NOTED + 5)]


async def test_records_that_cannot_be_kept_stop_nobody():
    shelf = Shelf()
    notes = recorder(shelf)
    shelf.trouble = RuntimeError("no permission")
    notes.saw(seen(name="lost"))
    await notes.flush()
    shelf.trouble = None
    notes.saw(seen(name="kept"))
    await notes.flush()
    assert [one.custom_id for one in shelf.kept] == ["kept"]


async def test_an_archive_that_is_given_nothing_asks_nobody():
    await Archive(SimpleNamespace(register_script=None)).keep([])


async def test_a_record_tells_how_long_the_answer_was_and_how_likely_it_was_recorded():
    shelf = Shelf()
    notes = recorder(shelf, sample=0.999)
    body = b'{"usage": {"prompt_tokens": 9, "completion_tokens": 12}}'
    notes.saw(replace(seen(), answer=Reply(200, body, 1.0)))
    notes.saw(replace(seen(outcome=FAILED, name="c2"), answer=Reply(500, body, 1.0)))
    notes.saw(seen(outcome=CANCELLED, name="c3"))
    await notes.flush()
    assert [(one.answer_tokens, one.sample) for one in shelf.kept] == [(12, 0.999), (None, 1.0), (None, 1.0)]
    assert (shelf.kept[0].urgency, shelf.kept[0].cost_tokens) == (1, 30)
