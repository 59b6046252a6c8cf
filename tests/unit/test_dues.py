"""Who is next of several that share something: who has had the least, by share."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.dues import Dues


def served(dues, shares, turns, *, cost=lambda batch: 10.0):
    """What each of those who always wait gets in so many turns."""
    had = Counter()
    for _ in range(turns):
        batch = min(shares, key=dues.ahead)
        dues.charge(batch, cost(batch) / shares[batch])
        had[batch] += cost(batch)
    return had


def waiting(*batches):
    dues = Dues()
    for batch in batches:
        dues.come(batch)
    return dues


def test_whoever_comes_first_is_not_ahead_of_anybody():
    assert waiting("a").ahead("a") == 0


def test_equals_get_the_same_whatever_their_requests_cost():
    had = served(waiting("a", "b"), {"a": 1, "b": 1}, 110, cost={"a": 100.0, "b": 10.0}.get)
    assert abs(had["a"] - had["b"]) <= 110


def test_shares_count():
    had = served(waiting("a", "b", "c"), {"a": 1, "b": 3, "c": 0.5}, 90)
    assert had == pytest.approx({"a": 200, "b": 600, "c": 100}, abs=10)


def test_who_comes_late_is_level_with_who_had_the_least_of_those_who_wait():
    dues = waiting("a", "b")
    served(dues, {"a": 1, "b": 1}, 101)
    dues.come("c")
    assert dues.ahead("c") == 0
    assert {dues.ahead("a"), dues.ahead("b")} == {0, 10}


def test_who_left_for_a_moment_has_had_what_it_had():
    dues = waiting("a", "b")
    dues.charge("b", 1000.0)
    dues.leave("b")
    dues.come("b")
    assert dues.ahead("b") == 1000


def test_who_left_is_forgotten_once_the_others_had_as_much():
    dues = waiting("a", "b")
    dues.charge("b", 50.0)
    dues.leave("b")
    served(dues, {"a": 1}, 20)
    dues.come("c")
    dues.leave("c")
    dues.come("b")
    assert dues.ahead("b") == 0


def test_what_was_not_had_after_all_is_not_owed():
    dues = waiting("a", "b")
    dues.charge("a", 10.0)
    dues.leave("a")
    dues.refund("a", 10.0)
    dues.come("a")
    assert (dues.ahead("a"), dues.ahead("b")) == (0, 0)


@given(st.integers(0, 2**32), st.integers(2, 5))
def test_those_who_always_wait_stay_level_while_others_come_and_go(seed, count):
    rng = random.Random(seed)
    steady = [f"s{number}" for number in range(count)]
    shares = {batch: rng.choice([0.5, 1.0, 2.0, 4.0]) for batch in [*steady, "guest"]}
    dues, had = waiting(*steady), Counter()
    here = list(steady)
    for _ in range(200):
        if rng.random() < 0.2:
            if "guest" in here:
                here.remove("guest")
                dues.leave("guest")
            else:
                here.append("guest")
                dues.come("guest")
        batch = min(here, key=dues.ahead)
        cost = rng.uniform(1, 10)
        dues.charge(batch, cost / shares[batch])
        had[batch] += cost
    times = [had[batch] / shares[batch] for batch in steady]
    assert max(times) - min(times) <= 2 * 10 / 0.5
