"""What workers do to batches, beside what `test_dispatching` has of it; and second attempts at a batch's end.

The numbered cases are those of the table of live workers' behaviour that the dispatcher is built against.
"""

from __future__ import annotations

import pytest

from forebay.simulator.faults import (
    AlternateFault,
    AnswerFault,
    BrokenMetricsFault,
    HangFault,
    RefuseFault,
    ShutdownFault,
    SlowFault,
)
from tests.acceptance.conftest import row, rows
from workers.breaker import BreakerState
from workers.fleet import WorkerState
from workers.load import LoadSource
from workers.spec import WorkerSpec, worker_id

pytestmark = pytest.mark.acceptance


def names(count):
    return [f"c{number}" for number in range(count)]


def workers_of(results):
    return {line["forebay"]["worker"] for line in results.output}


def attempts_of(results):
    return [line["forebay"]["attempts"] for line in results.output]


async def complete(rig, lines, **how):
    """Run a batch of which every line gets its answer."""
    status, results = await rig.ended(await rig.submit(lines, **how))
    assert (status, results.errors) == ("completed", [])
    assert len(results.output) == len(lines)
    return results


# -- connections ---------------------------------------------------------------------------------------------


async def test_1_a_worker_that_closes_idle_connections_fails_no_request(rig):
    engine = await rig.engine(slots=8, keep_alive_s=0.05)
    rig.monitor()
    rig.dispatcher("d1")
    for _ in range(3):
        results = await complete(rig, rows(10))
        assert attempts_of(results) == [1] * 10
        await rig.until(lambda: engine.stats.connections == 0, "the engine closes what is idle")
    assert (await rig.worker(engine.url)).breaker_trips == 0


async def test_7_a_later_and_smaller_deferral_shortens_none_that_stands(rig):
    asks_for_time = await rig.engine(slots=8)
    asks_for_time.control(AnswerFault(status=429, retry_after="60", requests=1))
    asks_for_time.control(AnswerFault(status=429, retry_after="5", requests=1, delay_s=0.5))
    rig.monitor()
    await rig.ready()
    rig.dispatcher("d1")
    before_s = await rig.store.now()
    batch = await rig.submit(rows(2))

    async def both_have_ended():
        worker = await rig.worker(asks_for_time.url)
        return asks_for_time.stats.by_status[429] == 2 and not worker.leases and worker

    worker = await rig.until(both_have_ended, "both requests were asked to come later")
    assert worker.deferred_until >= before_s + 60.0
    await rig.engine("sglang", slots=8)
    status, results = await rig.ended(batch)
    assert (status, sorted(results.names)) == ("completed", names(2))
    assert attempts_of(results) == [2, 2]
    assert [record.status for record in asks_for_time.stats.log] == [429, 429]


# -- models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [1, 2])
async def test_a_model_whose_worker_is_slow_and_full_does_not_keep_another_from_its_own(rig, batches):
    slow = await rig.engine(slots=2, tokens_per_s=0.1, model="slow-model")
    fast = await rig.engine(slots=2, instant=True, model="fast-model")
    rig.monitor()
    await rig.ready()
    rig.dispatcher("d1")
    # Of one cost, they are sent in the order of the file: all for the slow one are first.
    for_slow = [row(f"s{number}", model="slow-model") for number in range(100)]
    for_fast = [row(f"f{number}", model="fast-model") for number in range(40)]
    first = await rig.submit(for_slow + for_fast * (batches == 1), slots=4)
    if batches == 2:
        await rig.until(lambda: slow.stats.log, "the slow one has work")
        await complete(rig, for_fast)
    await rig.until(lambda: len(fast.stats.log) == 40, "the fast one gets all of its own")
    assert (await rig.entry(first)).status == "in_progress"
    assert len(slow.stats.log) <= 4


# -- breakers ------------------------------------------------------------------------------------------------


async def test_10_the_only_worker_answers_500_for_a_while_and_the_batch_ends_when_it_heals(rig):
    engine = await rig.engine(slots=8)
    rig.monitor()
    await rig.ready()
    engine.control(AnswerFault(status=500, requests=25))
    rig.dispatcher("d1", breaker__base_s=0.05, breaker__cap_s=0.05, retry__base_s=0.05, retry__cap_s=0.2)
    results = await complete(rig, rows(40))
    assert results.names == names(40)
    assert engine.stats.by_status[500] == 25
    assert sum(attempts_of(results)) == 40 + 25
    worker = await rig.worker(engine.url)
    assert worker.breaker is BreakerState.CLOSED
    assert worker.breaker_trips > 1


async def test_11_failing_every_other_time_opens_the_breaker_by_rate(rig):
    flaky = await rig.engine(slots=8)
    sound = await rig.engine("sglang", slots=8)
    rig.monitor()
    await rig.ready()
    flaky.control(AlternateFault())
    rig.dispatcher("d1", breaker__failure_threshold=1000, retry__base_s=0.01)
    results = await complete(rig, rows(200))
    assert results.names == names(200)
    assert sound.stats.log
    assert (await rig.worker(flaky.url)).breaker_trips >= 1
    assert flaky.stats.by_status[200] + flaky.stats.by_status[500] >= 20  # fewer have no rate


