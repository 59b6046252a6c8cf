"""The decision as a whole: its three answers, its account, and what must hold for any fleet."""

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.scheduler.decision import Busy, Chosen, NoWorker, NoWorkerReason, decide
from dispatcher.scheduler.fleet import FleetModel
from dispatcher.scheduler.pickers import PICKERS
from dispatcher.scheduler.question import Need
from dispatcher.scheduler.strategies import DEFAULTS, Strategy, StrategySpec
from tests.fleets import NOW_S, idle_load, load, view, worker
from workers.breaker import BreakerState
from workers.fleet import WorkerState

BATCH = Strategy.of("batch", DEFAULTS["batch"])


def need(model="llama", cost_tokens=500, **more):
    return Need(model, 100, 100, cost_tokens, **more)


def ask(*workers, strategy=BATCH, seed=1, now_s=NOW_S, **of_need):
    return decide(need(**of_need), FleetModel(view(*workers)), strategy, Random(seed), now_s)


# -- the three answers --


def test_candidates_come_best_first_and_no_more_than_the_strategy_keeps():
    workers = [worker(f"w{number}", leases=number) for number in range(6)]
    decision = ask(*workers)
    assert isinstance(decision, Chosen)
    assert decision.pick == "w0"
    assert decision.candidates == ("w0", "w1", "w2", "w3")


@pytest.mark.parametrize("workers", [(), (worker(models=frozenset({"mistral"})),)])
def test_a_model_nobody_serves_has_no_worker(workers):
    decision = ask(*workers)
    assert isinstance(decision, NoWorker)
    assert decision.reason is NoWorkerReason.NOT_SERVED
    assert decision.explain().candidates == ()


@pytest.mark.parametrize("state", [WorkerState.STARTING, WorkerState.UNREADY, WorkerState.DRAINING])
def test_a_model_that_only_workers_serve_which_are_not_ready_has_no_worker_yet(state):
    decision = ask(worker(state=state), worker("b", models=frozenset({"mistral"})))
    assert isinstance(decision, NoWorker)
    assert decision.reason is NoWorkerReason.NONE_READY


def test_full_workers_are_busy_and_nobody_knows_until_when():
    decision = ask(worker(leases=16))
    assert isinstance(decision, Busy)
    assert decision.earliest_s is None


def test_a_busy_fleet_is_worth_asking_again_when_the_first_hindrance_ends():
    decision = ask(
        worker("a", leases=16),
        worker("b", breaker=BreakerState.OPEN, breaker_open_until=NOW_S + 9),
        worker("c", deferred_until=NOW_S + 4),
        worker("d", deferred_until=NOW_S + 2, models=frozenset({"mistral"})),
        worker("e", deferred_until=NOW_S + 1, state=WorkerState.UNREADY),
    )
    assert isinstance(decision, Busy)
    assert decision.earliest_s == NOW_S + 4


def test_a_worker_with_two_hindrances_waits_for_the_later():
    decision = ask(worker(deferred_until=NOW_S + 4, breaker=BreakerState.OPEN, breaker_open_until=NOW_S + 9))
    assert isinstance(decision, Busy)
    assert decision.earliest_s == NOW_S + 9


def test_when_every_breaker_is_open_requests_wait_for_the_first_trial_and_then_get_it():
    only = worker(breaker=BreakerState.OPEN, breaker_open_until=NOW_S + 5)
    waiting = ask(only)
    assert isinstance(waiting, Busy)
    assert waiting.earliest_s is not None
    assert isinstance(ask(only, now_s=waiting.earliest_s), Chosen)


def test_a_full_worker_is_waited_for_rather_than_the_one_that_failed_used_again():
    decision = ask(worker("failing"), worker("full", leases=16), tried=frozenset({"failing"}))
    assert isinstance(decision, Busy)


def test_the_only_worker_is_used_again_although_it_failed():
    assert isinstance(ask(worker("a"), tried=frozenset({"a"})), Chosen)


def test_a_failed_worker_is_used_again_while_the_others_breakers_are_open():
    broken = worker("b", breaker=BreakerState.OPEN, breaker_open_until=NOW_S + 99)
    decision = ask(worker("a"), broken, tried=frozenset({"a"}))
    assert isinstance(decision, Chosen)
    assert decision.candidates == ("a",)


# -- what the figures do --


def test_a_worker_that_said_nothing_neither_draws_all_requests_nor_none():
    workers = [
        worker("idle"),
        worker("silent", load=None),
        worker("loaded", load=idle_load(waiting=30, kv_usage_max=0.8)),
    ]
    decision = ask(*workers)
    assert isinstance(decision, Chosen)
    assert decision.candidates == ("idle", "silent", "loaded")


