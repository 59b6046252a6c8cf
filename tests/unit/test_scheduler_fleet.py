"""The fleet model: what a view says, kept current by this dispatcher's own leases."""

import math

import numpy as np
import pytest

from dispatcher.scheduler.fleet import FleetModel
from tests.fleets import NOW_S, idle_load, load, view, worker
from workers.breaker import BreakerState


def test_a_lease_taken_counts_at_once_and_a_lease_given_back_undoes_it():
    fleet = FleetModel(view(worker(leases=2, leases_since_sample=1, tokens_since_sample=50)))
    fleet.took("a:1", 100)
    assert (fleet.leases[0], fleet.waiting_now[0], fleet.tokens_since[0]) == (3, 2, 150)
    fleet.gave_back("a:1", 100)
    assert (fleet.leases[0], fleet.waiting_now[0], fleet.tokens_since[0]) == (2, 1, 50)
    assert fleet.leases_total == 2


def test_a_lease_that_the_sample_had_counted_stays_in_the_sample_when_it_ends():
    fleet = FleetModel(view(worker(leases=2, leases_since_sample=1, tokens_since_sample=50)))
    fleet.gave_back("a:1", 100, granted_s=NOW_S - 5)
    assert (fleet.leases[0], fleet.waiting_now[0], fleet.tokens_since[0]) == (1, 1, 50)


def test_no_count_falls_below_nothing():
    fleet = FleetModel(view(worker()))
    fleet.gave_back("a:1", 100)
    assert (fleet.leases[0], fleet.leases_since[0], fleet.tokens_since[0], fleet.leases_total) == (0, 0, 0, 0)


def test_changes_to_a_worker_that_the_view_lacks_change_nothing():
    fleet = FleetModel(view(worker()))
    fleet.took("gone:1", 5)
    fleet.gave_back("gone:1", 5)
    fleet.deferred("gone:1", NOW_S + 5)
    fleet.refused("gone:1", "full", None)
    assert fleet.leases_total == 0
    assert fleet.refusals == {}


def test_a_deferral_is_never_shortened():
    fleet = FleetModel(view(worker(deferred_until=NOW_S + 60)))
    fleet.deferred("a:1", NOW_S + 5)
    assert fleet.deferred_until[0] == NOW_S + 60


def test_a_refusal_of_unknown_length_ends_when_a_lease_is_given_back():
    fleet = FleetModel(view(worker(leases=1)))
    fleet.refused("a:1", "full", 0.0)
    assert fleet.refused_until[0] == math.inf
    fleet.gave_back("a:1", 10)
    assert fleet.refused_until[0] == 0
    assert fleet.refusals == {}


def test_a_refusal_until_a_known_time_outlasts_a_lease_given_back():
    fleet = FleetModel(view(worker(leases=1)))
    fleet.refused("a:1", "breaker open", NOW_S + 3)
    fleet.gave_back("a:1", 10)
    assert fleet.refused_until[0] == NOW_S + 3
    assert fleet.refusals == {"a:1": "breaker open"}


def test_a_worker_that_names_the_model_is_preferred_to_one_that_names_none():
    fleet = FleetModel(view(worker("a:1"), worker("b:1", models=frozenset())))
    assert fleet.serving("llama").tolist() == [True, False]
    assert fleet.serving("mistral").tolist() == [False, True]
    assert fleet.serving(None) is None


def test_loads_are_believed_fully_while_fresh_and_ever_less_until_they_are_dead():
    ages = {"a": 3.0, "b": 6.5, "c": 10.0, "d": 99.0}
    fleet = FleetModel(
        view(*(worker(name, load=idle_load(sampled_at=NOW_S - age)) for name, age in ages.items()))
    )
    assert np.allclose(fleet.freshness(NOW_S), [1, 0.5, 0, 0])


def test_a_load_never_read_is_believed_not_at_all():
    fleet = FleetModel(view(worker("a", load=None), worker("b", load=idle_load(sampled_at=NOW_S - 5))))
    assert fleet.freshness(NOW_S)[0] == 0


def test_nothing_fades_before_the_oldest_load_is_stale():
    fleet = FleetModel(view(worker("a", load=None), worker("b")))
    assert fleet.freshness(NOW_S) is None
    assert fleet.freshness(NOW_S + 5) is not None


def test_requests_that_wait_with_unknown_tokens_are_kept_apart_from_tokens_that_wait():
    fleet = FleetModel(
        view(
            worker("a", load=load(waiting=3)),
            worker("b", load=load(waiting=3, waiting_uncached_tokens=700)),
            worker("c", load=load()),
        )
    )
    assert fleet.queued_tokens.tolist()[:2] == [0, 700]
    assert fleet.queued_unsized.tolist()[:2] == [3, 0]
    assert math.isnan(fleet.queued_tokens[2])


def test_an_unknown_capacity_is_the_median_of_the_known_and_a_rate_of_nothing_is_unknown():
    rates = {"a": 100, "b": 300, "c": None, "d": 0}
    fleet = FleetModel(view(*(worker(name, load=load(capacity_rate=rate)) for name, rate in rates.items())))
    assert fleet.capacity_rate.tolist() == [100, 300, 200, 200]


def test_an_open_breaker_counts_until_it_may_be_tried_and_another_does_not():
    fleet = FleetModel(
        view(
            worker("a", breaker=BreakerState.OPEN, breaker_open_until=NOW_S + 5),
            worker("b", breaker=BreakerState.HALF_OPEN, breaker_open_until=NOW_S - 5),
        )
    )
    assert fleet.breaker_until.tolist() == [NOW_S + 5, 0]


def test_ages_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="dead_after_s"):
        FleetModel(view(), stale_after_s=10, dead_after_s=3)


@pytest.mark.parametrize(
    ("state", "leases", "room"),
    [
        (BreakerState.CLOSED, 0, 16),
        (BreakerState.HALF_OPEN, 0, 1),
        (BreakerState.HALF_OPEN, 3, 1),
        (BreakerState.OPEN, 0, 1),
        (BreakerState.HALF_OPEN, 16, 0),
    ],
)
def test_a_worker_whose_breaker_is_not_closed_has_room_for_a_trial_and_no_more(state, leases, room):
    fleet = FleetModel(view(worker(breaker=state, leases=leases)))
    assert fleet.free_slots("a:1") == room
