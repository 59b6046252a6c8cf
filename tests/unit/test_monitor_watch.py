"""One worker's ticks against an engine: what is asked, and what is found out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
import structlog

from monitor.settings import MonitorSettings
from monitor.watch import Findings, Watch
from tests.monitored import (
    Engine,
    make_load,
    make_view,
    reply,
    sglang_engine,
    sglang_loads,
    vllm_engine,
    vllm_page,
)
from workers.breaker import BreakerState
from workers.fleet import WorkerState, WorkerView
from workers.load import Load, LoadSource
from workers.spec import Runtime

SECTIONS = "/v1/loads?include=core,disagg,queues"


class Clock:
    """Redis' clock, moved by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


Begin = Callable[..., Watch]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def begin(clock: Clock) -> AsyncIterator[Begin]:
    """Starts watching an engine; its clients are closed at the end."""
    clients: list[httpx.AsyncClient] = []

    def start(engine: Engine, view: WorkerView | None = None, **more: Any) -> Watch:
        environ = more.pop("environ", {})
        reborn = more.pop("reborn", False)
        client = engine.client()
        clients.append(client)
        settings = MonitorSettings(**more)
        return Watch(view or make_view(), settings, client, now=clock, environ=environ, reborn=reborn)

    yield start
    for client in clients:
        await client.aclose()


def written(watch: Watch, found: Findings, view: WorkerView) -> WorkerView:
    """The view after the state that was found is written."""
    assert found.state is not None
    watch.state_was_written(found.state)
    return replace(view, state=found.state.state, models=frozenset(found.state.models or ()))


async def test_a_new_worker_is_looked_at_detected_and_read_in_one_tick(begin: Begin) -> None:
    engine = vllm_engine(running=3)
    found = await begin(engine).tick(make_view(state=WorkerState.STARTING), memo=False)
    assert found.state is not None
    assert found.state.state is WorkerState.READY
    assert (found.state.models, found.state.max_model_len) == (("m",), 2048)
    assert (found.state.runtime, found.state.version) == (Runtime.VLLM, "0.32.0")
    assert found.absent == "status 404"
    assert found.load is not None
    assert (found.load.source, found.load.running) == (LoadSource.METRICS, 3)
    assert engine.asked == ["/v1/models", "/version", SECTIONS, "/metrics"]


async def test_while_a_memo_stands_a_worker_costs_one_request_a_tick(begin: Begin) -> None:
    engine = vllm_engine()
    watch = begin(engine)
    await watch.tick(make_view(), memo=False)
    engine.requests.clear()
    for _ in range(3):
        found = await watch.tick(make_view(), memo=True)
        assert found.load is not None
        assert found.absent is None
    assert engine.asked == ["/metrics"] * 3


async def test_a_worker_with_loads_costs_one_request_a_tick(begin: Begin) -> None:
    engine = sglang_engine(max_running_requests=16)
    watch = begin(engine)
    view = written(watch, await watch.tick(make_view(), memo=False), make_view())
    engine.requests.clear()
    found = await watch.tick(view, memo=False)
    assert engine.asked == [SECTIONS]
    assert found.available
    assert found.state is None


async def test_the_form_of_the_request_is_remembered_for_the_incarnation(begin: Begin) -> None:
    engine = Engine({**sglang_engine().replies, SECTIONS: reply(status=400)})
    watch = begin(engine)
    for _ in range(3):
        await watch.tick(make_view(), memo=False)
    assert [path for path in engine.asked if "loads" in path] == [
        SECTIONS,
        "/v1/loads",
        "/v1/loads",
        "/v1/loads",
    ]
    engine.requests.clear()
    await begin(engine, make_view(incarnation=2)).tick(make_view(incarnation=2), memo=False)
    assert SECTIONS in engine.asked


async def test_an_inconclusive_probe_sets_no_memo_and_the_gauges_help_out(begin: Begin) -> None:
    engine = vllm_engine(waiting=4)
    engine.replies["/v1/loads"] = reply(status=503)
    found = await begin(engine).tick(make_view(), memo=False)
    assert found.absent is None
    assert found.load is not None
    assert found.load.waiting == 4


