"""How many requests are brought to wait, for each model and in all."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dispatcher import quota
from dispatcher.backlog import Backlog
from dispatcher.scheduler.fleet import FleetModel
from dispatcher.scheduler.question import Need
from tests.fleets import NOW_S, view, worker


def fleet(**slots):
    """A worker with so many slots for each model, all of them free; it serves that model only."""
    return FleetModel(
        view(*(worker(f"{name}:1", models=frozenset({name}), limit=count) for name, count in slots.items()))
    )


def backlog(**waiting):
    made = Backlog()
    for model, count in waiting.items():
        for _ in range(count):
            made.join(Need(model, 0, 1, 1), 0, SimpleNamespace(done=lambda: False))
    return made


def of_urgency(urgency, count, model="a"):
    made = Backlog()
    join(made, urgency, count, model)
    return made


def join(made, urgency, count, model="a"):
    for _ in range(count):
        made.join(Need(model, 0, 1, 1), urgency, SimpleNamespace(done=lambda: False))


def lanes(made, *models):
    return {lane.key for lane in made.lanes() if lane.model in models}


def test_each_model_waits_for_its_own_slots_only():
    both = fleet(slow=2, fast=100)
    waiting = backlog(slow=16, fast=49)
    assert not quota.has_room_for("slow", waiting, both, set())
    assert quota.has_room_for("fast", waiting, both, set())
    assert not quota.has_room_for("fast", backlog(fast=51), both, set())


def test_what_any_worker_may_take_waits_for_all_slots():
    assert quota.has_room_for(None, backlog(a=20), fleet(a=20, b=20), set())
    many = Backlog()
    for _ in range(20):
        many.join(Need(None, 0, 1, 1), 0, SimpleNamespace(done=lambda: False))
    assert not quota.has_room_for(None, many, fleet(a=20, b=20), set())


def test_many_models_together_are_bounded(monkeypatch):
    monkeypatch.setattr(quota, "MOST_WAITING", 30)
    names = [f"m{number}" for number in range(4)]
    some = fleet(**dict.fromkeys(names, 1))
    waiting = backlog(m0=10, m1=10, m2=9)
    assert quota.has_room_for("m3", waiting, some, set())
    waiting.join(Need("m2", 0, 1, 1), 0, SimpleNamespace(done=lambda: False))
    assert not quota.has_room_for("m3", waiting, some, set())


def test_a_model_without_a_worker_waits_within_its_own_bound(monkeypatch):
    monkeypatch.setattr(quota, "_MOST_APART", 40)
    waiting = backlog(nobody=40)
    stranded = lanes(waiting, "nobody")
    assert not quota.has_room_for("nobody", waiting, fleet(a=4), stranded)
    assert quota.has_room_for("a", waiting, fleet(a=4), stranded)
    assert quota.has_room_for("nobody", backlog(nobody=39), fleet(a=4), stranded)


@pytest.mark.parametrize(
    ("waiting", "busy", "idle"),
    [
        ({}, (), True),
        ({"a": 1}, (), True),
        ({"a": 1}, ("b",), False),
        ({"a": 1, "b": 1}, (), False),
        ({"somebody": 1}, (), True),
    ],
)
def test_others_idle_who_serve_nothing_of_what_waits(waiting, busy, idle):
    both = fleet(a=1, b=1)
    for name in busy:
        both.took(f"{name}:1", 1)
    made = backlog(**waiting)
    stranded = lanes(made, "somebody")
    assert quota.others_idle(made, both, stranded, NOW_S) is idle


def test_a_worker_that_has_not_said_what_it_serves_is_spoken_for_by_whatever_waits():
    unknown = FleetModel(view(worker("a:1", models=frozenset()), worker("b:1", models=frozenset())))
    assert not quota.others_idle(backlog(a=1), unknown, set(), NOW_S)


def test_nothing_more_is_brought_for_who_idles_when_very_many_wait(monkeypatch):
    monkeypatch.setattr(quota, "MOST_WAITING", 5)
    assert quota.others_idle(backlog(a=4), fleet(a=1, b=1), set(), NOW_S)
    assert not quota.others_idle(backlog(a=5), fleet(a=1, b=1), set(), NOW_S)


def test_what_is_less_urgent_takes_no_room_from_what_is_more_urgent():
    some, waiting = fleet(a=4), of_urgency(1, 40)
    assert quota.has_room(waiting, some, set(), 0)
    assert quota.has_room_for("a", waiting, some, set(), 0)
    for urgency in (1, 2, None):
        assert not quota.has_room(waiting, some, set(), urgency)
        assert not quota.has_room_for("a", waiting, some, set(), urgency)


def test_even_what_is_most_urgent_is_bounded_and_leaves_no_room_for_others():
    some, waiting = fleet(a=4), of_urgency(1, 10)
    join(waiting, 0, 15)
    assert quota.has_room(waiting, some, set(), 0)
    join(waiting, 0, 1)
    for urgency in (0, 1):
        assert not quota.has_room(waiting, some, set(), urgency)
        assert not quota.has_room_for("a", waiting, some, set(), urgency)


def test_bounds_over_all_models_are_for_each_urgency(monkeypatch):
    monkeypatch.setattr(quota, "MOST_WAITING", 30)
    monkeypatch.setattr(quota, "_MOST_APART", 40)
    waiting, some = of_urgency(1, 30, "b"), fleet(a=1, b=1)
    assert not quota.has_room_for("a", waiting, some, set(), 1)
    assert quota.has_room_for("a", waiting, some, set(), 0)
    lost = of_urgency(1, 40, "nobody")
    stranded = lanes(lost, "nobody")
    assert not quota.has_room(lost, some, stranded, 1)
    assert quota.has_room(lost, some, stranded, 0)


def test_requests_of_no_batch_that_are_not_equally_urgent_are_told_apart():
    waiting, some = of_urgency(0, 1), fleet(a=1)
    join(waiting, 1, 40)
    assert quota.has_room(waiting, some, set(), 0)
    assert (waiting.count("a", 0), waiting.count("a", 1)) == (1, 40)


def test_what_is_about_to_join_counts_as_waiting_for_whoever_brings_more():
    some, waiting = fleet(a=4, b=4), of_urgency(1, 1)
    waiting.announced["a", 1] = 15
    assert not quota.has_room_for("a", waiting, some, set(), 1)
    assert quota.has_room_for("a", waiting, some, set(), 0)
    assert quota.has_room_for("b", waiting, some, set(), 1)
