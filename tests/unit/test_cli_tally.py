"""Who did what, and how near the time came to the possible."""

from __future__ import annotations

import pytest

from dispatcher.batches.ledger import Entry
from dispatcher.batches.results import Detail, error_line, result_line
from forebay.progress import Pace, look
from forebay.tally import count, estimated_capacity, lower_bound_s
from tests.fleets import NOW_S, load, view, worker

USAGE = b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":40}}'


def answered(worker_id, latency_s, body=USAGE, attempts=1):
    detail = Detail(worker=worker_id, attempts=attempts, queued_s=0.0, latency_s=latency_s)
    return result_line("a", record_id="r", request_id="q", status_code=200, body=body, detail=detail)


def test_requests_tokens_and_time_are_counted_by_worker():
    shares = count([answered("a:1", 1.0), answered("a:1", 3.0), answered("b:1", 0.5, b'"no usage"')])
    assert (shares["a:1"].requests, shares["a:1"].tokens, shares["a:1"].mean_latency_s) == (2, 80, 2.0)
    assert (shares["b:1"].requests, shares["b:1"].tokens) == (1, 0)


def test_lines_that_were_sent_more_than_once_are_counted():
    shares = count([answered("a:1", 1.0), answered("a:1", 1.0, attempts=2), answered("b:1", 1.0, attempts=3)])
    assert [shares[name].sent_again for name in ("a:1", "b:1")] == [1, 1]


def test_lines_that_name_no_worker_are_left_out():
    without = result_line("a", record_id="r", request_id="q", status_code=200, body=USAGE, detail=None)
    unsent = error_line("b", "batch_expired", "late", Detail(None, 0, 1.0, None), record_id="r")
    assert count([without, unsent]) == {}


def test_the_capacity_of_a_fleet_is_estimated_only_when_every_worker_has_an_estimate():
    known = [worker(load=load(capacity_rate=100.0)), worker(load=load(capacity_rate=50.0))]
    assert estimated_capacity(known) == 150.0
    assert estimated_capacity([*known, worker(load=load())]) is None
    assert estimated_capacity([*known, worker(load=None)]) is None
    assert estimated_capacity([]) is None


def test_the_lower_bound_is_all_tokens_at_full_capacity():
    assert lower_bound_s(3000, 150.0) == 20.0


def test_a_rate_is_that_of_the_last_seconds():
    pace = Pace(window_s=10.0)
    for second in range(60):
        pace.observe(float(second), 10 * second if second < 40 else 400 + 100 * (second - 40), second)
    assert pace.tokens_per_s == pytest.approx(100.0)
    assert pace.eta_s(30) == pytest.approx(30.0)


def test_nothing_is_known_of_a_rate_before_the_second_look():
    pace = Pace()
    assert pace.tokens_per_s is None
    pace.observe(1.0, 5, 5)
    assert pace.tokens_per_s is None
    assert pace.eta_s(10) is None


def test_what_stands_still_has_no_foreseeable_end():
    pace = Pace()
    pace.observe(1.0, 5, 5)
    pace.observe(2.0, 5, 5)
    assert pace.tokens_per_s == 0.0
    assert pace.eta_s(10) is None
    assert pace.eta_s(0) is None


def an_entry(cost_done):
    return Entry(
        id="batch_1",
        status="in_progress",
        total=100,
        completed=7,
        failed=1,
        prompt_tokens=0,
        completion_tokens=cost_done,
        cost_total=1000,
        cost_done=cost_done,
        shards=3,
        shards_done=0,
        queue="default",
        created_at=0.0,
        expires_at=0.0,
        fields={},
    )


def test_a_look_counts_what_is_in_flight_over_the_whole_fleet():
    seen = look(an_entry(10), view(worker(leases=3), worker("b:1", leases=4)), Pace(), started_s=NOW_S - 9)
    assert (seen.in_flight, seen.done, seen.elapsed_s) == (7, 8, 9.0)


def test_the_end_is_not_foretold_before_some_of_the_batch_is_done():
    pace = Pace()
    look(an_entry(0), view(now_s=NOW_S), pace, started_s=NOW_S)
    early = look(an_entry(40), view(now_s=NOW_S + 4), pace, started_s=NOW_S)
    assert (early.tokens_per_s, early.eta_s) == (10.0, None)
    later = look(an_entry(60), view(now_s=NOW_S + 6), pace, started_s=NOW_S)
    assert later.eta_s == pytest.approx(94.0)