async def test_why_a_probe_was_inconclusive_is_kept_though_the_gauges_gave_a_load(begin: Begin) -> None:
    engine = vllm_engine()
    engine.replies["/v1/loads"] = reply(status=503)
    with structlog.testing.capture_logs() as logs:
        found = await begin(engine).tick(make_view(), memo=False)
    assert found.load is not None
    assert found.state is not None
    assert found.state.why == "answers /v1/models; /v1/loads: status 503"
    assert {"verdict": "inconclusive", "reason": "status 503"}.items() <= logs[-2].items()


async def test_a_look_that_finds_what_is_known_is_no_news(begin: Begin, clock: Clock) -> None:
    watch = begin(vllm_engine())
    view = written(watch, await watch.tick(make_view(), memo=True), make_view())
    clock.now_s += 100.0
    assert (await watch.tick(view, memo=True)).state is None


async def test_what_was_found_is_news_until_it_is_written(begin: Begin) -> None:
    watch = begin(vllm_engine())
    first = await watch.tick(make_view(), memo=True)
    again = await watch.tick(make_view(), memo=True)  # which does not look anew
    assert again.state == first.state
    view = written(watch, again, make_view())
    assert (await watch.tick(view, memo=True)).state is None


async def test_models_that_redis_has_lost_are_news_unless_a_person_gave_others(begin: Begin) -> None:
    watch = begin(vllm_engine())
    view = written(watch, await watch.tick(make_view(), memo=True), make_view())
    lost = await watch.tick(replace(view, models=frozenset()), memo=True)
    assert lost.state is not None
    assert lost.state.models == ("m",)
    given = replace(view, models=frozenset({"alias"}), models_given=True)
    assert (await watch.tick(given, memo=True)).state is None


async def test_only_ready_workers_are_read(begin: Begin) -> None:
    engine = Engine({"/v1/models": httpx.ConnectError("refused")})
    found = await begin(engine).tick(make_view(state=WorkerState.STARTING), memo=False)
    assert found.state is not None
    assert found.state.state is WorkerState.STARTING
    assert found.load is None
    assert engine.asked == ["/v1/models"]


async def test_a_worker_that_is_gone_becomes_unready_after_two_looks(begin: Begin) -> None:
    engine = vllm_engine()
    watch = begin(engine)
    await watch.tick(make_view(), memo=True)
    engine.replies = {path: httpx.ConnectError("refused") for path in (*engine.replies, "/v1/loads")}
    states = []
    for _ in range(3):
        found = await watch.tick(make_view(), memo=True)
        states.append(found.state.state if found.state else None)
    assert states[-1] is WorkerState.UNREADY


async def test_why_there_is_no_load_is_told_once_with_the_state(begin: Begin) -> None:
    engine = vllm_engine()
    engine.replies["/metrics"] = reply("vllm:num_requests_running 1\n")
    watch = begin(engine)
    first = await watch.tick(make_view(), memo=False)
    again = await watch.tick(written(watch, first, make_view()), memo=False)
    assert first.state is not None
    assert "/v1/loads: status 404" in first.state.why
    assert "lacks vllm:num_requests_waiting, vllm:kv_cache_usage_perc" in first.state.why
    assert first.load is None
    assert again.state is None