async def test_13_a_worker_that_stands_still_is_seen_and_others_answer_what_it_held(rig):
    still = await rig.engine(slots=8)
    sound = await rig.engine("sglang", slots=8)
    still.control(HangFault())
    rig.monitor(stall_after_s=1.0)
    await rig.ready()
    rig.dispatcher("d1", retry__base_s=0.01)
    results = await complete(rig, rows(60), slots=16)
    assert workers_of(results) == {worker_id(sound.url)}
    held = len(still.stats.log)
    assert held
    assert sorted(attempts_of(results)) == [1] * (60 - held) + [2] * held
    await rig.until(lambda: still.stats.aborted == held, "its connections are closed")
    worker = await rig.worker(still.url)
    assert (worker.breaker, worker.breaker_reason, worker.leases) == (BreakerState.OPEN, "stalled", 0)
    assert (await rig.worker(sound.url)).breaker is BreakerState.CLOSED
    assert (await rig.store.now()) - (await rig.worker(sound.url)).load.sampled_at < 5.0


async def test_a_worker_that_is_slow_but_moves_keeps_its_requests(rig):
    slow = await rig.engine(slots=2, tokens_per_s=10.0)
    rig.monitor(stall_after_s=1.0)
    await rig.ready()
    rig.dispatcher("d1")
    results = await complete(rig, rows(2, tokens=25))
    assert attempts_of(results) == [1, 1]
    worker = await rig.worker(slow.url)
    assert (worker.breaker, worker.breaker_trips) == (BreakerState.CLOSED, 0)


async def test_what_runs_on_a_worker_that_is_removed_goes_elsewhere(rig):
    removed = await rig.engine(slots=8)
    removed.control(HangFault())
    rig.monitor()
    await rig.ready()
    rig.dispatcher("d1", retry__base_s=0.01)
    batch = await rig.submit(rows(3))
    await rig.until(lambda: removed.stats.log, "it holds requests")
    await rig.engine("sglang", slots=8)
    await rig.ready()
    await rig.store.remove(removed.url)
    status, results = await rig.ended(batch)
    assert (status, sorted(results.names)) == ("completed", names(3))
    assert worker_id(removed.url) not in workers_of(results)


async def test_26_a_worker_in_shutdown_finishes_what_runs_and_gets_nothing_more(rig):
    leaving = await rig.engine(slots=8, tokens_per_s=100.0)
    sound = await rig.engine("sglang", slots=8, tokens_per_s=400.0)
    rig.monitor()
    await rig.ready()
    rig.dispatcher("d1")
    batch = await rig.submit(rows(120, tokens=60), slots=16)
    await rig.until(lambda: leaving.load().running >= 3, "some run on it")
    running = {record.prompt for record in leaving.stats.log if record.outcome == "open"}
    leaving.control(ShutdownFault())
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", names(120))
    answered = {record.prompt for record in leaving.stats.log if record.status == 200}
    assert running <= answered
    assert leaving.stats.by_status[500] >= 3
    assert (await rig.worker(leaving.url)).breaker_trips >= 1
    assert sound.stats.by_status[500] == 0
    assert max(attempts_of(results)) <= 3


# -- limits, models, loads -----------------------------------------------------------------------------------


async def test_23_a_failover_of_seven_requests_keeps_the_limit_of_one(rig):
    failing = await rig.engine(slots=7, tokens_per_s=100.0)
    rig.monitor()
    rig.dispatcher("d1")
    await complete(rig, rows(20, tokens=2))  # its speed is known then, and it gets as many as it can run
    failing.control(SlowFault(factor=0))
    batch = await rig.submit(rows(7), slots=7)
    await rig.until(lambda: failing.load().running == 7, "seven are in flight")
    narrow = await rig.engine("sglang", slots=8, tokens_per_s=100.0)
    await rig.store.register(WorkerSpec(url=narrow.url, max_running=1), replace=True)
    await rig.ready()
    failing.control(RefuseFault(for_s=600))
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", names(7))
    assert workers_of(results) == {worker_id(narrow.url)}
    assert narrow.state()["max_running_seen"] == 1


async def test_24_requests_go_only_to_who_serves_their_model(rig):
    willing = await rig.engine("sglang", model="one", slots=8)  # it answers whatever model it is asked for
    other = await rig.engine("vllm", model="two", slots=8)
    rig.monitor()
    rig.dispatcher("d1")
    await rig.ready()
    lines = [row(f"{model}-{number}", model=model) for number in range(20) for model in ("one", "two")]
    await complete(rig, lines)
    unserved = await rig.submit(rows(5, model="three"))
    await complete(rig, rows(5, model="one"))
    for engine, model in ((willing, "one"), (other, "two")):
        asked = [record.prompt for record in engine.stats.log]
        wanted = {f"say {model}-{number}" for number in range(20)}
        assert wanted <= set(asked)
        assert len(asked) == len(wanted) + (5 if model == "one" else 0)
    assert (await rig.entry(unserved)).status == "in_progress"