def test_a_worker_whose_telemetry_stopped_while_it_looked_idle_loses_to_one_seen_idle():
    stale = worker("a-stale", load=idle_load(sampled_at=NOW_S - 60))
    seen = [worker(f"b{n}", load=idle_load(waiting=n, kv_usage_max=n / 10)) for n in range(3)]
    decision = ask(stale, *seen)
    assert isinstance(decision, Chosen)
    assert decision.pick == "b0"
    assert decision.candidates[-1] == "b2"


def test_a_worker_whose_telemetry_stopped_while_it_looked_full_is_not_starved_for_ever():
    full = idle_load(waiting=40, kv_usage_max=0.99, sampled_at=NOW_S - 2)
    workers = (worker("a", load=full), worker("b", leases=6))
    assert ask(*workers).pick == "b"
    assert ask(*workers, now_s=NOW_S + 60).pick == "a"


def test_one_request_running_fast_loses_no_requests_to_twenty_running_slowly():
    small = idle_load(running=1, gen_throughput=75.0, capacity_rate=2_000)
    crowded = idle_load(running=20, gen_throughput=2_000.0, capacity_rate=2_000)
    one, twenty = worker("small", load=small, leases=1), worker("crowded", load=crowded, leases=20, limit=32)
    fleet = FleetModel(view(one, twenty))
    picks = []
    for _ in range(10):
        decision = decide(need(), fleet, BATCH, Random(1), NOW_S)
        picks.append(decision.pick)
        fleet.took(decision.pick, 500)
    assert picks.count("small") > picks.count("crowded")


@pytest.mark.parametrize("strategy", ["batch", "long-context"])
def test_the_longest_lines_go_to_a_worker_that_is_much_faster_though_it_has_more_to_do(strategy):
    fast = worker("fast", limit=4, leases=2, load=idle_load(kv_usage_max=0.3, capacity_rate=320.0))
    slow = worker("slow", limit=4, load=idle_load(capacity_rate=40.0))
    fleet = FleetModel(view(fast, slow), speeds={"fast": 80.0, "slow": 10.0})
    of = Strategy.of(strategy, DEFAULTS[strategy])
    decision = decide(need(cost_tokens=10_000), fleet, of, Random(1), NOW_S)
    assert isinstance(decision, Chosen)
    assert decision.pick == "fast"


def test_over_the_ceiling_everybody_is_still_used():
    full = idle_load(kv_usage_max=0.95)
    decision = ask(worker("a", load=full), worker("b", load=full, leases=4))
    assert isinstance(decision, Chosen)
    assert decision.candidates == ("a", "b")


def test_the_account_shows_who_was_dropped_by_what_and_every_candidates_scores():
    fleet = FleetModel(
        view(
            worker("best"),
            worker("over", load=idle_load(kv_usage_max=0.95)),
            worker("other", models=frozenset({"mistral"})),
            worker("draining", state=WorkerState.DRAINING),
            worker("refused"),
            worker("full", leases=16),
        )
    )
    fleet.refused("refused", "breaker open", NOW_S + 5)
    decision = decide(need(), fleet, BATCH, Random(1), NOW_S)
    fleet.took("best", 50_000)
    told = decision.explain()
    assert told.strategy == "batch"
    assert told.picker == "max-score"
    assert told.picked == "best"
    assert told.dropped == {
        "model": ("other",),
        "ready": ("draining",),
        "refused": ("refused",),
        "limit": ("full",),
    }
    assert told.refusals == {"refused": "breaker open"}
    assert [(row.worker, row.over_kv_ceiling) for row in told.candidates] == [("best", False), ("over", True)]
    best = told.candidates[0]
    assert best.scores == {
        "queue": 1.0,
        "kv": 1.0,
        "inflight": 1.0,
        "load": pytest.approx(1 / 1.1),
        "speed": 0.5,
        "weight": 1.0,
        "session": 0.5,
    }
    assert best.total == pytest.approx(sum(told.weights[name] * score for name, score in best.scores.items()))


# -- what must hold for any fleet --

counts = st.none() | st.integers(0, 10**18)
ratios = st.none() | st.floats(0, 1.5)
rates = st.none() | st.floats(0, allow_nan=False, allow_infinity=False)

loads = st.none() | st.builds(
    load,
    sampled_at=st.floats(NOW_S - 20, NOW_S + 1),
    waiting=counts,
    waiting_uncached_tokens=counts,
    capacity_tokens=counts,
    kv_usage_mean=ratios,
    kv_usage_max=ratios,
    drain_rate=rates,
    capacity_rate=rates,
)
whens = st.sampled_from([0.0, NOW_S - 1, NOW_S + 1, NOW_S + 100])
bodies = st.fixed_dictionaries(
    {
        "load": loads,
        "state": st.sampled_from([WorkerState.READY, WorkerState.READY, WorkerState.UNREADY]),
        "models": st.sampled_from(
            [frozenset({"llama"}), frozenset({"llama", "b"}), frozenset({"b"}), frozenset()]
        ),
        "max_model_len": st.sampled_from([None, 100, 10_000]),
        "weight": st.floats(0.01, 1000),
        "limit": st.integers(1, 20),
        "leases": st.integers(0, 20),
        "leases_since_sample": st.integers(0, 20),
        "tokens_since_sample": st.integers(0, 10**9),
        "breaker": st.sampled_from(list(BreakerState)),
        "breaker_open_until": whens,
        "deferred_until": whens,
    }
)


