"""Counters into rates: over a window, across restarts, and the slow capacity estimate."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.rates import CAPACITY_HALF_LIFE_S, RateMeter, Rates
from tests.monitored import make_load
from workers.load import LoadSource


def feed(meter: RateMeter, *points: tuple[float, int | None, int | None], loaded: bool = True) -> Rates:
    rates = Rates()
    for at_s, tokens, done in points:
        load = make_load(sampled_at=at_s, generation_tokens_total=tokens, success_total=done)
        rates = meter.add(load, loaded=loaded)
    return rates


def test_rates_are_differences_over_the_window() -> None:
    rates = feed(RateMeter(), (0.0, 0, 0), (5.0, 500, 10))
    assert (rates.token_rate, rates.drain_rate, rates.capacity_rate) == (100.0, 2.0, 100.0)


def test_one_sample_or_a_moment_is_no_rate() -> None:
    assert feed(RateMeter(), (0.0, 0, 0)) == Rates()
    assert feed(RateMeter(), (0.0, 0, 0), (0.5, 500, 10)) == Rates()


def test_what_lies_before_the_window_is_forgotten() -> None:
    points = [(float(second), 100 * min(second, 10), 0) for second in range(31)]
    assert feed(RateMeter(window_s=10.0), *points).token_rate == 0.0


def test_a_counter_that_fell_starts_the_window_anew() -> None:
    rates = feed(RateMeter(), (0.0, 9000, 90), (5.0, 9500, 95), (6.0, 3, 0), (9.0, 303, 3))
    assert rates.token_rate == 100.0
    assert rates.drain_rate == 1.0


def test_an_old_sample_changes_nothing() -> None:
    meter = RateMeter()
    before = feed(meter, (0.0, 0, 0), (5.0, 500, 10))
    assert feed(meter, (4.0, 9999, 99)) == before


def test_an_unknown_counter_gives_an_unknown_rate() -> None:
    rates = feed(RateMeter(), (0.0, 0, None), (5.0, 500, None))
    assert (rates.token_rate, rates.drain_rate) == (100.0, None)


def test_the_capacity_is_the_highest_rate_and_fades_slowly_under_load() -> None:
    meter = RateMeter(window_s=10.0)
    feed(meter, (0.0, 0, 0), (10.0, 10_000, 0))
    assert feed(meter, (20.0, 10_000, 0)).capacity_rate == pytest.approx(1000.0, rel=0.02)
    rates = feed(meter, (20.0 + CAPACITY_HALF_LIFE_S, 10_000, 0))
    assert rates.capacity_rate == pytest.approx(500.0, rel=0.02)


def test_the_capacity_follows_a_batch_that_begins_without_waiting_for_the_window() -> None:
    rates = feed(RateMeter(window_s=10.0), *((float(second), second**2 * 10, 0) for second in range(10)))
    assert rates.token_rate == 90.0
    assert rates.capacity_rate == 150.0


def test_an_idle_worker_keeps_its_capacity() -> None:
    meter = RateMeter(window_s=10.0)
    feed(meter, (0.0, 0, 0), (10.0, 10_000, 0))
    rates = feed(meter, (5000.0, 10_000, 0), (5010.0, 10_000, 0), loaded=False)
    assert (rates.token_rate, rates.capacity_rate) == (0.0, 1000.0)


def test_without_a_counter_the_throughput_is_summed_up_over_the_window() -> None:
    meter = RateMeter()
    for second in range(6):
        load = make_load(sampled_at=float(second), source=LoadSource.NATIVE, gen_throughput=50.0 + second % 2)
        rates = meter.add(load, loaded=True)
    assert rates.token_rate == pytest.approx(50.5)


def test_a_momentary_throughput_is_not_taken_for_capacity() -> None:
    load = make_load(gen_throughput=5000.0)
    assert RateMeter().add(load, loaded=True).capacity_rate is None


def test_counters_of_two_endpoints_are_not_compared() -> None:
    meter = RateMeter()
    feed(meter, (0.0, 100, 0), (5.0, 200, 0))
    native = make_load(sampled_at=10.0, source=LoadSource.NATIVE, generation_tokens_total=90_000)
    assert meter.add(native, loaded=True).token_rate is None


@given(
    st.lists(
        st.tuples(
            st.floats(min_value=0.01, max_value=100.0),
            st.one_of(st.none(), st.integers(min_value=0, max_value=1000)),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_restarts_never_make_a_rate_negative_or_higher_than_the_engine_ever_was(
    steps: list[tuple[float, int | None, bool]],
) -> None:
    meter, at_s, tokens, fastest = RateMeter(), 0.0, 0, 0.0
    for elapsed_s, made, restarted in steps:
        at_s += elapsed_s
        tokens = (0 if restarted else tokens) + (made or 0)
        fastest = max(fastest, (made or 0) / elapsed_s)
        known = None if made is None else tokens
        load = make_load(sampled_at=at_s, generation_tokens_total=known, success_total=known)
        rates = meter.add(load, loaded=True)
        for rate in (rates.token_rate, rates.drain_rate, rates.capacity_rate):
            assert rate is None or (math.isfinite(rate) and 0 <= rate <= fastest * 1.001 + 1e-6)
