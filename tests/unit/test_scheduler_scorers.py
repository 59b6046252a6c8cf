"""Each scorer's formula, and how unknown and old scores are made whole."""

import math

import numpy as np
import pytest

from dispatcher.scheduler import scorers
from dispatcher.scheduler.fleet import FleetModel
from dispatcher.scheduler.question import Need, Question
from tests.fleets import NOW_S, idle_load, load, view, worker


def question(*workers, cost_tokens=1_000, session_key=None, prefix_key=None):
    fleet = FleetModel(view(*workers))
    need = Need("llama", 100, 100, cost_tokens, session_key=session_key, prefix_key=prefix_key)
    return Question(need, fleet, NOW_S, np.ones(len(fleet), dtype=bool))


def test_a_queue_that_takes_five_seconds_to_drain_scores_one_half():
    asked = question(worker(load=idle_load(waiting=8, drain_rate=2.0), leases_since_sample=2))
    assert scorers.queue(asked).tolist() == [0.5]


@pytest.mark.parametrize("drain_rate", [None, 0.0])
def test_without_a_drain_rate_a_queue_is_measured_by_the_limit(drain_rate):
    asked = question(worker(load=load(waiting=3, drain_rate=drain_rate), leases_since_sample=1, limit=16))
    assert scorers.queue(asked).tolist() == [0.75]


def test_a_queue_of_unknown_length_has_an_unknown_score():
    assert math.isnan(scorers.queue(question(worker(load=load(drain_rate=1.0))))[0])


def test_cache_use_is_the_fullest_ranks_with_what_was_leased_since():
    full = load(kv_usage_mean=0.1, kv_usage_max=0.5, capacity_tokens=10_000)
    asked = question(worker(load=full, tokens_since_sample=2_000))
    assert scorers.kv(asked)[0] == pytest.approx(0.3)


def test_cache_use_of_one_rank_only_is_its_mean_and_of_unknown_capacity_is_not_corrected():
    asked = question(worker(load=load(kv_usage_mean=0.25), tokens_since_sample=2_000))
    assert scorers.kv(asked)[0] == pytest.approx(0.75)


def test_leases_count_against_the_limit_even_when_the_limit_has_shrunk_below_them():
    assert scorers.inflight(question(worker("a", leases=4), worker("b", leases=99))).tolist() == [0.75, 0]


def test_work_for_five_seconds_scores_one_half():
    busy = idle_load(waiting=9, waiting_uncached_tokens=2_000, capacity_rate=1_000)
    asked = question(worker(load=busy, tokens_since_sample=2_000), cost_tokens=1_000)
    assert scorers.load(asked).tolist() == [0.5]


def test_waiting_requests_of_unknown_size_count_as_much_as_this_one():
    asked = question(worker(load=idle_load(waiting=4, capacity_rate=1_000)), cost_tokens=1_000)
    assert scorers.load(asked).tolist() == [0.5]


def test_a_momentary_throughput_is_no_capacity():
    asked = question(worker("a", load=load(waiting=0, gen_throughput=9_000)))
    assert math.isnan(scorers.load(asked)[0])


def test_weight_is_measured_by_the_largest():
    assert scorers.weight(question(worker("a", weight=1), worker("b", weight=4))).tolist() == [0.25, 1]


def test_without_a_key_a_session_is_unknown_for_all():
    assert scorers.session(question(worker())) is None


def test_a_prefix_key_stands_in_for_a_session_key():
    fleet = [worker(f"w{number}") for number in range(8)]
    by_prefix = scorers.session(question(*fleet, prefix_key="k"))
    by_session = scorers.session(question(*fleet, session_key="k", prefix_key="other"))
    assert by_prefix.tolist() == by_session.tolist()
    assert sorted(by_prefix) == [0] * 7 + [1]


def home(workers, key):
    return int(scorers.session(question(*workers, session_key=key)).argmax())


def test_removing_one_of_n_workers_moves_that_workers_sessions_only_and_spreads_them():
    workers = [worker(f"w{number:02}", limit=10_000) for number in range(10)]
    before = [home(workers, f"user-{number}") for number in range(2_000)]
    after = [home(workers[:-1], f"user-{number}") for number in range(2_000)]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert len(moved) == before.count(9)
    assert len(moved) == pytest.approx(200, rel=0.25)
    assert max(moved.count(place) for place in range(9)) < 2 * len(moved) / 9


def test_no_worker_takes_more_sessions_than_its_bound_and_a_key_that_is_hot_overflows():
    fleet = FleetModel(view(*(worker(f"w{number}", limit=100) for number in range(5))))
    need = Need("llama", 1, 1, 1, session_key="everybody's")
    for count in range(1, 201):
        asked = Question(need, fleet, NOW_S, np.ones(5, dtype=bool))
        fleet.took(fleet.ids[int(scorers.session(asked).argmax())], 1)
        assert fleet.leases.max() <= math.ceil(1.25 * count / 5)
    assert (fleet.leases > 0).sum() >= 4


def test_a_session_belongs_to_a_candidate():
    asked = question(*(worker(f"w{number}") for number in range(4)), session_key="k")
    asked.candidates[int(scorers.session(asked).argmax())] = False
    assert asked.candidates[int(scorers.session(asked).argmax())]


def test_an_unknown_score_is_the_candidates_median():
    asked = question(*(worker(f"w{number}") for number in range(5)))
    column = np.array([0.1, 0.2, 0.9, math.nan, 0.0])
    assert scorers.settled(column, asked, None).tolist() == [0.1, 0.2, 0.9, pytest.approx(0.15), 0.0]
    asked.candidates[4] = False
    assert scorers.settled(column, asked, None)[3] == 0.2


def test_when_nobodys_score_is_known_all_score_one_half():
    asked = question(worker("a"), worker("b"))
    assert scorers.settled(np.full(2, math.nan), asked, None).tolist() == [0.5, 0.5]


def test_an_old_score_lies_between_its_own_and_the_unknowns():
    asked = question(*(worker(f"w{number}") for number in range(4)))
    column = np.array([1.0, 0.4, 0.6, 0.0])
    fresh = np.array([0.5, 1.0, 1.0, 0.0])
    assert np.allclose(scorers.settled(column, asked, fresh), [0.8, 0.4, 0.6, 0.6])