@st.composite
def fleets(draw):
    return [worker(f"w{number}", **draw(bodies)) for number in range(draw(st.integers(0, 7)))]


needs = st.builds(
    need,
    model=st.sampled_from(["llama", None]),
    cost_tokens=st.integers(0, 10**7),
    session_key=st.none() | st.text(max_size=3),
    tried=st.frozensets(st.sampled_from(["w0", "w1", "w2"])),
)
strategies = st.builds(
    lambda name, picker: Strategy.of(name, StrategySpec(weights=DEFAULTS[name].weights, picker=picker)),
    st.sampled_from(sorted(DEFAULTS)),
    st.sampled_from(sorted(PICKERS)),
)


@given(fleets(), needs, strategies, st.integers())
def test_whoever_is_picked_passed_every_filter(workers, asked, strategy, seed):
    decision = decide(asked, FleetModel(view(*workers)), strategy, Random(seed), NOW_S)
    if not isinstance(decision, Chosen):
        return
    by_id = {one.id: one for one in workers}
    assert len(set(decision.candidates)) == len(decision.candidates)
    for name in decision.candidates:
        one = by_id[name]
        assert one.state is WorkerState.READY
        assert asked.model in one.models or not one.models or asked.model is None
        assert one.breaker is not BreakerState.OPEN or one.breaker_open_until <= NOW_S
        assert one.deferred_until <= NOW_S
        assert one.leases < one.limit


@given(fleets(), needs, strategies, st.integers(), st.randoms(use_true_random=False))
def test_the_order_in_which_workers_are_listed_makes_no_difference(workers, asked, strategy, seed, shuffler):
    def again(listed):
        return decide(
            asked,
            FleetModel(view(*listed)),
            Strategy.of("s", StrategySpec(weights={scorer.name: share for scorer, share in strategy.shares})),
            Random(seed),
            NOW_S,
        )

    shuffled = list(workers)
    shuffler.shuffle(shuffled)
    assert again(workers) == again(shuffled)


@pytest.mark.parametrize("picker", PICKERS)
def test_the_order_in_which_equal_workers_are_listed_makes_no_difference(picker):
    alike = [worker(f"w{number}") for number in range(6)]

    def draws(listed):
        strategy = Strategy.of("s", StrategySpec(weights={"queue": 1}, picker=picker))
        fleet, rng = FleetModel(view(*listed)), Random(1)
        return [decide(need(), fleet, strategy, rng, NOW_S).candidates for _ in range(20)]

    assert draws(alike) == draws(alike[::-1])


@given(fleets(), needs, strategies)
def test_every_score_lies_between_0_and_1_whatever_the_loads_say(workers, asked, strategy):
    told = decide(asked, FleetModel(view(*workers)), strategy, Random(1), NOW_S).explain()
    for row in told.candidates:
        for score in (*row.scores.values(), row.total):
            assert math.isfinite(score)
            assert 0 <= score <= 1 + 1e-9


@given(fleets(), needs, strategies, st.integers())
def test_a_cache_over_the_ceiling_loses_to_any_below_it(workers, asked, strategy, seed):
    decision = decide(asked, FleetModel(view(*workers)), strategy, Random(seed), NOW_S)
    over = {row.worker: row.over_kv_ceiling for row in decision.explain().candidates}
    if isinstance(decision, Chosen) and not all(over.values()):
        assert not over[decision.pick]
        flags = [over[name] for name in decision.candidates]
        assert flags == sorted(flags)


@given(fleets(), needs, strategies, st.integers(1, 10**6))
def test_another_lease_never_raises_the_score_of_the_worker_it_is_on(workers, asked, strategy, tokens):
    def scores(fleet):
        rows = decide(asked, fleet, strategy, Random(1), NOW_S).explain().candidates
        return {row.worker: row.scores for row in rows}

    fleet = FleetModel(view(*workers))
    before = scores(fleet)
    for name in before:
        fleet = FleetModel(view(*workers))
        fleet.took(name, tokens)
        for scorer, score in scores(fleet).get(name, {}).items():
            assert score <= before[name][scorer] + 1e-9


@given(fleets(), needs)
def test_a_decision_changes_nothing_that_the_next_one_sees(workers, asked):
    fleet = FleetModel(view(*workers))
    first, second = (decide(asked, fleet, BATCH, Random(1), NOW_S) for _ in range(2))
    assert first == second
