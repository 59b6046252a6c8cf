"""What a dispatcher leaves to others: all that is more urgent, its part of what is as urgent, no more."""

from __future__ import annotations

import pytest

from dispatcher.demand import Courtesy, Demand
from dispatcher.scheduler.fleet import FleetModel
from tests.fleets import NOW_S, view, worker

SPEEDS = {"slow:1": 10.0, "fast:1": 40.0}


def fleet(slow=(4, 0), fast=(4, 0), **changes):
    """Two workers, each with a limit and so many leases."""
    both = {"slow:1": slow, "fast:1": fast}
    workers = [worker(name, limit=limit, leases=held, **changes) for name, (limit, held) in both.items()]
    return FleetModel(view(*workers), speeds=SPEEDS)


def room(model):
    return {name: model.free_slots(name) for name in SPEEDS}


def left(courtesy, model, *urgencies):
    """What is left of the room for requests of these urgencies, the most urgent first."""
    leaving = courtesy.begin(model, NOW_S)
    found = []
    for urgency in urgencies:
        leaving.before(urgency)
        found.append(room(model))
    before = room(model)
    leaving.end()
    assert sum(room(model).values()) >= sum(before.values())
    return found[0] if len(found) == 1 else found


def test_where_nothing_waits_elsewhere_nothing_is_left():
    assert not Courtesy()
    assert left(Courtesy(), fleet(), 1) == {"slow:1": 4, "fast:1": 4}


def test_as_many_slots_as_more_urgent_requests_wait_are_left_to_them():
    courtesy = Courtesy([(Demand("llama", 0, 5),)])
    assert sum(left(courtesy, fleet(), 1).values()) == 3
    assert left(courtesy, fleet(fast=(4, 4), slow=(4, 2)), 1) == {"slow:1": 0, "fast:1": 0}


def test_ones_own_requests_that_are_more_urgent_leave_nothing():
    courtesy = Courtesy([(Demand("llama", 1, 5),)], {"slow:1": 4, "fast:1": 4})
    assert left(courtesy, fleet(), 0) == {"slow:1": 4, "fast:1": 4}


def test_what_the_pass_left_is_free_again_at_its_end():
    model = fleet()
    left(Courtesy([(Demand("llama", 0, 5),)]), model, 1)
    assert room(model) == {"slow:1": 4, "fast:1": 4}


def test_of_a_worker_with_fewer_slots_than_who_want_it_they_take_turns():
    courtesy = Courtesy([(Demand("llama", 1, 5),)], {"fast:1": 1})
    assert left(courtesy, fleet(fast=(1, 0)), 1)["fast:1"] == 0
    assert left(Courtesy([(Demand("llama", 1, 5),)]), fleet(fast=(1, 0)), 1)["fast:1"] == 1


def test_between_equals_each_has_its_part_of_every_worker():
    courtesy = Courtesy([(Demand("llama", 1, 50),)], {"slow:1": 2, "fast:1": 7})
    assert left(courtesy, fleet(slow=(4, 3), fast=(8, 7)), 1) == {"slow:1": 1, "fast:1": 0}


def test_two_that_hold_half_each_both_take_what_they_free():
    """Else a slot would be left to somebody who leaves it too."""
    courtesy = Courtesy([(Demand("llama", 1, 50),)], {"fast:1": 3})
    assert left(courtesy, fleet(fast=(8, 7)), 1)["fast:1"] == 1


def test_who_holds_more_than_its_part_leaves_no_more_than_wait():
    courtesy = Courtesy([(Demand("llama", 1, 1),)], {"fast:1": 6})
    assert left(courtesy, fleet(slow=(4, 4), fast=(8, 6)), 1)["fast:1"] == 1


def test_parts_are_smaller_where_more_dispatchers_wait():
    two = Courtesy([(Demand("llama", 1, 9),), (Demand("llama", 1, 9),)], {"fast:1": 4})
    one = Courtesy([(Demand("llama", 1, 9),)], {"fast:1": 4})
    assert left(one, fleet(fast=(9, 4)), 1)["fast:1"] == 5
    assert left(two, fleet(fast=(9, 4)), 1)["fast:1"] == 4


def test_room_that_they_declined_is_not_left_to_them():
    courtesy = Courtesy([(Demand("llama", 0, 9, beyond=10.0),)])
    assert left(courtesy, fleet(), 1) == {"slow:1": 4, "fast:1": 0}


def test_other_models_leave_nothing():
    assert left(Courtesy([(Demand("qwen", 0, 9),)]), fleet(), 1) == {"slow:1": 4, "fast:1": 4}


def test_less_urgent_requests_leave_what_equals_are_left_and_more():
    courtesy = Courtesy([(Demand("llama", 1, 6),)], {"fast:1": 3})
    assert left(courtesy, fleet(slow=(4, 2), fast=(4, 3)), 1, 2) == [
        {"slow:1": 2, "fast:1": 0},
        {"slow:1": 0, "fast:1": 0},
    ]


@pytest.mark.parametrize(
    "demand", [Demand("m", 0, 0), Demand("m", 0, 1, -1.0), Demand("m", 0, 1, float("inf"))]
)
def test_what_no_dispatcher_would_tell_is_not_sensible(demand):
    assert not demand.sensible
    assert Demand("m", 0, 1).sensible
