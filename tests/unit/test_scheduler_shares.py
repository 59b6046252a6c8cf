"""Many decisions in a row, in a small simulation: who ends up with how much of the work."""

from collections import Counter
from dataclasses import dataclass
from random import Random

import pytest

from dispatcher.scheduler.decision import Chosen, decide
from dispatcher.scheduler.fleet import FleetModel
from dispatcher.scheduler.question import Need
from dispatcher.scheduler.strategies import DEFAULTS, Strategy
from tests.fleets import NOW_S, idle_load, view, worker

SPEEDS = {"a": 1, "b": 1, "c": 2, "d": 4}
SLOTS = {"a": 8, "b": 8, "c": 16, "d": 32}
TOKENS_PER_S = 1_000
POLL_S = 1.0


@dataclass
class Running:
    """A request on an engine."""

    cost: int
    left: float
    taken_s: float


def engine(name, running=(), sampled_at=NOW_S):
    since = [request.cost for request in running if request.taken_s >= sampled_at]
    seen = idle_load(
        running=len(running) - len(since),
        drain_rate=None,
        capacity_rate=SPEEDS[name] * TOKENS_PER_S,
        sampled_at=sampled_at,
    )
    return worker(
        name,
        limit=SLOTS[name],
        load=seen,
        leases=len(running),
        leases_since_sample=len(since),
        tokens_since_sample=sum(since),
    )


class Simulation:
    """Engines that share their speed among what they run; requests wait outside until one has room."""

    def __init__(self, lengths):
        self.strategy = Strategy.of("batch", DEFAULTS["batch"])
        self.rng = Random(1)
        self.waiting = sorted(lengths)
        self.running = {name: [] for name in SPEEDS}
        self.given = {name: [] for name in SPEEDS}
        self.now_s = self.sampled_at = NOW_S

    def run(self):
        """Seconds until the last request is finished."""
        while self.waiting or any(self.running.values()):
            if self.now_s >= self.sampled_at + POLL_S:
                self.sampled_at = self.now_s
            self.place()
            self.advance()
        return self.now_s - NOW_S

    def place(self):
        fleet = FleetModel(view(*(engine(name, self.running[name], self.sampled_at) for name in SPEEDS)))
        while self.waiting:
            cost = self.waiting[-1]
            decision = decide(Need("llama", 0, cost, cost), fleet, self.strategy, self.rng, self.now_s)
            if not isinstance(decision, Chosen):
                return
            self.waiting.pop()
            fleet.took(decision.pick, cost)
            self.running[decision.pick].append(Running(cost, cost, self.now_s))
            self.given[decision.pick].append(cost)

    def advance(self):
        """To the next end of a request."""
        rates = {
            name: SPEEDS[name] * TOKENS_PER_S / len(running)
            for name, running in self.running.items()
            if running
        }
        step_s = min(
            min(request.left for request in self.running[name]) / rate for name, rate in rates.items()
        )
        for name, rate in rates.items():
            for request in self.running[name]:
                request.left -= rate * step_s
            self.running[name] = [request for request in self.running[name] if request.left > 1e-6]
        self.now_s += step_s


def lengths(count):
    rng = Random(7)
    return [min(4_000, max(8, int(rng.lognormvariate(5.5, 0.9)))) for _ in range(count)]


@pytest.mark.parametrize("count", [200, 600])
def test_longest_first_ends_within_a_twentieth_of_the_moment_the_fleet_could_end_it(count):
    work = lengths(count)
    bound_s = sum(work) / (sum(SPEEDS.values()) * TOKENS_PER_S)
    assert Simulation(work).run() <= 1.05 * bound_s


def test_the_longest_request_goes_to_the_fastest_worker_and_the_faster_get_the_longer_ones_first():
    simulation = Simulation(lengths(200))
    simulation.run()
    first = {name: sum(given[:4]) / 4 for name, given in simulation.given.items()}
    assert simulation.given["d"][0] == max(lengths(200))
    assert first["d"] > first["c"] > max(first["a"], first["b"])


def test_while_all_have_room_each_gets_work_in_proportion_to_its_speed():
    fleet = FleetModel(view(*(engine(name) for name in SPEEDS)))
    strategy, rng = Strategy.of("batch", DEFAULTS["batch"]), Random(1)
    picks = Counter()
    for _ in range(24):
        decision = decide(Need("llama", 0, 500, 500), fleet, strategy, rng, NOW_S)
        fleet.took(decision.pick, 500)
        picks[decision.pick] += 1
    assert picks == {"a": 3, "b": 3, "c": 6, "d": 12}


def test_a_worker_of_twice_the_capacity_gets_about_twice_the_work():
    double = {
        "limit": 32,
        "load": idle_load(capacity_rate=2_000, drain_rate=2.0, capacity_tokens=200_000),
    }
    fleet = FleetModel(view(worker("one"), worker("two", **double)))
    strategy, rng, held, given = Strategy.of("batch", DEFAULTS["batch"]), Random(1), [], Counter()
    for turn in range(600):
        decision = decide(Need("llama", 0, 300, 300), fleet, strategy, rng, NOW_S)
        fleet.took(decision.pick, 300)
        given[decision.pick] += 1
        held.append(decision.pick)
        if turn >= 24:
            fleet.gave_back(held.pop(rng.randrange(len(held))), 300)
    in_flight = Counter(held)
    assert in_flight["two"] == pytest.approx(2 * in_flight["one"], abs=3)
    assert given["two"] == pytest.approx(2 * given["one"], rel=0.15)