async def test_14_and_28_loads_may_break_or_lie_and_neither_is_read_as_idle(rig):
    engine = await rig.engine("vllm", slots=4, tokens_per_s=100.0)  # its /load says 0 whatever happens
    rig.monitor(poll_interval_s=0.1)
    await rig.ready()
    rig.dispatcher("d1")
    batch = await rig.submit(rows(30, tokens=40), slots=4)

    async def busy():
        load = (await rig.worker(engine.url)).load
        return load if load and load.running == 4 else None

    seen = await rig.until(busy, "the load shows what runs")
    assert (seen.source, engine.stats.by_path["/load"]) == (LoadSource.METRICS, 0)
    engine.control(BrokenMetricsFault())
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", names(30))
    worker = await rig.worker(engine.url)
    assert (worker.state, worker.breaker, worker.breaker_trips) == (WorkerState.READY, BreakerState.CLOSED, 0)
    assert worker.load.running != 0  # the last that was known, or nothing: it ages and is not renewed
    assert await rig.store.now() - worker.load.sampled_at > 1.0


async def test_a_worker_that_tells_nothing_gets_more_at_once_while_its_answers_show_that_it_helps(rig):
    engine = await rig.engine(slots=64, tokens_per_s=200.0)
    engine.control(BrokenMetricsFault())
    rig.monitor(poll_interval_s=0.25)
    await rig.ready()
    rig.dispatcher("d1")
    batch = await rig.submit(rows(600, tokens=20))

    async def grown():
        worker = await rig.worker(engine.url)
        return worker if worker.limit > 16 else None

    worker = await rig.until(grown, "a larger limit is tried")
    assert (worker.load, worker.limit_reason[:4]) == (None, "try ")
    status, results = await rig.ended(batch)
    assert (status, len(results.names)) == ("completed", 600)


# -- second attempts -----------------------------------------------------------------------------------------


async def a_long_answer_on_the_slow_one(rig, *, tokens, **dispatcher):
    """A slow and a fast engine of known speeds; the fast one idles while the slow one writes so many."""
    slow = await rig.engine(slots=4, tokens_per_s=50.0)
    fast = await rig.engine("sglang", slots=16)
    rig.monitor()
    await rig.ready()
    rig.dispatcher("d1", **dispatcher)
    # Enough to pay for a second attempt too, which may cost a twentieth of what was written; and once more
    # for those that these answers may get themselves, at their end.
    await complete(rig, rows(2 * 20 * tokens // 25, tokens=25))
    assert slow.stats.log
    fast_id = worker_id(fast.url)
    await rig.store.trip(fast_id, None, "test", seconds=600.0)
    batch = await rig.submit([row("long", tokens=tokens)])
    await rig.until(lambda: slow.load().running == 1, "the long one runs on the slow engine")
    await rig.store.reset_breaker(fast_id)
    status, results = await rig.ended(batch)
    assert (status, results.names, results.errors) == ("completed", ["long"], [])
    return slow, fast, results


async def test_the_last_long_answer_on_a_slow_worker_is_won_by_a_second_attempt(rig):
    slow, fast, results = await a_long_answer_on_the_slow_one(rig, tokens=300, hedge="true")
    assert (workers_of(results), attempts_of(results)) == ({worker_id(fast.url)}, [2])
    await rig.until(lambda: slow.load().running == 0, "the slow engine stops writing it")
    assert [record.outcome for record in slow.stats.log if record.prompt == "say long"] == ["aborted"]

    async def free():
        return [worker.leases for worker in (await rig.store.view()).workers] == [0, 0]

    await rig.until(free, "both leases are freed")
    loser = await rig.worker(slow.url)
    assert (loser.breaker, loser.breaker_trips) == (BreakerState.CLOSED, 0)


async def test_what_a_worker_holds_that_never_answered_is_answered_elsewhere_in_the_end(rig):
    hung = await rig.engine(slots=4)
    other = await rig.engine("sglang", slots=8)
    rig.monitor(stall_after_s=3600)
    await rig.ready()
    hung.control(HangFault(paths=("/v1/chat/completions",), for_s=3600))
    rig.dispatcher("d1", hedge="true")
    results = await complete(rig, rows(40, tokens=20))
    assert workers_of(results) == {worker_id(other.url)}
    assert 2 in attempts_of(results)


@pytest.mark.parametrize("settings", [{"hedge": "false"}, {"hedge": None, "share": "spare"}])
async def test_there_are_no_second_attempts_where_tokens_are_paid_for_or_shared(rig, settings):
    slow, fast, results = await a_long_answer_on_the_slow_one(rig, tokens=60, **settings)
    assert (workers_of(results), attempts_of(results)) == ({worker_id(slow.url)}, [1])
    assert (slow.stats.aborted, fast.stats.aborted) == (0, 0)