async def test_one_budget_covers_the_whole_poll_and_the_gauges_get_their_part(begin: Begin) -> None:
    engine = vllm_engine()
    watch = begin(engine, poll_budget_s=0.2)
    await watch.tick(make_view(), memo=False)

    async def hang(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/loads":
            await asyncio.Event().wait()
        return engine(request)

    watch._client = httpx.AsyncClient(transport=httpx.MockTransport(hang))
    found = await watch.tick(make_view(), memo=False)
    await watch._client.aclose()
    assert found.load is not None
    assert found.absent is None


async def test_a_list_of_models_that_hangs_leaves_time_for_the_load(begin: Begin) -> None:
    engine = vllm_engine()
    watch = begin(
        engine,
        poll_budget_s=0.4,
    )
    assert (await watch.tick(make_view(), memo=False)).load is not None

    async def hang(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            await asyncio.Event().wait()
        await asyncio.sleep(0)  # as an answer over a wire: not there at once
        return engine(request)

    watch._lifecycle.look_soon()
    watch._client = httpx.AsyncClient(transport=httpx.MockTransport(hang))
    found = await watch.tick(make_view(), memo=False)
    await watch._client.aclose()
    assert found.load is not None


async def test_a_worker_that_hangs_everywhere_costs_no_more_than_the_budget(begin: Begin) -> None:
    async def hang(_request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    watch = begin(Engine(), poll_budget_s=0.05)
    watch._client = httpx.AsyncClient(transport=httpx.MockTransport(hang))
    async with asyncio.timeout(5):
        found = await watch.tick(make_view(), memo=False)
    await watch._client.aclose()
    assert found.load is None
    assert found.absent is None
    assert found.state is not None
    assert found.state.state is WorkerState.READY


async def test_a_sample_is_dated_on_redis_clock_by_its_age_alone(begin: Begin, clock: Clock) -> None:
    body = sglang_loads(timestamp=500.0) | {"timestamp": 503.5}
    engine = sglang_engine()
    engine.replies["/v1/loads"] = reply(body)
    found = await begin(engine).tick(make_view(), memo=False)
    assert found.load is not None
    assert (found.load.sampled_at, found.load.received_at) == (clock.now_s - 3.5, clock.now_s)


async def test_a_counter_that_went_down_is_a_new_life_and_nothing_else_is_concluded(begin: Begin) -> None:
    stored = make_load(generation_tokens_total=5000)
    view = make_view(load=stored, version="0.32.0")
    found = await begin(vllm_engine(tokens=3), view).tick(view, memo=True)
    assert found == Findings(reborn="its counter generation_tokens_total went down")


async def test_a_changed_version_is_a_new_life_and_its_state_belongs_to_it(begin: Begin) -> None:
    view = make_view(version="0.31.0")
    found = await begin(vllm_engine(), view).tick(view, memo=False)
    assert found.reborn == "its version changed from 0.31.0 to 0.32.0"
    assert found.state is not None
    assert found.state.version == "0.32.0"


async def test_a_worker_that_became_something_else_between_two_polls_is_found_out_despite_its_memo(
    begin: Begin,
) -> None:
    engine = vllm_engine()
    watch = begin(engine)
    view = make_view(runtime=Runtime.VLLM)
    assert (await watch.tick(view, memo=False)).load is not None
    engine.replies = sglang_engine().replies
    amiss = await watch.tick(view, memo=True)
    assert (amiss.load, amiss.fast) == (None, True)
    found = await watch.tick(view, memo=True)
    assert found.reborn == "its runtime changed from vllm to sglang"
    assert found.state is not None
    assert found.state.runtime is Runtime.SGLANG


async def test_what_a_person_said_that_a_worker_runs_is_never_found_to_have_changed(begin: Begin) -> None:
    view = make_view(runtime=Runtime.VLLM, runtime_given=True)
    found = await begin(sglang_engine(), view).tick(view, memo=False)
    assert found.reborn is None
    assert found.load is not None


async def test_metrics_that_stay_broken_are_doubted_once_and_then_cost_one_request_a_tick(
    begin: Begin,
) -> None:
    engine = vllm_engine()
    watch = begin(engine)
    await watch.tick(make_view(), memo=False)
    engine.replies["/metrics"] = reply(status=500)
    engine.requests.clear()
    fast = [(await watch.tick(make_view(), memo=True)).fast for _ in range(4)]
    assert engine.asked.count("/metrics") == 4
    assert engine.asked.count(SECTIONS) == 1
    assert engine.asked[-1:] == ["/metrics"]
    assert fast == [True, False, False, False]


async def test_a_memo_of_a_life_whose_metrics_were_never_read_is_doubted_when_they_are(begin: Begin) -> None:
    engine = vllm_engine()
    engine.replies["/metrics"] = reply(status=500)
    watch = begin(engine)
    await watch.tick(make_view(), memo=False)  # which sets the memo
    for _ in range(2):
        await watch.tick(make_view(), memo=True)
    engine.replies = {**vllm_engine().replies, "/v1/loads": sglang_engine().replies["/v1/loads"]}
    assert (await watch.tick(make_view(), memo=True)).load is not None
    found = await watch.tick(make_view(), memo=True)
    assert found.load is not None
    assert found.load.source is LoadSource.NATIVE
    assert found.available


async def test_a_memo_whose_worker_can_be_told_from_another_life_is_not_doubted_after_a_gap(
    begin: Begin,
) -> None:
    engine = vllm_engine()
    view = make_view(load=make_load(source=LoadSource.METRICS, process_start_time=500.0))
    watch = begin(engine, view)
    for _ in range(3):
        await watch.tick(make_view(), memo=True)
    assert SECTIONS not in engine.asked


async def test_what_is_stored_of_the_last_life_is_no_sign_in_the_next(begin: Begin) -> None:
    view = make_view(load=make_load(generation_tokens_total=5000), version="0.31.0")
    found = await begin(vllm_engine(tokens=3), view, reborn=True).tick(view, memo=False)
    assert found.reborn is None


async def test_a_stall_is_found_once_per_time_and_only_while_the_breaker_lets_something_through(
    begin: Begin, clock: Clock
) -> None:
    engine = vllm_engine(running=2)
    watch = begin(engine, stall_after_s=60.0)
    stalls = []
    for _ in range(5):
        found = await watch.tick(make_view(limit_version=2), memo=True)
        stalls.append(found.stalled)
        clock.now_s += 30.0
    assert stalls == [False, False, True, False, False]
    for opened in (4, 3, 1):
        for _ in range(opened):
            found = await watch.tick(make_view(breaker=BreakerState.OPEN), memo=True)
            assert not found.stalled
            clock.now_s += 30.0
        for stalls in (False, False, True):
            found = await watch.tick(make_view(breaker=BreakerState.HALF_OPEN), memo=True)
            assert found.stalled is stalls
            clock.now_s += 30.0


SGLANG_METRICS = (
    "sglang:num_running_reqs 1\nsglang:num_queue_reqs 0\nsglang:token_usage {usage}\n"
    "sglang:generation_tokens_total 100\n"
)


def sglang_by_metrics(usage: float) -> Engine:
    engine = sglang_engine()
    del engine.replies["/v1/loads"]
    engine.replies["/metrics"] = reply(SGLANG_METRICS.format(usage=usage))
    return engine


def sglang_by_loads(usage: float) -> Engine:
    return sglang_engine(token_usage=usage, decode_moments=[9, 0, 0, 0, 0, 100])


def vllm_by_metrics(usage: float) -> Engine:
    return vllm_engine(kv=usage)


@pytest.mark.parametrize(
    ("engine_at", "stalled"), [(vllm_by_metrics, True), (sglang_by_loads, True), (sglang_by_metrics, False)]
)
async def test_memory_that_stirs_is_progress_only_where_tokens_are_counted_when_a_request_ends(
    begin: Begin, clock: Clock, engine_at: Callable[[float], Engine], stalled: bool
) -> None:
    engine = engine_at(0.0)
    watch = begin(engine, stall_after_s=60.0)
    stalls = []
    for tick in range(7):
        engine.replies = engine_at(tick / 100).replies
        stalls.append((await watch.tick(make_view(leases=1), memo=False)).stalled)
        clock.now_s += 60.0
    assert any(stalls) is stalled


async def test_a_scrape_that_fails_is_no_evidence_of_a_stall(begin: Begin, clock: Clock) -> None:
    engine = vllm_engine(running=2)
    watch = begin(engine, stall_after_s=60.0)
    await watch.tick(make_view(), memo=True)
    engine.replies["/metrics"] = reply(status=500)
    for _ in range(10):
        clock.now_s += 30.0
        assert not (await watch.tick(make_view(leases=2), memo=True)).stalled


async def test_rates_ride_on_the_load(begin: Begin, clock: Clock) -> None:
    engine = vllm_engine(tokens=0, done=0)
    watch = begin(engine)
    await watch.tick(make_view(), memo=True)
    clock.now_s += 5.0
    engine.replies["/metrics"] = reply(vllm_page(tokens=500, done=10))
    found = await watch.tick(make_view(), memo=True)
    assert found.load is not None
    assert (found.load.token_rate, found.load.drain_rate, found.load.capacity_rate) == (100.0, 2.0, 100.0)


async def test_a_limit_is_decided_until_a_view_shows_it(begin: Begin) -> None:
    watch = begin(vllm_engine(running=16))
    view = make_view(leases=16, limit_version=5)
    for _ in range(2):  # a failover of Redis may lose what was written after the first
        found = await watch.tick(view, memo=True)
        assert found.limit is not None
        assert found.limit.value == 24
    newer = replace(view, limit=24, limit_version=6)
    assert (await watch.tick(newer, memo=True)).limit is None


@pytest.mark.parametrize(
    ("engine", "leases", "fast"),
    [(sglang_engine(), 16, True), (sglang_engine(), 3, False), (vllm_engine(), 16, True)],
)
async def test_a_pressed_worker_is_polled_faster(
    begin: Begin, engine: Engine, leases: int, fast: bool
) -> None:
    found = await begin(engine).tick(make_view(leases=leases, limit_version=5), memo=False)
    assert found.fast is fast


async def test_a_worker_whose_limit_changed_is_polled_soon_a_few_times(begin: Begin) -> None:
    watch = begin(vllm_engine(running=3))
    first = await watch.tick(make_view(leases=3), memo=True)
    assert first.limit is not None
    later = make_view(leases=3, limit=first.limit.value, limit_version=2)
    assert [first.fast] + [(await watch.tick(later, memo=True)).fast for _ in range(3)] == [
        True,
        True,
        True,
        False,
    ]


async def test_gauges_are_read_fast_only_until_the_worker_was_full(begin: Begin) -> None:
    watch = begin(vllm_engine(running=8, waiting=8))
    view = make_view(leases=16, limit_version=2)
    assert [(await watch.tick(view, memo=True)).fast for _ in range(3)] == [True, False, False]


async def test_a_missing_key_is_the_reason_and_nothing_is_asked(begin: Begin) -> None:
    engine = vllm_engine()
    found = await begin(engine).tick(make_view(api_key_env="ENGINE_KEY"), memo=False)
    assert found.state is not None
    assert found.state.state is WorkerState.UNREADY
    assert "ENGINE_KEY" in found.state.reason
    assert engine.asked == []


async def test_a_key_that_no_header_can_carry_is_the_reason_and_is_not_shown(begin: Begin) -> None:
    engine = vllm_engine()
    watch = begin(engine, environ={"ENGINE_KEY": "\u201chush-hush\u201d"})
    found = await watch.tick(make_view(api_key_env="ENGINE_KEY"), memo=False)
    assert found.state is not None
    assert found.state.state is WorkerState.UNREADY
    assert "ENGINE_KEY holds more than a key" in found.state.reason
    assert "hush" not in repr(found)
    assert engine.asked == []


async def test_the_key_goes_with_every_request_of_its_worker(begin: Begin) -> None:
    engine = vllm_engine()
    watch = begin(engine, environ={"ENGINE_KEY": "hush-hush"})
    found = await watch.tick(make_view(api_key_env="ENGINE_KEY"), memo=False)
    assert {request.headers["authorization"] for request in engine.requests} == {"Bearer hush-hush"}
    assert "hush-hush" not in repr(found)


async def test_a_generic_worker_has_no_load_and_is_never_guessed_at(begin: Begin) -> None:
    engine = Engine({"/health": reply()})
    found = await begin(engine, make_view(runtime=Runtime.GENERIC)).tick(make_view(), memo=False)
    assert found.load is None
    assert found.limit is None
    assert "/metrics" not in engine.asked
    assert found.state is not None
    assert "no metrics known" in found.state.why


async def test_a_generic_workers_limit_comes_back_while_its_load_stays_unknown(begin: Begin) -> None:
    watch = begin(Engine({"/health": reply()}), make_view(runtime=Runtime.GENERIC))
    cut = make_view(runtime=Runtime.GENERIC, limit=2, leases=2, limit_since=940.0)
    found = await watch.tick(cut, memo=True)
    assert found.limit is not None
    assert found.limit.value == 3
    assert (await watch.tick(replace(cut, max_running=2), memo=True)).limit is None
    assert (await watch.tick(replace(cut, limit=16, leases=16), memo=True)).limit is None


async def test_a_throughput_beyond_all_measure_is_unknown_and_what_is_stored_can_be_read(
    begin: Begin, clock: Clock
) -> None:
    watch = begin(sglang_engine(gen_throughput=1e308))
    for _ in range(3):
        found = await watch.tick(make_view(), memo=False)
        clock.now_s += 5
        assert found.load is not None
        assert (found.load.gen_throughput, found.load.token_rate, found.load.capacity_rate) == (None,) * 3
        assert Load.from_hash(found.load.to_hash()) == found.load
