"""Passes: who goes, who waits for a faster worker, who is asked again, and when more should be brought."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import pytest

from dispatcher.assignment import Assignment
from dispatcher.backlog import Backlog
from dispatcher.demand import Courtesy, Demand
from dispatcher.scheduler.decision import NoWorkerReason
from dispatcher.scheduler.fleet import FleetModel
from dispatcher.scheduler.outlook import Underway
from dispatcher.scheduler.question import Need
from dispatcher.scheduler.strategies import SchedulerPolicy, Strategies
from forebay.policy.engine import Engine, EngineSpec
from forebay.policy.watched import Polling, WatchedWorker
from workers.fleet import FleetView, WorkerState

SPEEDS = {"slow": 10.0, "fast": 40.0}
FULL = [Underway("fast", 0.0, 80)]
"""What the fast worker is doing: for two seconds more."""


class Desk:
    """An assignment, its backlog, and workers by name with so many slots."""

    def __init__(self, speeds=SPEEDS, **slots):
        self.workers = {
            name: WatchedWorker(name, Engine(EngineSpec(1, count)), Polling(), told=True)
            for name, count in slots.items()
        }
        self.states = dict.fromkeys(slots, WorkerState.READY)
        self.contexts = {}
        self.models = {}
        self.assignment = Assignment(Strategies(SchedulerPolicy()), Random(1))
        self.backlog = Backlog()
        self.look(speeds)

    def look(self, speeds=SPEEDS, now_s=0.0):
        views = tuple(
            replace(
                worker.view(0.0),
                state=self.states[name],
                max_model_len=self.contexts.get(name),
                models=self.models.get(name, frozenset()),
            )
            for name, worker in self.workers.items()
        )
        known = {name: speed for name, speed in speeds.items() if name in self.workers}
        self.assignment.look(FleetModel(FleetView(now_s, 1, views), speeds=known), known, now_s)

    def fit(self, name, tokens):
        """A worker takes no more than so many tokens."""
        self.contexts[name] = tokens
        self.look()

    def serve(self, **models):
        """Workers serve one model each."""
        self.models = {name: frozenset({model}) for name, model in models.items()}
        self.look()

    def ready(self, **states):
        for name, ready in states.items():
            self.states[name] = WorkerState.READY if ready else WorkerState.STARTING

    def come(self, *tokens, urgency=0, model=None):
        for count in tokens:
            need = Need(model, 0, count, count)
            self.assignment.note(need)
            self.backlog.join(need, urgency, SimpleNamespace(done=lambda: False))

    def fill(self, name):
        for _ in range(self.workers[name].limit):
            self.assignment.fleet.took(name, 1)

    def free(self, name):
        self.assignment.fleet.gave_back(name, 1)

    def go(self, underway=(), now_s=0.0):
        """Who goes where in one pass."""
        asks = self.assignment.assign(self.backlog, underway, now_s)
        return [(waiting.need.cost_tokens, decision.pick) for waiting, decision in asks]


@pytest.fixture
def desk():
    """A slow worker with room, and a fast one that is full for two seconds."""
    made = Desk(slow=4, fast=1)
    made.fill("fast")
    return made


def test_the_longest_waits_for_the_faster_worker_and_the_next_goes(desk):
    desk.come(400, 20)
    assert desk.go(FULL) == [(20, "slow")]
    assert (len(desk.backlog), desk.backlog.patient) == (1, 1)


def test_who_waits_takes_the_fast_slot_when_it_comes_free(desk):
    desk.come(400)
    assert desk.go(FULL) == []
    desk.free("fast")
    assert desk.go() == [(400, "fast")]


def test_who_has_declined_room_is_asked_again_after_the_next_look(desk):
    desk.come(400)
    assert desk.go(FULL) == []
    assert desk.go([Underway("fast", 0.0, 40_000)]) == []
    desk.look()
    desk.fill("fast")
    assert desk.go([Underway("fast", 0.0, 40_000)]) == [(400, "slow")]


def test_who_comes_between_looks_is_asked_whoever_has_declined_before(desk):
    desk.come(400)
    assert desk.go(FULL) == []
    desk.come(20)
    assert desk.go(FULL) == [(20, "slow")]


def test_a_slot_that_one_waits_for_is_not_waited_for_by_another_until_the_next_look(desk):
    desk.come(400)
    assert desk.go(FULL) == []
    desk.come(390)
    assert desk.go(FULL) == [(390, "slow")]


def test_faster_room_is_offered_to_who_has_declined_slower_room():
    speeds = {"slow": 10.0, "middle": 30.0, "fast": 40.0}
    desk = Desk(speeds, slow=4, middle=1, fast=1)
    desk.fill("fast")
    desk.fill("middle")
    desk.come(400)
    # For the fast one it would end after 12.2 s, on the slow one after 40 s, on the middle one after 13 s.
    busy = [Underway("fast", 0.0, 88), Underway("middle", 0.0, 30_000)]
    assert desk.go(busy) == []
    desk.free("middle")
    assert desk.go(busy, now_s=0.01) == [(400, "middle")]


def test_a_worker_of_unknown_speed_gets_short_requests_only_until_it_has_had_its_time():
    desk = Desk({}, new=16)
    desk.come(*[1000] * 3, *[10] * 6)
    assert desk.go() == [(10, "new")] * 4
    desk.look({}, now_s=5.0)
    assert desk.go(now_s=5.0)[:3] == [(1000, "new")] * 3


def test_without_a_worker_for_the_model_everybody_waits_and_it_is_said_why():
    desk = Desk()
    desk.come(10, 20, model="m")
    assert desk.go() == []
    assert desk.assignment.without_worker is NoWorkerReason.NOT_SERVED
    assert len(desk.backlog) == 2


def test_more_is_brought_while_few_wait_for_the_slots_there_are(desk):
    assert desk.assignment.has_room(desk.backlog)
    desk.fill("slow")
    desk.come(*[10] * 15)
    desk.go(FULL)
    assert desk.assignment.has_room(desk.backlog)
    desk.come(10)
    desk.go(FULL)
    assert not desk.assignment.has_room(desk.backlog)


def test_who_waits_for_a_faster_worker_does_not_keep_others_from_being_brought():
    desk = Desk(slow=4, fast=40)
    desk.fill("fast")
    desk.come(*[4000] * 30)
    assert desk.go([Underway("fast", 0.0, 80)] * 40) == []
    assert desk.backlog.patient == 30
    assert desk.assignment.has_room(desk.backlog)


def test_on_a_large_fleet_as_many_may_be_patient_as_there_are_slots():
    """Each waits for a fast slot of its own; whoever comes after them wants the slow ones."""
    desk = Desk(slow=4, fast=1000)
    desk.fill("fast")
    ending = [Underway("fast", 0.0, 80)] * 1000
    desk.come(*[400] * 1000)
    assert desk.go(ending) == []
    assert desk.backlog.patient == 1000
    assert desk.assignment.has_room(desk.backlog)
    desk.come(*[400] * 4)
    assert desk.go(ending) == [(400, "slow")] * 4


async def test_who_gave_up_while_waiting_for_a_faster_worker_is_passed_over(desk):
    granted = asyncio.get_running_loop().create_future()
    desk.backlog.join(Need(None, 0, 400, 400), 0, granted)
    assert desk.go(FULL) == []
    granted.cancel()
    desk.free("fast")
    assert desk.go() == []
    assert len(desk.backlog) == 0


def test_a_worker_that_takes_long_to_start_is_given_its_time_when_it_is_ready():
    desk = Desk({}, new=16)
    desk.ready(new=False)
    desk.look({}, now_s=0.0)
    desk.ready(new=True)
    desk.look({}, now_s=100.0)
    desk.come(*[1000] * 3, *[10] * 6)
    assert desk.go(now_s=100.0) == [(10, "new")] * 4
    desk.ready(new=False)
    desk.look({}, now_s=200.0)
    desk.ready(new=True)
    desk.look({}, now_s=300.0)
    assert desk.go(now_s=300.0) == [(10, "new")] * 2


def test_what_finds_no_room_is_told_by_model_the_most_urgent_first():
    desk = Desk(slow=1, fast=1)
    desk.fill("slow")
    desk.fill("fast")
    desk.come(10, 20, 30, urgency=2)
    desk.come(5, urgency=1)
    assert desk.go() == []
    assert desk.assignment.demand(desk.backlog) == [Demand(None, 1, 1)]
    desk.free("fast")
    assert desk.go() == [(5, "fast")]
    assert desk.assignment.demand(desk.backlog) == [Demand(None, 2, 3)]


def test_nothing_is_told_where_there_was_room_for_all_or_nobody_to_serve_them():
    for desk, count in ((Desk(slow=4), 2), (Desk(), 0)):
        desk.come(10, 20, model="m")
        assert len(desk.go()) == count
        assert desk.assignment.demand(desk.backlog) == []


def test_room_that_all_declined_is_told_and_remembered_while_there_is_none(desk):
    desk.come(400)
    assert desk.go(FULL) == []
    assert desk.assignment.demand(desk.backlog) == [Demand(None, 0, 1, 10.0)]
    desk.fill("slow")
    assert desk.go(FULL, now_s=0.5) == []
    assert desk.assignment.demand(desk.backlog) == [Demand(None, 0, 1, 10.0)]
    assert desk.go(FULL, now_s=5.0) == []
    assert desk.assignment.demand(desk.backlog) == [Demand(None, 0, 1)]


def test_what_waits_elsewhere_and_is_more_urgent_goes_first():
    desk = Desk(slow=1, fast=1)
    desk.assignment.make_way(Courtesy([(Demand(None, 0, 1),)]))
    desk.come(10, 20, urgency=1)
    assert len(desk.go()) == 1
    assert desk.go() == []
    desk.assignment.make_way(Courtesy())
    assert len(desk.go()) == 1


def test_what_one_makes_way_for_does_not_hold_up_its_own_urgent_requests():
    desk = Desk(fast=2)
    desk.assignment.make_way(Courtesy([(Demand(None, 1, 2),)]))
    desk.come(10, urgency=1)
    desk.come(20, 30, urgency=0)
    desk.come(40, urgency=2)
    assert desk.go() == [(30, "fast"), (20, "fast")]


def test_nobody_waits_for_a_worker_that_will_take_nothing():
    desk = Desk(slow=4, fast=1)
    desk.fill("fast")
    desk.come(400)
    assert desk.go(FULL) == []
    desk.ready(fast=False)
    desk.look()
    assert desk.go(FULL) == [(400, "slow")]


def test_nobody_waits_for_a_worker_that_the_request_does_not_fit():
    desk = Desk(slow=4, fast=1)
    desk.fit("fast", 100)
    desk.fill("fast")
    desk.come(400)
    assert desk.go(FULL) == [(400, "slow")]


def test_nobody_waits_for_a_worker_that_stands_still(desk):
    desk.come(400)
    assert desk.go(FULL, now_s=4.1) == [(400, "slow")]


def test_a_tiny_request_of_long_ago_is_no_measure_for_scouts():
    desk = Desk({}, new=16)
    desk.come(1)
    assert desk.go() == [(1, "new")]
    assert desk.go() == []
    desk.come(1000, 10, 10)
    assert desk.go() == [(10, "new"), (10, "new")]


def test_who_waits_for_the_one_worker_that_fits_keeps_no_others_from_coming():
    desk = Desk(SPEEDS, slow=64, fast=4)
    desk.fit("slow", 100)
    desk.fill("fast")
    desk.come(*[400] * 60)
    assert not desk.assignment.has_room(desk.backlog)
    assert desk.go() == []
    assert len(desk.backlog) == 60
    assert desk.assignment.has_room(desk.backlog)
    assert desk.assignment.has_room_for("llama", desk.backlog)
    desk.come(*[20] * 64)
    assert desk.go() == [(20, "slow")] * 64


def test_of_models_whose_workers_are_full_nobody_is_asked(monkeypatch):
    desk = Desk(slow=4, fast=1)
    desk.serve(slow="full", fast="free")
    desk.fill("slow")
    for number in range(50):
        desk.come(100 + number, urgency=number % 3, model="full")
    desk.come(10, model="free")
    asked, first = [], Backlog.first

    def counted(backlog, lanes=None):
        asked.append(len(lanes))
        return first(backlog, lanes)

    monkeypatch.setattr(Backlog, "first", counted)
    assert desk.go() == [(10, "fast")]
    assert max(asked) == 1
    assert [(one.model, one.urgency) for one in desk.assignment.demand(desk.backlog)] == [("full", 0)]


def test_a_pass_that_fails_takes_nobody_out_and_leaves_no_slot_set_aside(desk, monkeypatch):
    desk.come(80, 60, 40)
    free = {name: desk.assignment.fleet.free_slots(name) for name in SPEEDS}
    decided, decide = [], Assignment._decided

    def decide_twice(assignment, waiting):
        if len(decided) == 1:
            raise ZeroDivisionError("a mistake of ours")
        decided.append(waiting)
        return decide(assignment, waiting)

    desk.assignment.make_way(Courtesy([(Demand(None, -1, 1),)]))
    monkeypatch.setattr(Assignment, "_decided", decide_twice)
    with pytest.raises(ZeroDivisionError):
        desk.go()
    assert len(desk.backlog) == 3
    assert {name: desk.assignment.fleet.free_slots(name) for name in SPEEDS} == free
    monkeypatch.undo()
    desk.assignment.make_way(Courtesy())
    assert desk.go() == [(80, "slow"), (60, "slow"), (40, "slow")]
