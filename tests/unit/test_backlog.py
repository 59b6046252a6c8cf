"""The order in which requests get their leases."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.backlog import Backlog
from dispatcher.scheduler.question import Need


def need(cost=10, model="m", **changes):
    facts = {"model": model, "prompt_tokens": 4, "asked_tokens": 4, "cost_tokens": cost} | changes
    return Need(**facts)


@pytest.fixture(scope="module")
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def drained(backlog, closed=frozenset()):
    found = []
    while (waiting := backlog.first(set(closed))) is not None:
        found.append(waiting)
    return found


def test_an_empty_backlog_has_no_first():
    assert Backlog().first(set()) is None
    assert len(Backlog()) == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 50), st.sampled_from("abc"))))
def test_the_urgent_go_first_then_the_costly_then_the_early_over_all_lanes(wishes):
    loop = asyncio.new_event_loop()
    backlog = Backlog()
    for urgency, cost, model in wishes:
        backlog.join(need(cost, model), urgency, loop.create_future())
    assert len(backlog) == len(wishes)
    ranks = [(waiting.urgency, -waiting.need.cost_tokens, waiting.serial) for waiting in drained(backlog)]
    assert ranks == sorted(ranks)
    assert len(ranks) == len(wishes)
    assert len(backlog) == 0
    loop.close()


def test_who_gave_up_is_passed_over(loop):
    backlog = Backlog()
    futures = [loop.create_future() for _ in range(4)]
    for future in futures:
        backlog.join(need(), 1, future)
    futures[0].cancel()
    futures[2].cancel()
    assert [waiting.granted for waiting in drained(backlog)] == [futures[1], futures[3]]
    assert len(backlog) == 0


def test_a_closed_lane_is_left_alone_and_the_next_one_is_looked_at(loop):
    backlog = Backlog()
    for cost, model in ((30, "a"), (20, "b"), (10, "c")):
        backlog.join(need(cost, model), 1, loop.create_future())
    first = backlog.first(set())
    backlog.rejoin(first)
    closed = {backlog.lane(first)}
    assert [waiting.need.model for waiting in drained(backlog, closed)] == ["b", "c"]
    assert len(backlog) == 1


def test_who_was_refused_waits_on_in_the_old_place(loop):
    backlog = Backlog()
    for _ in range(3):
        backlog.join(need(), 1, loop.create_future())
    first = backlog.first(set())
    backlog.rejoin(first)
    assert backlog.first(set()) is first


@pytest.mark.parametrize(
    "other",
    [
        need(model="other"),
        need(strategy="chat"),
        need(tried=frozenset({"w:1"})),
        need(prompt_tokens=5000),
    ],
    ids=["model", "strategy", "tried", "context"],
)
def test_requests_that_a_worker_can_tell_apart_stand_in_different_lanes(loop, other):
    backlog = Backlog()
    for one in (need(), other):
        backlog.join(one, 1, loop.create_future())
    first, second = drained(backlog)
    assert backlog.lane(first) != backlog.lane(second)


def test_lanes_are_counted_and_those_that_are_no_more_forgotten(loop):
    backlog = Backlog()
    for model in random.Random(1).sample(["a"] * 3 + ["b"] * 2, 5):
        backlog.join(need(model=model), 1, loop.create_future())
    lanes = set()
    for waiting in drained(backlog):
        lanes.add(backlog.lane(waiting))
    assert backlog.count(lanes) == 0
    assert lanes == set()
    for _ in range(3):
        backlog.join(need(model="a"), 1, loop.create_future())
    one = backlog.first(set())
    backlog.rejoin(one)
    assert backlog.count({backlog.lane(one)}) == 3
