"""When a host's clock is too far from Redis' for RQ, and that a slow answer is not taken for that."""

from __future__ import annotations

import pytest
import structlog

from dispatcher.host_clock import MOST_OFF_S, HostClock, least_off


class Redis:
    """Its clock stands at 1,000 s and a half."""

    def time(self):
        return (1000, 500_000)


def compared(*readings):
    """A clock after comparisons with these (before, after), and what was logged."""
    given = iter([reading for pair in readings for reading in pair])
    clock = HostClock(Redis(), lambda: next(given))
    with structlog.testing.capture_logs() as logs:
        for _ in readings:
            clock.compare()
    return clock.is_off, [line.get("ahead_of_redis_s") for line in logs]


@pytest.mark.parametrize(
    ("before", "after", "off"),
    [(1000.0, 1001.0, 0.0), (1030.5, 1030.6, 30.0), (970.4, 970.5, -30.0), (900.0, 1100.0, 0.0)],
)
def test_how_far_a_clock_is_off_is_bounded_by_the_round_trip(before, after, off):
    assert least_off(before, 1000.5, after) == pytest.approx(off)


def test_a_little_off_is_in_order():
    assert compared((1000.5 + MOST_OFF_S, 1000.6 + MOST_OFF_S)) == (False, [])
    assert compared((1000.4 - MOST_OFF_S, 1000.5 - MOST_OFF_S)) == (False, [])


@pytest.mark.parametrize(("at", "ahead_s"), [(1030.5, 30.0), (970.5, -30.0)])
def test_far_off_is_told_once_and_so_is_its_end(at, ahead_s):
    is_off, logs = compared((at, at), (at, at))
    assert (is_off, logs) == (True, [ahead_s])
    is_off, logs = compared((at, at), (1000.5, 1000.5), (1000.5, 1000.5))
    assert (is_off, logs) == (False, [ahead_s, None])


def test_an_answer_that_took_too_long_changes_nothing():
    assert compared((990.0, 1030.0)) == (False, [])
    is_off, logs = compared((1030.5, 1030.5), (990.0, 1030.0))
    assert (is_off, logs) == (True, [30.0])
