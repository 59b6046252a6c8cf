"""Who did what, and how near the time came to the possible."""

from __future__ import annotations

import pytest

from dispatcher.batches.results import Detail, error_line, result_line
from forebay.progress import Pace
from forebay.tally import count, estimated_capacity, lower_bound_s
from tests.fleets import load, worker

USAGE = b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":40}}'


def answered(worker_id, latency_s, body=USAGE):
    detail = Detail(worker=worker_id, attempts=1, queued_s=0.0, latency_s=latency_s)
    return result_line("a", record_id="r", request_id="q", status_code=200, body=body, detail=detail)


def test_requests_tokens_and_time_are_counted_by_worker():
    shares = count([answered("a:1", 1.0), answered("a:1", 3.0), answered("b:1", 0.5, b'"no usage"')])
    assert (shares["a:1"].requests, shares["a:1"].tokens, shares["a:1"].mean_latency_s) == (2, 80, 2.0)
    assert (shares["b:1"].requests, shares["b:1"].tokens) == (1, 0)


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
