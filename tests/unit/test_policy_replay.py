"""The replay of a workload on a modelled fleet: nothing is lost, doubled or overfull, and good orders win."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.scheduler.question import Need
from dispatcher.scheduler.strategies import SchedulerPolicy, Strategies
from forebay.policy.engine import EngineSpec
from forebay.policy.replay import Setup, replay
from forebay.policy.report import lower_bound_s, summed_up
from forebay.policy.workload import Lengths, Request, Workload, drawn, for_strategy
from workers.errors import SettingsError

MIXED = [EngineSpec(100, 8), EngineSpec(100, 8), EngineSpec(200, 16), EngineSpec(400, 32)]
EQUAL = [EngineSpec(100, 16)] * 4


def workload(count=400, *, foretold=True, fleet=MIXED, seed=1):
    slots = sum(engine.slots for engine in fleet)
    return drawn(Lengths(), count, Random(seed), foretold=foretold, slots=slots)


def run(work=None, fleet=MIXED, policy=None, **setup):
    return replay(work or workload(), fleet, Strategies(policy or SchedulerPolicy()), Setup(**setup))


def report(work=None, fleet=MIXED, **setup):
    work = work or workload()
    return summed_up("batch", work, fleet, run(work, fleet, **setup))


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("foretold", [False, True])
def test_the_same_arguments_give_the_same_report(cold, foretold):
    work = workload(foretold=foretold)
    assert report(work, cold=cold) == report(work, cold=cold)


def test_another_seed_gives_another_run_of_a_strategy_that_draws():
    work = for_strategy(workload(), "chat")
    assert report(work, seed=1) != report(work, seed=2)


small_engines = st.builds(
    EngineSpec,
    speed=st.floats(10, 1000),
    slots=st.integers(1, 20),
    prefill=st.sampled_from([0.0, 500.0]),
)


@settings(max_examples=25, deadline=None)
@given(
    fleet=st.lists(small_engines, min_size=1, max_size=5),
    count=st.integers(1, 150),
    seed=st.integers(0, 1000),
    foretold=st.booleans(),
    cold=st.booleans(),
    strategy=st.sampled_from(["batch", "chat", "long-context"]),
)
def test_each_request_ends_once_no_engine_is_overfull_and_the_bound_is_not_beaten(
    fleet, count, seed, foretold, cold, strategy
):
    work = for_strategy(workload(count, foretold=foretold, fleet=fleet, seed=seed), strategy)
    replayed = run(work, fleet, seed=seed, cold=cold)
    assert len(replayed.tickets) == count
    for ticket in replayed.tickets:
        assert sum(attempt.won for attempt in ticket.attempts) == 1
        assert [attempt.second for attempt in ticket.attempts] in ([False], [False, True])
        assert 0 <= ticket.leased_s < ticket.ended_s <= replayed.elapsed_s
    for worker in replayed.workers:
        assert worker.engine.most_running <= worker.engine.spec.slots
        assert worker.engine.running == worker.engine.waiting == len(worker.leases) == 0
    assert sum(worker.engine.finished for worker in replayed.workers) == count
    summary = summed_up(strategy, work, fleet, replayed)
    assert summary.ratio >= 1 - 1e-9
    assert sum(share.requests for share in summary.workers) == count
    assert sum(share.tokens for share in summary.workers) == work.tokens
    assert 0 < summary.busy <= 1 + 1e-9


def test_a_fleet_of_equals_ends_near_the_bound():
    assert report(workload(1000, fleet=EQUAL), EQUAL).ratio < 1.03


def test_a_mixed_fleet_ends_near_the_bound_when_lengths_are_foretold():
    assert report(workload(2000)).ratio < 1.03


def test_workers_that_have_to_be_learned_cost_time():
    work = workload(1000)
    assert report(work).makespan_s < report(work, cold=True).makespan_s


def test_the_longest_first_beat_the_shortest_first():
    work = workload(1000)
    ordered = sorted(work.requests, key=lambda request: request.answer_tokens)
    first = replace(work, requests=ordered[::-1])
    last = replace(work, requests=ordered)
    assert report(first, hedge=False).makespan_s < 0.95 * report(last, hedge=False).makespan_s


def test_second_attempts_shorten_the_end_when_lengths_are_unknown():
    work = workload(2000, foretold=False)
    hedged, plain = report(work, cold=True), report(work, cold=True, hedge=False)
    assert hedged.makespan_s < plain.makespan_s
    assert hedged.second_attempts > plain.second_attempts == plain.second_tokens == 0
    assert hedged.second_tokens < 0.05 * work.tokens


def test_tokens_of_a_lost_attempt_are_what_it_wrote_until_the_other_won():
    replayed = run(workload(2000, foretold=False), cold=True)
    raced = [ticket for ticket in replayed.tickets if len(ticket.attempts) == 2]
    assert raced
    for ticket in raced:
        [lost] = [attempt for attempt in ticket.attempts if not attempt.won]
        could = (ticket.ended_s - lost.granted_s) * lost.worker.engine.spec.speed
        assert 0 <= lost.tokens <= min(could + 1, ticket.request.answer_tokens)


def test_a_request_waits_from_the_start_to_its_first_lease():
    one = EngineSpec(speed=10, slots=1)
    requests = [Request(Need(None, 0, 100, 100), 100) for _ in range(2)]
    summary = report(Workload(requests, [2]), [one])
    # The engine's queue may hold one more than its slots, once the limit has grown.
    assert summary.makespan_s == pytest.approx(20, abs=0.1)
    assert summary.lower_bound_s == 20
    assert 0 < summary.waited_mean_s <= 5.1


def test_the_bound_is_the_longest_answer_alone_when_that_takes_longer():
    work = Workload([Request(Need(None, 100, 1000, 1100), 1000)], [1])
    assert lower_bound_s(work, [EngineSpec(10, 8), EngineSpec(100, 8, prefill=50)]) == 12


def test_a_strategy_that_is_not_configured_is_refused():
    with pytest.raises(SettingsError, match="no strategy is named swift"):
        run(for_strategy(workload(1), "swift"))


def test_round_robin_fills_the_fast_later_and_gives_every_worker_its_turn():
    policy = SchedulerPolicy.model_validate(
        {"strategies": {"rr": {"weights": {"weight": 1}, "picker": "round-robin"}}, "default_strategy": "rr"}
    )
    replayed = run(workload(8), policy=policy)
    by_worker = [worker.engine.finished for worker in replayed.workers]
    assert by_worker == [2, 2, 2, 2]
