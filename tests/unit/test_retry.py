"""Whether and when a request is tried again, and how long one try may take."""

from random import Random

import pytest

from dispatcher.outcome import CANCELLED, Label, Outcome, RequestFate
from dispatcher.retry import (
    GiveUp,
    GiveUpCode,
    History,
    RetryPolicy,
    Settled,
    TryAgain,
    backoff_s,
    next_step,
    read_timeout_s,
)
from workers.breaker import Verdict

FAILED = Outcome(Label.SERVER_ERROR, RequestFate.ELSEWHERE, Verdict.FAILURE)
FULL = Outcome(Label.BUSY, RequestFate.WAIT, Verdict.NEUTRAL, defer_s=1.0, halve_limit=True)
DONE = Outcome(Label.OK, RequestFate.DONE, Verdict.SUCCESS)
REJECTED = Outcome(Label.REJECTED, RequestFate.FINAL, Verdict.NEUTRAL)
POLICY = RetryPolicy()


class Longest(Random):
    """Chance that always draws the longest wait."""

    def uniform(self, a, b):
        return b


def after(outcome, history=None, worker_id="w", *, deadline_s=1_000.0, now_s=10.0, policy=POLICY):
    history = History() if history is None else history
    return next_step(
        outcome,
        worker_id,
        history,
        now_s=now_s,
        deadline_s=deadline_s,
        policy=policy,
        rng=Longest(),
    )


@pytest.mark.parametrize("outcome", [DONE, REJECTED, CANCELLED])
def test_what_is_settled_is_not_tried_again(outcome):
    assert after(outcome) == Settled()


def test_a_failure_is_tried_again_elsewhere_after_a_pause():
    step = after(FAILED)
    assert isinstance(step, TryAgain)
    assert step.not_before_s == 10.5
    assert step.aside == {"w"}


def test_the_fifth_charged_attempt_is_the_last():
    history = History()
    for turn in range(4):
        step = after(FAILED, history, f"w{turn}")
        assert isinstance(step, TryAgain)
        history = step.history
    assert history.aside == {"w0", "w1", "w2", "w3"}
    step = after(FAILED, history, "w4")
    assert step == GiveUp(GiveUpCode.MAX_ATTEMPTS, "5 attempts failed, the last with server_error on w4")


def test_a_full_worker_costs_no_attempt_and_is_not_set_aside():
    history = History()
    for _ in range(50):
        step = after(FULL, history)
        assert isinstance(step, TryAgain)
        history = step.history
    assert (history.charged, history.uncharged, history.aside) == (0, 50, frozenset())
    assert history.labels == {Label.BUSY}
    assert isinstance(after(FAILED, history), TryAgain)


def test_pauses_double_up_to_the_cap_for_each_kind_apart():
    pauses = [backoff_s(turn, POLICY, Longest()) for turn in (1, 2, 3, 6, 7, 8, 5_000)]
    assert pauses == [0.5, 1, 2, 16, 30, 30, 30]
    assert after(FAILED, History(charged=2, uncharged=40)).not_before_s == 12
    assert after(FULL, History(charged=4, uncharged=0)).not_before_s == 10.5


def test_pauses_are_spread_from_nothing_to_the_longest():
    rng = Random(1)
    drawn = [backoff_s(3, POLICY, rng) for _ in range(1_000)]
    assert 0 <= min(drawn) < 0.1
    assert 1.9 < max(drawn) <= 2


@pytest.mark.parametrize("outcome", [FAILED, FULL])
def test_without_time_for_another_attempt_the_request_is_given_up(outcome):
    step = after(outcome, deadline_s=10.5)
    assert isinstance(step, GiveUp)
    assert step.code is GiveUpCode.REQUEST_TIMEOUT
    assert isinstance(after(outcome, deadline_s=10.6), TryAgain)


def test_one_attempt_may_be_all_there_is():
    assert isinstance(after(FAILED, policy=RetryPolicy(max_attempts=1)), GiveUp)


@pytest.mark.parametrize(
    ("asked", "prompt", "seconds"),
    [
        (100, 100, 600),
        (32_000, 0, 6_400),
        (None, 0, 600),
        (None, 100_000, 2_000),
        (4_000, 10_000, 1_000),
    ],
)
def test_an_attempt_gets_the_time_its_tokens_take_at_the_slowest_and_never_less_than_the_least(
    asked, prompt, seconds
):
    assert read_timeout_s(asked, prompt, 600, slowest_rate=5) == seconds


def test_a_rate_of_nothing_is_refused():
    with pytest.raises(ValueError, match="slowest_rate"):
        read_timeout_s(1, 1, 600, slowest_rate=0)
