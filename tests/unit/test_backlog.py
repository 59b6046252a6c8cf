"""The order in which requests get their leases."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

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
    """All of them, one after the other, but for those in closed lanes."""
    found = []
    while (waiting := backlog.first({lane.key for lane in backlog.lanes()} - closed)) is not None:
        found.append(waiting)
    return found


def test_an_empty_backlog_has_no_first():
    assert Backlog().first() is None
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
    first = backlog.first()
    backlog.rejoin(first)
    closed = {backlog.lane(first)}
    assert [waiting.need.model for waiting in drained(backlog, closed)] == ["b", "c"]
    assert len(backlog) == 1


def test_who_was_refused_waits_on_in_the_old_place(loop):
    backlog = Backlog()
    for _ in range(3):
        backlog.join(need(), 1, loop.create_future())
    first = backlog.first()
    backlog.rejoin(first)
    assert backlog.first() is first


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


def test_lanes_tell_their_model_how_many_wait_and_whether_they_have_declined(loop):
    backlog = Backlog()
    for model in ["a", "a", "b", "a"]:
        backlog.join(need(model=model), 1, loop.create_future())
    declined = backlog.first()
    assert declined.need.model == "a"
    declined.declined = 7
    backlog.rejoin(declined)
    found = {(lane.model, lane.waiting, lane.declined) for lane in backlog.lanes()}
    assert found == {("a", 2, False), ("a", 1, True), ("b", 1, False)}
    assert {lane.key for lane in backlog.lanes() if lane.declined} == {backlog.lane(declined)}
    drained(backlog)
    assert list(backlog.lanes()) == []


def shared(*wishes):
    """A backlog of (batch, cost, model) that have joined in this order."""
    backlog = Backlog()
    for batch, cost, model in wishes:
        granted = SimpleNamespace(done=lambda: False)
        backlog.join(need(cost, model), 1, granted, batch_id=batch, share=2.0 if batch == "double" else 1.0)
    return backlog


def batches(backlog, closed=frozenset()):
    return [waiting.batch_id for waiting in drained(backlog, closed)]


def test_requests_of_no_batch_go_first_however_cheap_they_are():
    assert batches(shared(("a", 50, "m"), (None, 1, "m"), ("b", 40, "m")))[0] is None


def test_cheap_requests_of_one_batch_do_not_wait_for_all_the_costly_ones_of_another():
    order = batches(shared(*[("large", 100, "m")] * 4, *[("small", 10, "m")] * 20))
    assert order[0] == "large"
    assert order[1:11] == ["small"] * 10
    assert order[11] in ("large", "small")
    assert order.index("large", 1) <= 12


def test_a_batch_of_a_double_share_gets_twice_as_much():
    order = batches(shared(*[("single", 10, "m")] * 20, *[("double", 10, "m")] * 20))
    assert abs(order[:18].count("double") - 12) <= 1


def test_within_a_batch_the_costly_still_go_first():
    backlog = shared(*[("a", cost, "m") for cost in (10, 40, 20)], *[("b", cost, "m") for cost in (5, 30)])
    costs = {}
    for waiting in drained(backlog):
        costs.setdefault(waiting.batch_id, []).append(waiting.need.cost_tokens)
    assert costs == {"a": [40, 20, 10], "b": [30, 5]}


def test_what_a_batch_gets_of_one_model_is_not_held_against_it_at_another():
    backlog = shared(*[("a", 10, "m")] * 10, ("b", 10, "m"), ("a", 9, "n"), ("b", 8, "n"))
    of_m = {backlog.lane(waiting) for waiting in drained(shared(("a", 10, "m"), ("b", 10, "m")))}
    for _ in range(5):
        assert backlog.first(of_m).need.model == "m"
    assert batches(backlog, of_m) == ["a", "b"]


def test_who_was_refused_has_not_had_anything():
    backlog = shared(*[("a", 100, "m")] * 2, *[("b", 60, "m")] * 2)
    first = backlog.first()
    assert first.batch_id == "a"
    backlog.rejoin(first)
    assert batches(backlog) == ["a", "b", "b", "a"]


def test_when_nobody_waits_any_more_nobody_owes_anything():
    backlog = shared(*[("a", 100, "m")] * 5, ("b", 10, "m"))
    drained(backlog)
    for batch, cost in (("a", 11), ("b", 10)):
        backlog.join(need(cost), 1, SimpleNamespace(done=lambda: False), batch_id=batch)
    assert batches(backlog) == ["a", "b"]


def test_who_gave_up_is_not_counted_as_waiting_for_its_batch(loop):
    backlog = Backlog()
    futures = [loop.create_future() for _ in range(3)]
    for future, batch in zip(futures, "aab", strict=True):
        backlog.join(need(), 1, future, batch_id=batch)
    futures[0].cancel()
    futures[1].cancel()
    assert batches(backlog) == ["b"]
    assert len(backlog) == 0


def test_asking_again_leaves_each_batch_its_due(loop):
    backlog = shared(*[("a", 100, "m")] * 3, *[("b", 100, "m")] * 3)
    first = backlog.first()
    first.declined = 1
    backlog.rejoin(first)
    backlog.ask_again()
    assert (backlog.patient, len(backlog)) == (0, 6)
    order = batches(backlog)
    assert sorted(order[:2]) == ["a", "b"]
    assert (order.count("a"), order.count("b")) == (3, 3)
