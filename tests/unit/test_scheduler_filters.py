"""Each filter: whom it drops, and when it lets everybody pass."""

import numpy as np
import pytest

from dispatcher.scheduler import filters
from dispatcher.scheduler.fleet import FleetModel
from dispatcher.scheduler.question import Need, Question
from tests.fleets import NOW_S, view, worker
from workers.breaker import BreakerState
from workers.fleet import WorkerState


def question(*workers, model="llama", prompt_tokens=100, asked_tokens=100, tried=()):
    fleet = FleetModel(view(*workers))
    need = Need(model, prompt_tokens, asked_tokens, 200, tried=frozenset(tried))
    return Question(need, fleet, NOW_S, np.ones(len(fleet), dtype=bool))


def test_a_lora_name_is_a_model_like_any_other():
    asked = question(worker("a", models=frozenset({"llama", "llama-sql"})), worker("b"), model="llama-sql")
    assert filters.serves_model(asked).tolist() == [True, False]


@pytest.mark.parametrize("state", [state for state in WorkerState if state is not WorkerState.READY])
def test_only_a_ready_worker_takes_requests(state):
    assert filters.ready(question(worker("a", state=state), worker("b"))).tolist() == [False, True]


def test_a_request_goes_where_prompt_and_answer_fit_or_where_nothing_is_known():
    asked = question(
        worker("a", max_model_len=199), worker("b", max_model_len=200), worker("c", max_model_len=None)
    )
    assert filters.context_fits(asked).tolist() == [False, True, True]


def test_a_request_that_fits_nowhere_is_for_the_engine_to_judge():
    assert filters.context_fits(question(worker("a", max_model_len=199))) is None


def test_an_answer_of_unknown_length_needs_no_room():
    asked = question(worker("a", max_model_len=100), worker("b", max_model_len=99), asked_tokens=None)
    assert filters.context_fits(asked).tolist() == [True, False]


def test_a_breaker_admits_unless_it_is_open_and_not_yet_due():
    asked = question(
        worker("a"),
        worker("b", breaker=BreakerState.HALF_OPEN),
        worker("c", breaker=BreakerState.OPEN, breaker_open_until=NOW_S),
        worker("d", breaker=BreakerState.OPEN, breaker_open_until=NOW_S + 0.1),
    )
    assert filters.breaker_admits(asked).tolist() == [True, True, True, False]


def test_a_deferred_worker_is_left_alone_until_then():
    asked = question(worker("a", deferred_until=NOW_S + 0.1), worker("b", deferred_until=NOW_S))
    assert filters.not_deferred(asked).tolist() == [False, True]


def test_a_worker_that_refused_is_not_asked_again_before_the_next_view():
    asked = question(worker("a"), worker("b"))
    asked.fleet.refused("a", "full", None)
    assert filters.not_refused(asked).tolist() == [False, True]


def test_a_worker_once_tried_is_set_aside_unless_nobody_else_is_left():
    asked = question(worker("a"), worker("b"), tried=["a", "gone"])
    assert filters.untried(asked).tolist() == [False, True]
    asked.candidates[1] = False
    assert filters.untried(asked) is None


def test_there_is_room_below_the_limit_only():
    asked = question(worker("a", leases=15), worker("b", leases=16), worker("c", leases=17))
    assert filters.has_room(asked).tolist() == [True, False, False]
