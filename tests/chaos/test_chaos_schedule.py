"""Schedules of faults: sound enough for work to go on, of every kind, and the same for the same seed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.chaos.schedule import LONG, SHORT, Kind, Numbers, Role, schedule

NUMBERS = Numbers(engines=6, dispatchers=3, monitors=2)
SEEDS = st.integers(0, 2**32)
SCALES = st.sampled_from([LONG, SHORT])


@settings(max_examples=25)
@given(SEEDS, SCALES, st.builds(Numbers, st.integers(1, 6), st.integers(1, 3), st.integers(1, 3)))
def test_at_every_moment_somebody_of_each_role_is_left_alone(seed, scale, numbers):
    faults = schedule(Random(seed), scale, numbers, 120.0)
    for role in (Role.DISPATCHER, Role.MONITOR, Role.ENGINE):
        mine = [fault for fault in faults if fault.kind.role is role]
        for moment in (fault.at_s for fault in mine):
            befallen = {fault.whom for fault in mine if fault.at_s <= moment <= fault.end_s}
            assert len(befallen) <= numbers.of(role) - numbers.spared(role)


@settings(max_examples=25)
@given(SEEDS, SCALES)
def test_nobody_suffers_two_faults_at_once_and_each_rests_between_two(seed, scale):
    by_target = {}
    for fault in schedule(Random(seed), scale, NUMBERS, 120.0):
        by_target.setdefault((fault.kind.role, fault.whom), []).append(fault)
    for (role, _), faults in by_target.items():
        rest_s = {Role.REDIS: scale.redis_rest_s, Role.BATCH: scale.cancel_rest_s}.get(role, scale.settle_s)
        assert all(after.at_s - before.end_s >= rest_s for before, after in pairwise(faults))


@settings(max_examples=25)
@given(SEEDS, SCALES, st.floats(1.0, 200.0))
def test_all_faults_end_while_the_schedule_lasts_and_none_lasts_for_ever(seed, scale, lasts_s):
    faults = schedule(Random(seed), scale, NUMBERS, lasts_s)
    assert all(0 < fault.at_s <= fault.end_s <= lasts_s for fault in faults)
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    assert all(fault.whom < NUMBERS.of(fault.kind.role) for fault in faults)


def test_the_same_seed_gives_the_same_schedule_and_another_gives_another():
    first, again, other = (schedule(Random(seed), LONG, NUMBERS, 60.0) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("seed", range(5))
def test_ten_minutes_hold_every_kind_of_fault_and_hundreds_of_them(seed):
    kinds = Counter(fault.kind for fault in schedule(Random(seed), LONG, NUMBERS, 600.0))
    assert kinds.keys() == set(Kind)
    assert kinds.total() > 150
    assert min(kinds.values()) >= 3


@pytest.mark.parametrize("seed", range(5))
def test_dispatchers_are_stopped_for_longer_than_their_claims_last(seed):
    stops = [
        fault.for_s
        for fault in schedule(Random(seed), LONG, NUMBERS, 600.0)
        if fault.kind is Kind.DISPATCHER_STOP
    ]
    assert max(stops) == LONG.stop_s[1] == 30.0


def test_only_a_redis_that_loses_loses_and_no_more_than_a_second():
    faults = schedule(Random(3), LONG, NUMBERS, 600.0)
    assert all((fault.lost_s > 0) == (fault.kind is Kind.REDIS_LOSE) for fault in faults)
    assert max(fault.lost_s for fault in faults) <= 1.0
