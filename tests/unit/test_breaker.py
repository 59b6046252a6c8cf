"""The breaker's transition table as it is defined; that Redis follows it, an integration test shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from workers.breaker import Breaker, BreakerPolicy, BreakerState, Verdict, admit, opened, report

POLICY = BreakerPolicy()
CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN
NOW = 1_000_000.0


def after(breaker, *verdicts, now_s=NOW, policy=POLICY):
    for verdict in verdicts:
        breaker = report(breaker, "a", breaker.epoch, verdict, now_s, policy, reason="why")
    return breaker


FAILURE, SUCCESS, NEUTRAL = Verdict.FAILURE, Verdict.SUCCESS, Verdict.NEUTRAL


def half_open(**changes):
    breaker = opened(Breaker(), NOW, POLICY, reason="why")
    breaker, admission = admit(breaker, "trial", breaker.open_until, POLICY)
    assert admission.trial
    return breaker


def test_three_failures_in_a_row_open_it():
    assert after(Breaker(), FAILURE, FAILURE).state is CLOSED
    assert after(Breaker(), FAILURE, FAILURE, SUCCESS, FAILURE, FAILURE).state is CLOSED
    breaker = after(Breaker(), FAILURE, FAILURE, FAILURE)
    assert (breaker.state, breaker.trips, breaker.epoch, breaker.reason) == (OPEN, 1, 1, "why")
    assert breaker.open_until == NOW + POLICY.base_s


def test_alternating_failures_open_it_by_rate():
    breaker = after(Breaker(), *[SUCCESS, FAILURE] * 9, SUCCESS)
    assert breaker.state is CLOSED
    assert after(breaker, FAILURE).state is OPEN


def test_failures_that_left_the_window_do_not_count():
    breaker = after(Breaker(), *[SUCCESS, FAILURE] * 9)
    later = NOW + POLICY.window_s + 10
    assert after(breaker, SUCCESS, FAILURE, now_s=later).state is CLOSED


def test_a_threshold_of_one_is_a_cool_down():
    assert after(Breaker(), FAILURE, policy=BreakerPolicy(failure_threshold=1)).state is OPEN


def test_neutral_outcomes_change_nothing():
    breaker = after(Breaker(), FAILURE, FAILURE)
    assert after(breaker, *[NEUTRAL] * 50) == breaker


def test_outcomes_of_an_older_epoch_are_ignored():
    breaker = half_open()
    assert report(breaker, "trial", breaker.epoch - 1, SUCCESS, NOW, POLICY) == breaker


def test_open_admits_nobody_until_its_time_then_one():
    breaker = opened(Breaker(), NOW, POLICY, reason="why")
    same, admission = admit(breaker, "a", breaker.open_until - 0.001, POLICY)
    assert (same, admission.admitted, admission.until) == (breaker, False, breaker.open_until)
    breaker, admission = admit(breaker, "a", breaker.open_until, POLICY)
    assert (breaker.state, breaker.trial, admission.admitted, admission.trial) == (HALF_OPEN, "a", True, True)
    _, admission = admit(breaker, "b", NOW + POLICY.base_s + 1, POLICY)
    assert (admission.admitted, admission.until) == (False, breaker.trial_until)


def test_a_trial_whose_owner_vanished_goes_to_the_next():
    breaker = half_open()
    breaker, admission = admit(breaker, "other", breaker.trial_until, POLICY)
    assert (breaker.trial, admission.trial) == ("other", True)


def test_a_trial_that_succeeds_closes_it_in_a_new_epoch():
    breaker = half_open()
    healed = report(breaker, "trial", breaker.epoch, SUCCESS, NOW + 9, POLICY)
    assert (healed.state, healed.epoch, healed.healthy_since) == (CLOSED, breaker.epoch + 1, NOW + 9)


def test_a_trial_that_fails_opens_it_for_longer():
    breaker = half_open()
    again = report(breaker, "trial", breaker.epoch, FAILURE, NOW + 9, POLICY)
    assert (again.state, again.trips, again.open_until) == (OPEN, 2, NOW + 9 + 2 * POLICY.base_s)


def test_a_neutral_trial_frees_the_trial():
    breaker = half_open()
    breaker = report(breaker, "trial", breaker.epoch, NEUTRAL, NOW + 9, POLICY)
    assert breaker.state is HALF_OPEN
    assert admit(breaker, "next", NOW + 9, POLICY)[1].trial


def test_only_the_trial_s_own_end_counts_while_half_open():
    breaker = half_open()
    assert report(breaker, "stranger", breaker.epoch, FAILURE, NOW + 9, POLICY) == breaker


def test_healthy_minutes_forgive_trips():
    breaker = Breaker(trips=5, healthy_since=NOW)
    assert opened(breaker, NOW + 2.5 * POLICY.decay_s, POLICY, reason="").trips == 4
    assert opened(breaker, NOW + 90 * POLICY.decay_s, POLICY, reason="").trips == 1


@given(st.integers(0, 10_000), st.floats(-0.1, 0.1))
def test_however_often_it_tripped_the_pause_has_its_cap(trips, jitter):
    breaker = Breaker(state=OPEN, trips=trips)
    pause_s = opened(breaker, NOW, POLICY, reason="", jitter=jitter).open_until - NOW
    assert 0.89 * POLICY.base_s <= pause_s <= 1.11 * POLICY.cap_s


STEPS = st.lists(
    st.tuples(st.sampled_from(["ask", *Verdict]), st.floats(0, 60), st.integers(0, 3)), max_size=60
)


@given(STEPS, st.integers(1, 4))
def test_any_history_keeps_the_table_s_promises(steps, threshold):
    policy = BreakerPolicy(failure_threshold=threshold, rate_minimum=6)
    breaker, now_s, running, trials = Breaker(), NOW, {}, set()
    for number, (step, passes_s, which) in enumerate(steps):
        before = breaker
        now_s += passes_s
        if step == "ask":
            breaker, admission = admit(breaker, f"a{number}", now_s, policy)
            if admission.admitted:
                running[f"a{number}"] = breaker.epoch
            else:
                assert now_s < admission.until  # else the caller would ask again at once, for ever
            if admission.trial:
                trials = {f"a{number}"}
            assert admission.admitted == (before.state is CLOSED or admission.trial)
        elif running:
            attempt = sorted(running)[which % len(running)]
            epoch = running.pop(attempt)
            breaker = report(breaker, attempt, epoch, step, now_s, policy)
            if step is NEUTRAL and before.state is CLOSED:
                assert breaker == before
        assert breaker.epoch >= before.epoch
        assert breaker.epoch - before.epoch <= 1
        if breaker.state is not before.state and breaker.state is CLOSED:
            assert (before.state, step) == (HALF_OPEN, SUCCESS)
        if breaker.state is HALF_OPEN and breaker.trial:
            assert {breaker.trial} == trials
        if breaker.state is OPEN and before.state is OPEN:
            assert breaker.open_until >= before.open_until
        assert len(breaker.window) <= policy.window_s / 5 + 1


@pytest.mark.parametrize("field", ["failure_threshold", "rate_minimum", "window_s", "base_s", "cap_s"])
def test_a_policy_of_nothing_is_refused(field):
    with pytest.raises(ValidationError):
        BreakerPolicy(**{field: 0})
