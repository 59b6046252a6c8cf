"""The adaptive limit: its rule, its bounds, and where it ends on engines whose slots nobody told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.limiting import Limiter
from tests.monitored import make_load, make_view
from workers.evidence import Evidence
from workers.limits import LimitInputs, LimitPolicy, Share, next_limit, queue_target

ALL = LimitPolicy()
SPARE = LimitPolicy(share=Share.SPARE, spare_fraction=0.5)


def inputs(**fields: Any) -> LimitInputs:
    """A worker with limit 16 whose leases press and that has room."""
    defaults: dict[str, Any] = {"limit": 16, "leases": 16, "running": 16, "waiting": 0, "kv_usage": 0.1}
    return LimitInputs(**{**defaults, **fields})


def limit(policy: LimitPolicy = ALL, **fields: Any) -> int:
    return next_limit(inputs(**fields), policy).value


def test_the_first_limit_is_what_the_engine_tells_else_the_configured_one() -> None:
    assert limit(limit=None, slots=64, told=True) == 64
    assert limit(limit=None, slots=64, told=False) == 4
    assert limit(LimitPolicy(initial=5), limit=None) == 5


def test_it_grows_by_half_until_the_worker_was_full_once_and_then_adds() -> None:
    assert limit() == 24
    assert limit(LimitPolicy(growth=2.0)) == 32
    assert limit(limit=1, leases=1, running=1) == 2
    assert limit(been_full=True) == 18


def test_it_does_not_grow_on_a_load_that_is_older_than_the_limit() -> None:
    assert limit(settled=False) == 16
    assert limit(settled=False, been_full=True) == 16
    assert limit(settled=False, limit=40, leases=40, waiting=24, over=2) == 18


def test_leases_that_the_load_does_not_show_are_no_reason_for_a_large_step() -> None:
    assert limit(running=9) == 18


def test_at_the_slots_it_was_full_with_it_grows_by_one() -> None:
    assert limit(limit=128, leases=128, running=128, slots=120, been_full=True) == 129
    assert limit(limit=64, leases=64, running=64, slots=120, been_full=True) == 72


def test_it_holds_while_leases_do_not_press() -> None:
    assert limit(leases=14) == 16
    assert limit(leases=15, running=15) == 24


def test_it_holds_while_a_few_wait() -> None:
    assert queue_target(16) == 2
    assert limit(waiting=1) == 16
    assert limit(waiting=2, over=0) == 16


def test_it_shrinks_to_what_runs_when_too_many_wait_for_two_samples() -> None:
    assert limit(running=4, waiting=12, over=1) == 16
    assert limit(running=4, waiting=12, over=2) == 5


def test_it_holds_while_leases_above_it_run_out() -> None:
    assert limit(limit=5, leases=12, running=4, waiting=8, over=3) == 5


def test_it_goes_on_shrinking_when_others_fill_the_queue() -> None:
    assert limit(limit=16, leases=16, running=32, waiting=20, over=3) == 14


def test_it_shrinks_to_what_runs_when_memory_passes_the_ceiling() -> None:
    assert limit(running=9, kv_usage=0.95) == 9
    assert limit(running=20, kv_usage=0.95) == 16


def test_unknown_memory_is_not_full_memory() -> None:
    assert limit(kv_usage=None) == 24


@pytest.mark.parametrize("unknown", ["running", "waiting"])
def test_it_holds_when_the_worker_does_not_say(unknown: str) -> None:
    assert limit(**{unknown: None}) == 16


@pytest.mark.parametrize("unknown", ["running", "waiting"])
def test_a_cut_limit_of_a_worker_that_does_not_say_comes_back_gently(unknown: str) -> None:
    cut = {unknown: None, "limit": 2, "leases": 2, "unchanged_s": 10.0}
    assert limit(**cut) == 3
    assert limit(**{**cut, "unchanged_s": 9.0}) == 2
    assert limit(**{**cut, "leases": 1}) == 2
    assert limit(**{**cut, "kv_usage": 0.95}) == 2
    assert limit(**{**cut, "waiting": 1, "running": None}) == 2


def test_it_comes_back_to_what_was_told_else_to_the_usual_first_limit_and_no_further() -> None:
    blind = {"running": None, "waiting": None, "unchanged_s": 60.0}
    assert limit(**blind, limit=15, leases=15) == 16
    assert limit(**blind, limit=16, leases=16) == 16
    assert limit(**blind, limit=40, leases=40) == 40
    assert limit(**blind, limit=39, leases=39, slots=40, told=True) == 40
    assert limit(**blind, limit=40, leases=40, slots=40, told=True) == 40
    assert limit(**blind, limit=4, leases=4, slots=4, told=True) == 4


def test_it_comes_back_at_once_to_what_was_proven_after_a_cut() -> None:
    assert limit(limit=8, leases=16, running=16, been_full=True) == 17


def test_spare_leaves_the_rest_of_the_fraction_to_others() -> None:
    assert limit(SPARE, slots=40, told=True, others=5, waiting=0) == 15
    assert limit(SPARE, slots=40, told=True, others=30, waiting=0) == 1


def test_spare_keeps_free_by_how_much_others_may_become_more() -> None:
    nearly_all = LimitPolicy(share=Share.SPARE, spare_fraction=0.95)
    assert limit(nearly_all, limit=100, slots=100, told=True, others=0) == 95
    assert limit(nearly_all, limit=100, slots=100, told=True, others=25) == 65


def test_spare_yields_at_once_when_others_would_queue() -> None:
    assert limit(SPARE, others=4, running=20, waiting=6) == 10


def test_spare_counts_memory_by_its_fraction() -> None:
    assert limit(SPARE, running=9, kv_usage=0.6) == 9


COUNT = st.one_of(st.none(), st.integers(min_value=0, max_value=10_000))
ANY = st.builds(
    LimitInputs,
    limit=st.one_of(st.none(), st.integers(min_value=1, max_value=10_000)),
    leases=st.integers(min_value=0, max_value=10_000),
    running=COUNT,
    waiting=COUNT,
    kv_usage=st.one_of(st.none(), st.floats(min_value=0, max_value=2)),
    others=st.integers(min_value=0, max_value=10_000),
    slots=st.one_of(st.none(), st.integers(min_value=1, max_value=10_000)),
    told=st.booleans(),
    been_full=st.booleans(),
    over=st.integers(min_value=0, max_value=5),
    unchanged_s=st.floats(min_value=0, max_value=60),
)
POLICY = st.builds(
    LimitPolicy,
    share=st.sampled_from(Share),
    spare_fraction=st.floats(min_value=0.01, max_value=1),
    kv_ceiling=st.floats(min_value=0.01, max_value=1),
    initial=st.integers(min_value=1, max_value=500),
)


@given(ANY, POLICY)
def test_it_is_never_below_1_nor_above_what_the_engine_tells(
    given_: LimitInputs, policy: LimitPolicy
) -> None:
    decision = next_limit(given_, policy)
    assert decision.value >= 1
    assert decision.reason
    if given_.told and given_.slots is not None:
        assert decision.value <= given_.slots + queue_target(given_.slots)


@given(ANY, POLICY)
def test_one_step_never_more_than_doubles(given_: LimitInputs, policy: LimitPolicy) -> None:
    if given_.limit is not None:
        room = max(2 * given_.limit, given_.leases + given_.limit)
        assert next_limit(given_, policy).value <= room


@given(ANY, POLICY)
def test_the_same_worker_gets_the_same_limit(given_: LimitInputs, policy: LimitPolicy) -> None:
    assert next_limit(given_, policy) == next_limit(given_, policy)


@given(ANY, POLICY)
def test_it_never_grows_while_something_waits(given_: LimitInputs, policy: LimitPolicy) -> None:
    if given_.limit is not None and given_.waiting:
        assert next_limit(given_, policy).value <= given_.limit


def drive(slots: int, polls: int, policy: LimitPolicy = ALL, others: int = 0, start: int = 4) -> list[int]:
    """The limits of an engine with ``slots``, fed by a batch without end, poll after poll.

    Others' requests come before ours; what does not run, waits.
    """
    limiter, value, version, limits = Limiter(policy), start, 1, []
    leases = 0
    for _ in range(polls):
        # One request in eight ends between two polls; the dispatcher fills up to the limit.
        leases = max(leases - leases // 8, min(leases, value))
        leases = max(leases, value)
        total = leases + others
        load = make_load(running=min(slots, total), waiting=max(0, total - slots), kv_usage_max=0.3)
        view = make_view(limit=value, leases=leases, limit_version=version)
        decision = limiter.decide(view, load)
        if decision.value < leases:
            leases -= max(1, leases // 8)
        if decision.value != value:
            value, version = decision.value, version + 1
        limits.append(value)
    return limits


@pytest.mark.parametrize("slots", [1, 4, 32, 100, 256])
def test_a_batch_without_end_finds_the_slots_that_nobody_told(slots: int) -> None:
    limits = drive(slots, polls=40)
    assert all(slots <= value <= slots + queue_target(slots) + 1 for value in limits[-10:]), limits


@pytest.mark.parametrize(("slots", "polls"), [(4, 4), (8, 3), (32, 9), (256, 14)])
def test_it_is_there_within_a_few_polls(slots: int, polls: int) -> None:
    assert slots <= drive(slots, polls)[-1] <= slots + queue_target(slots) + 1


def test_spare_makes_room_for_others() -> None:
    limits = drive(32, polls=60, policy=LimitPolicy(share=Share.SPARE, spare_fraction=0.75), others=16)
    assert limits[-1] <= 16


class TestLimiter:
    def test_a_registered_limit_gives_way_to_what_the_engine_tells(self) -> None:
        decision = Limiter(ALL).decide(make_view(limit_version=1), make_load(max_running=200))
        assert decision.value == 200

    def test_a_limit_adapted_before_is_not_started_over(self) -> None:
        decision = Limiter(ALL).decide(make_view(limit=40, limit_version=7), make_load(max_running=200))
        assert decision.value == 40

    def test_a_worker_that_tells_nothing_keeps_the_limit_of_its_registration(self) -> None:
        assert Limiter(ALL).decide(make_view(), make_load(waiting=0)).value == 16

    def test_a_queue_of_one_moment_does_not_end_the_growth(self) -> None:
        limiter = Limiter(ALL)
        view = make_view(leases=16, limit_version=2)
        assert limiter.decide(view, make_load(running=4, waiting=12)).value == 16
        assert limiter.hurries
        assert limiter.decide(view, make_load(running=16, waiting=0)).value == 24

    def test_a_load_sampled_before_the_limit_was_set_is_no_reason_to_grow(self) -> None:
        limiter, load = Limiter(ALL), make_load(running=16, waiting=0, sampled_at=1000.0)
        view = make_view(leases=16, limit_version=2, limit_since=1000.5)
        assert limiter.decide(view, load).value == 16
        newer = load.model_copy(update={"sampled_at": 1001.0})
        assert limiter.decide(view, newer).value == 24

    def test_it_hurries_until_the_slots_are_known(self) -> None:
        view = make_view(leases=16, limit_version=2)
        limiter = Limiter(ALL)
        for _ in range(2):
            assert limiter.hurries
            limiter.decide(view, make_load(running=8, waiting=8))
        assert not limiter.hurries
        told = Limiter(ALL)
        told.decide(view, make_load(running=8, waiting=0, max_running=8))
        assert not told.hurries
        assert Limiter(SPARE).hurries

    def test_a_limit_cut_by_somebody_else_ends_the_large_steps(self) -> None:
        limiter = Limiter(ALL)
        load = make_load(running=16, waiting=0)
        assert limiter.decide(make_view(leases=16, limit_version=2), load).value == 24
        cut = make_view(leases=16, limit=16, limit_version=4)
        assert limiter.decide(cut, load).value == 18

    def test_a_limit_nobody_can_see_to_comes_back_when_it_has_stood_for_a_while(self) -> None:
        cut = {"limit": 2, "leases": 2, "limit_version": 3, "limit_since": 940.0}
        assert Limiter(ALL).decide_blind(make_view(**cut), 1000.0).value == 3
        assert Limiter(ALL).decide(make_view(**cut), make_load(running=2)).value == 3
        assert Limiter(ALL).decide_blind(make_view(**cut), 945.0).value == 2
        assert Limiter(ALL).decide_blind(make_view(**cut, max_running=2), 1000.0).value == 2

    def test_without_loads_it_grows_by_what_answers_show_where_no_slots_are_known(self) -> None:
        shown = {"limit": 16, "leases": 16, "evidence": Evidence(32, 3200, 64.0, 512)}
        assert Limiter(ALL).decide_blind(make_view(**shown), 1000.0).value == 24
        assert Limiter(ALL).decide(make_view(**shown), make_load()).value == 24
        assert Limiter(ALL).decide_blind(make_view(**shown, max_running=16), 1000.0).value == 16
        assert Limiter(SPARE).decide_blind(make_view(**shown), 1000.0).value == 16
        low = {**shown, "limit": 8, "leases": 8, "limit_since": 999.0}
        assert Limiter(ALL).decide_blind(make_view(**low), 1000.0).value == 8

    def test_a_refusal_ends_what_answers_showed(self) -> None:
        limiter = Limiter(ALL)
        shown = {"leases": 40, "evidence": Evidence(70, 7000, 100.0, 2800)}
        assert limiter.decide_blind(make_view(**shown, limit=40, limit_version=1), 1000.0).value == 60
        assert limiter.decide_blind(make_view(**shown, limit=30, limit_version=4), 1001.0).value == 30
        anew = limiter.decide_blind(make_view(**shown, limit=30, limit_version=4), 1062.0)
        assert (anew.value, anew.anew) == (30, True)
        assert limiter.decide_blind(make_view(**shown, limit=30, limit_version=5), 1063.0).value == 45

    def test_answers_count_only_where_loads_have_been_missing_for_a_while(self) -> None:
        shown = {"limit": 16, "leases": 16, "evidence": Evidence(32, 3200, 64.0, 512)}
        known = make_view(**shown, load=make_load(running=16, waiting=0))
        assert Limiter(ALL).decide_blind(known, 1005.0).value == 16
        assert Limiter(ALL).decide_blind(known, 1010.0).value == 24

    def test_one_load_that_could_not_be_read_is_no_reason_to_grow(self) -> None:
        cut = make_view(limit=2, leases=2, limit_since=940.0, load=make_load(received_at=999.0))
        assert Limiter(ALL).decide_blind(cut, 1000.0).value == 2
        assert Limiter(ALL).decide_blind(cut, 1009.0).value == 3

    def test_without_loads_it_comes_back_to_the_slots_that_were_told_or_learned(self) -> None:
        known = make_view(limit=3, leases=3, load=make_load(max_running=3))
        assert Limiter(ALL).decide_blind(known, 2000.0).value == 3
        limiter = Limiter(ALL)
        for _ in range(2):
            limiter.decide(make_view(leases=16, limit_version=2), make_load(running=4, waiting=12))
        assert limiter.decide_blind(make_view(limit=4, leases=4), 2000.0).value == 4

    def test_a_cut_is_noted_whether_or_not_the_load_was_known_meanwhile(self) -> None:
        cut, load = make_view(limit=4, leases=4, limit_version=4), make_load(running=4, waiting=0)
        before = Limiter(ALL)
        before.decide_blind(make_view(limit=8, leases=8, limit_version=2), 2000.0)
        assert before.decide(cut, load).value == 5
        meanwhile = Limiter(ALL)
        meanwhile.decide(make_view(limit=8, limit_version=2), make_load(running=0, waiting=0))
        meanwhile.decide_blind(cut, 1005.0)
        assert meanwhile.decide(cut, load).value == 5
        assert Limiter(ALL).decide(cut, load).value == 6

    def test_requests_sent_after_the_count_of_leases_are_not_somebody_elses(self) -> None:
        limiter = Limiter(LimitPolicy(share=Share.SPARE))
        limiter.decide(make_view(limit=32, leases=16, limit_version=3), make_load(running=16, waiting=0))
        echo = make_view(limit=32, leases=16, limit_version=3)
        assert limiter.decide(echo, make_load(running=32, waiting=0)).value == 32
