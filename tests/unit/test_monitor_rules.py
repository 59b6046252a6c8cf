"""The monitor's small rules: stalls, new lives, readiness over time, who watches whom."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitor.lifecycle import Lifecycle
from monitor.ownership import owned, owner
from monitor.readiness import Readiness
from monitor.rebirth import Identity
from monitor.stall import PREFILL_PATIENCE, StallWatch
from tests.monitored import make_load
from workers.fleet import WorkerState
from workers.load import LoadSource


class TestStall:
    def test_work_without_a_token_for_the_whole_time_is_a_stall(self) -> None:
        watch = StallWatch(60.0)
        load = make_load(running=1, waiting=0, generation_tokens_total=100)
        assert not watch.add(load, live=True, leases=0, now_s=0.0)
        assert not watch.add(load, live=True, leases=0, now_s=59.0)
        assert watch.add(load, live=True, leases=0, now_s=60.0)

    def test_every_token_starts_the_time_anew(self) -> None:
        watch = StallWatch(60.0)
        for second in range(0, 300, 50):
            load = make_load(running=1, generation_tokens_total=second)
            assert not watch.add(load, live=True, leases=0, now_s=float(second))

    def test_an_idle_worker_is_never_stalled_and_new_work_gets_its_time(self) -> None:
        watch = StallWatch(60.0)
        idle = make_load(running=0, waiting=0, generation_tokens_total=100)
        busy = make_load(running=1, waiting=0, generation_tokens_total=100)
        assert not watch.add(idle, live=True, leases=0, now_s=0.0)
        assert not watch.add(idle, live=True, leases=0, now_s=500.0)
        assert not watch.add(busy, live=True, leases=0, now_s=501.0)
        assert watch.add(busy, live=True, leases=0, now_s=561.0)

    def test_leases_are_work_even_when_the_worker_knows_of_none(self) -> None:
        watch = StallWatch(60.0)
        load = make_load(running=0, waiting=0, generation_tokens_total=4)
        assert not watch.add(load, live=True, leases=1, now_s=0.0)
        assert watch.add(load, live=True, leases=1, now_s=60.0)

    def test_a_long_prefill_that_fills_memory_gets_more_time_but_not_for_ever(self) -> None:
        watch = StallWatch(60.0)
        stalled_at = None
        for second in range(0, 400, 10):
            load = make_load(running=1, generation_tokens_total=100, kv_usage_mean=second / 1000)
            if watch.add(load, live=True, leases=0, now_s=float(second)):
                stalled_at = second
                break
        assert stalled_at == PREFILL_PATIENCE * 60

    @pytest.mark.parametrize(
        "counters",
        [{}, {"success_total": 4}, {"generation_tokens_total": 100, "prompt_tokens_total": 9}],
        ids=lambda counters: " ".join(counters) or "none",
    )
    def test_where_counters_move_only_when_a_request_ends_memory_that_stirs_is_progress(
        self, counters: dict[str, int]
    ) -> None:
        watch = StallWatch(60.0)
        for second in range(0, 1000, 50):
            load = make_load(running=1, used_tokens=second, **counters)
            assert not watch.add(load, live=False, leases=0, now_s=float(second))
        assert watch.add(
            make_load(running=1, used_tokens=950, **counters), live=False, leases=0, now_s=1100.0
        )

    @pytest.mark.parametrize(
        "ended",
        [
            {"success_total": 4},
            {"generation_tokens_total": 100, "prompt_tokens_total": 9},
            {"success_total": 4, "waiting_uncached_tokens": 7},
        ],
        ids=" ".join,
    )
    def test_a_counter_of_requests_that_ended_is_alone_no_evidence(self, ended: dict[str, int]) -> None:
        watch = StallWatch(60.0)
        load = make_load(running=4, waiting=0, **ended)
        assert not watch.add(load, live=False, leases=4, now_s=0.0)
        assert not watch.add(load, live=False, leases=4, now_s=10_000.0)

    def test_steps_are_progress_while_no_request_ends_and_evidence_when_they_stop(self) -> None:
        watch = StallWatch(60.0)
        for second in range(0, 1000, 50):
            load = make_load(running=4, generation_tokens_total=100, steps_total=second)
            assert not watch.add(load, live=False, leases=4, now_s=float(second))
        assert not watch.add(load, live=False, leases=4, now_s=1009.0)
        assert watch.add(load, live=False, leases=4, now_s=1010.0)

    def test_an_engine_that_tells_no_tokens_where_others_do_is_judged_by_its_memory(self) -> None:
        watch = StallWatch(60.0)
        for second in range(0, 500, 50):
            load = make_load(running=1, prompt_tokens_total=9, used_tokens=second)
            assert not watch.add(load, live=True, leases=0, now_s=float(second))

    def test_a_worker_without_any_evidence_is_never_stalled(self) -> None:
        watch = StallWatch(60.0)
        load = make_load(running=5, waiting=5)
        assert not watch.add(load, live=True, leases=5, now_s=0.0)
        assert not watch.add(load, live=True, leases=5, now_s=10_000.0)

    def test_a_tripped_worker_gets_the_whole_time_again(self) -> None:
        watch = StallWatch(60.0)
        load = make_load(running=1, generation_tokens_total=1)
        watch.add(load, live=True, leases=0, now_s=0.0)
        assert watch.add(load, live=True, leases=0, now_s=60.0)
        watch.forgive()
        assert not watch.add(load, live=True, leases=0, now_s=61.0)
        assert watch.add(load, live=True, leases=0, now_s=121.0)


class TestRebirth:
    @pytest.mark.parametrize(
        ("before", "after", "sign"),
        [
            ({"process_start_time": 100.0}, {"process_start_time": 900.0}, "process start time"),
            ({"generation_tokens_total": 10}, {"generation_tokens_total": 9}, "generation_tokens_total"),
            ({"prompt_tokens_total": 10}, {"prompt_tokens_total": 9}, "prompt_tokens_total"),
            ({"success_total": 10}, {"success_total": 0}, "success_total"),
            ({"version": "0.5.8"}, {"version": "0.5.9"}, "from 0.5.8 to 0.5.9"),
        ],
    )
    def test_what_no_running_engine_does_is_a_new_life(
        self, before: dict[str, object], after: dict[str, object], sign: str
    ) -> None:
        reason = Identity(make_load(**before)).meet(make_load(**after))
        assert reason is not None
        assert sign in reason

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ({"success_total": 10}, {"success_total": 11}),
            ({"success_total": 10}, {"success_total": None}),
            ({"process_start_time": 100.2}, {"process_start_time": 100.9}),
            ({"success_total": 10}, {"success_total": 3, "source": LoadSource.NATIVE}),
        ],
    )
    def test_what_one_engine_may_do_is_not(self, before: dict[str, object], after: dict[str, object]) -> None:
        assert Identity(make_load(**before)).meet(make_load(**after)) is None

    def test_a_load_is_compared_with_the_last_one_of_its_own_source(self) -> None:
        identity = Identity(make_load(version="0.5.23", source=LoadSource.NATIVE))
        assert identity.meet(make_load(success_total=10)) is None
        assert identity.meet(make_load(version="0.32.0", source=LoadSource.NATIVE)) is not None

    def test_nothing_is_known_of_a_first_load(self) -> None:
        identity = Identity()
        assert identity.meet(make_load(success_total=10)) is None
        assert identity.meet(make_load(success_total=9)) is not None

    def test_a_told_version_that_changed_is_a_new_life_and_silence_is_not(self) -> None:
        identity = Identity(version="1")
        assert identity.meet_version(None) is None
        assert identity.meet_version("1") is None
        assert identity.meet_version("2") == "its version changed from 1 to 2"


READY = Readiness(ready=True, reason="")
FAILED = Readiness(ready=False, reason="")
SLOW = Readiness(ready=None, reason="")


class TestLifecycle:
    def test_a_worker_that_answers_is_ready_whatever_it_was(self) -> None:
        for state in (WorkerState.STARTING, WorkerState.UNREADY, WorkerState.READY):
            assert Lifecycle(10.0, 2).next_state(state, READY, 0.0) is WorkerState.READY

    def test_a_ready_worker_is_unready_after_enough_failures_in_a_row(self) -> None:
        life = Lifecycle(10.0, 2)
        assert life.next_state(WorkerState.READY, FAILED, 0.0) is WorkerState.READY
        assert life.next_state(WorkerState.READY, READY, 1.0) is WorkerState.READY
        assert life.next_state(WorkerState.READY, FAILED, 2.0) is WorkerState.READY
        assert life.next_state(WorkerState.READY, FAILED, 3.0) is WorkerState.UNREADY

    def test_a_slow_answer_is_no_failure(self) -> None:
        life = Lifecycle(10.0, 1)
        assert life.next_state(WorkerState.READY, SLOW, 0.0) is WorkerState.READY
        assert life.next_state(WorkerState.STARTING, SLOW, 0.0) is WorkerState.STARTING

    @pytest.mark.parametrize("state", [WorkerState.DRAINING, WorkerState.GONE])
    def test_what_a_person_decided_stays(self, state: WorkerState) -> None:
        assert Lifecycle(10.0, 1).next_state(state, READY, 0.0) is state

    def test_a_ready_worker_is_looked_at_now_and_then_and_others_always(self) -> None:
        life = Lifecycle(10.0, 2)
        assert life.due(WorkerState.READY, 0.0)
        life.next_state(WorkerState.READY, READY, 0.0)
        assert not life.due(WorkerState.READY, 9.0)
        assert life.due(WorkerState.STARTING, 9.0)
        assert life.due(WorkerState.READY, 10.0)

    def test_a_failure_elsewhere_brings_the_next_look_forward(self) -> None:
        life = Lifecycle(10.0, 2)
        life.next_state(WorkerState.READY, READY, 0.0)
        life.look_soon()
        assert life.due(WorkerState.READY, 1.0)


NAMES = st.sets(st.text(min_size=1, max_size=8), min_size=1, max_size=6)
WORKERS = st.sets(st.text(min_size=1, max_size=8), max_size=30)


class TestOwnership:
    @given(WORKERS, NAMES)
    def test_every_worker_has_exactly_one_watcher(self, workers: set[str], monitors: set[str]) -> None:
        shares = [owned(workers, name, monitors) for name in monitors]
        assert sorted(worker for share in shares for worker in share) == sorted(workers)

    @given(WORKERS, NAMES, st.text(min_size=9, max_size=12))
    def test_only_the_workers_of_a_monitor_that_went_move(
        self, workers: set[str], monitors: set[str], gone: str
    ) -> None:
        before = {worker: owner(worker, monitors | {gone}) for worker in workers}
        after = {worker: owner(worker, monitors) for worker in workers}
        assert all(after[worker] == before[worker] for worker in workers if before[worker] != gone)

    def test_a_monitor_counts_itself_as_live(self) -> None:
        assert owned({"a", "b"}, "me", ()) == {"a", "b"}

    def test_nobody_watches_when_nobody_lives(self) -> None:
        assert owner("a", ()) is None

    def test_workers_are_spread(self) -> None:
        workers = [f"10.0.0.{number}:8000" for number in range(200)]
        sizes = [len(owned(workers, name, ("x", "y", "z"))) for name in ("x", "y", "z")]
        assert min(sizes) > 40
