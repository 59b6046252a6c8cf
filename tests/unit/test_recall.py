"""Which workers are given up, on what a dispatcher sees of them."""

from __future__ import annotations

import pytest

from dispatcher.recall import Recall
from tests.fleets import NOW_S, view, worker
from workers.breaker import BreakerState

LONG_AGO_S = NOW_S - 100.0


def seen(*looks):
    """What was seen in turn: pairs of a time and the workers then."""
    recall = Recall()
    for now_s, *workers in looks:
        recall.look(view(*workers, now_s=now_s))
    return recall


def why(recall, granted_s=LONG_AGO_S, *, trial=False):
    return recall.why("a:1", granted_s, trial=trial)


@pytest.mark.parametrize("reason", ["", "timeout", "server_error"])
@pytest.mark.parametrize("state", list(BreakerState))
def test_a_worker_that_fails_keeps_what_it_runs(state, reason):
    assert why(seen((NOW_S, worker(breaker=state, breaker_reason=reason)))) is None


def test_a_worker_that_stands_still_is_given_up_until_it_has_healed():
    open_, half, closed = (
        worker(breaker=state, breaker_reason="stalled")
        for state in (BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED)
    )
    assert [why(seen((NOW_S, one))) for one in (open_, half, closed)] == ["stalled", "stalled", None]


def test_the_trial_of_a_worker_that_stood_still_may_show_that_it_moves():
    half = worker(breaker=BreakerState.HALF_OPEN, breaker_reason="stalled")
    assert why(seen((NOW_S, half)), trial=True) is None


def test_a_worker_that_was_removed_is_given_up():
    assert why(seen((NOW_S, worker("b:1")))) == "removed"
    assert why(seen((NOW_S, worker("b:1"), worker()))) is None


OLD = worker(incarnation=1)
NEW = worker(incarnation=2, incarnation_reason="start time changed")


def test_what_was_sent_long_before_a_restart_is_called_off_once_the_new_life_has_lasted():
    assert why(seen((NOW_S, OLD), (NOW_S + 1, NEW))) is None
    recall = seen((NOW_S, OLD), (NOW_S + 1, NEW), (NOW_S + 11, NEW))
    assert why(recall) == "restarted"
    assert why(recall, NOW_S - 5.0) is None  # it may have been sent to the new one already
    assert why(recall, NOW_S + 5.0) is None


def test_a_worker_that_seems_to_restart_with_every_poll_keeps_what_it_runs():
    lives = [
        (NOW_S + number, worker(incarnation=number, incarnation_reason="counter went down"))
        for number in range(40)
    ]
    assert why(seen(*lives)) is None


def test_a_worker_that_was_only_registered_anew_keeps_what_it_runs():
    again = worker(incarnation=2)
    assert why(seen((NOW_S, OLD), (NOW_S + 1, again), (NOW_S + 60, again))) is None


def test_what_was_seen_first_is_no_restart():
    assert why(seen((NOW_S, NEW), (NOW_S + 60, NEW)), NOW_S + 1) is None
