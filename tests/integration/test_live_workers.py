"""What live workers do, case by case of the table that the monitor is built against: over real sockets.

An engine of the simulator misbehaves in its way, a monitor watches it over a real Valkey, and what is stored
of it is looked at. How answers are judged one by one has tests of its own, below ``unit``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
import structlog

from dispatcher.scheduler.decision import Chosen, decide
from dispatcher.scheduler.fleet import FleetModel
from dispatcher.scheduler.question import Need
from dispatcher.scheduler.strategies import DEFAULTS, Strategy
from forebay.simulator.faults import (
    AnswerFault,
    BrokenMetricsFault,
    HangFault,
    LoadsFault,
    SlowFault,
)
from forebay.simulator.server import SimulatedEngine
from forebay.simulator.settings import EngineSettings
from monitor.exporter import FleetCollector
from monitor.http import make_client
from monitor.service import MonitorService
from monitor.settings import MonitorSettings
from workers.breaker import BreakerState
from workers.connection import AsyncRedis
from workers.fleet import FleetView, WorkerState, WorkerView
from workers.leases import Ask, Grant, lease_id
from workers.load import Load, LoadSource
from workers.spec import WorkerSpec, worker_id
from workers.store import FleetStore

pytestmark = pytest.mark.integration

FAST: dict[str, Any] = {
    "poll_interval_s": 0.05,
    "fast_interval_s": 0.02,
    "readiness_interval_s": 0.2,
    "memo_ttl_s": 600.0,
}
POLLED = ("/metrics", "/v1/loads")


@pytest.fixture
async def store(valkey: AsyncRedis) -> FleetStore:
    return FleetStore(valkey)


@contextlib.asynccontextmanager
async def engines(*settings: dict[str, Any]) -> AsyncIterator[list[SimulatedEngine]]:
    """Engines with slots for eight, whose answers take a moment."""
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(SimulatedEngine(EngineSettings(**{"slots": 8, **one})))
            for one in settings
        ]


@contextlib.asynccontextmanager
async def watched(store: FleetStore, *urls: str, **more: Any) -> AsyncIterator[MonitorService]:
    """A monitor over these workers; it ends with the block."""
    for url in urls:
        await store.register(WorkerSpec(url=url))
    async with make_client() as client:
        settings = MonitorSettings(name="m", **{**FAST, **more})
        service = MonitorService(FleetStore(store.client), client, settings)
        task = asyncio.create_task(service.run())
        try:
            yield service
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def seen(store: FleetStore, true: Callable[[FleetView], object]) -> FleetView:
    """The first view in which ``true`` holds."""
    async with asyncio.timeout(30):
        while True:
            view = await store.view()  # every look is a round trip, which is all the waiting there is
            if true(view):
                return view


def load_of(view: FleetView, engine: SimulatedEngine) -> Load:
    """The load that stands, of an engine that was read."""
    load = of(view, engine).load
    assert load is not None
    return load


def of(view: FleetView, engine: SimulatedEngine) -> WorkerView:
    return next(worker for worker in view.workers if worker.id == worker_id(engine.url))


def polls(engine: SimulatedEngine) -> int:
    return sum(engine.stats.by_path[path] for path in POLLED)


async def polled_again(store: FleetStore, engine: SimulatedEngine, times: int) -> None:
    """Wait for so many more polls of this engine."""
    before = polls(engine)
    await seen(store, lambda _view: polls(engine) >= before + times)


def read(view: FleetView, *of_engines: SimulatedEngine) -> bool:
    return all(of(view, engine).load is not None for engine in of_engines)


@contextlib.asynccontextmanager
async def busy(engine: SimulatedEngine, count: int = 3) -> AsyncIterator[None]:
    """So many requests of somebody run in the engine during the block."""
    body = {"model": "sim-model", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4000}
    async with httpx.AsyncClient(base_url=engine.url, timeout=None) as client:
        asked = [
            asyncio.create_task(client.post("/v1/chat/completions", json=body | {"ignore_eos": True}))
            for _ in range(count)
        ]
        while engine.load().running < count:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)
        yield
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def test_case_13_a_worker_that_takes_requests_and_never_ends_them_is_stalled_the_others_are_not(
    store: FleetStore,
) -> None:
    async with engines({"runtime": "vllm"}, {"runtime": "sglang"}, {"runtime": "vllm"}) as fleet:
        frozen, native, other = fleet
        async with watched(store, *(engine.url for engine in fleet), stall_after_s=0.4):
            await seen(store, lambda view: read(view, *fleet))
            frozen.control(SlowFault(factor=0.0))
            async with busy(frozen), busy(other), busy(native):
                view = await seen(store, lambda view: of(view, frozen).breaker is BreakerState.OPEN)
                await polled_again(store, other, 5)
    assert of(view, frozen).breaker_reason == "stalled"
    assert of(view, frozen).state is WorkerState.READY
    assert frozen.stats.by_path["/v1/models"] > 0
    assert [of(view, engine).breaker for engine in (native, other)] == [BreakerState.CLOSED] * 2


async def test_case_13_a_health_page_that_hangs_is_no_stall_and_makes_nobody_unready(
    store: FleetStore,
) -> None:
    async with (
        engines({"runtime": "vllm"}) as [slow],
        watched(store, slow.url, stall_after_s=0.3, poll_budget_s=0.1),
    ):
        await seen(store, lambda view: read(view, slow))
        slow.control(HangFault(paths=("/health", "/v1/models")))
        async with busy(slow):
            hung = slow.stats.by_path["/v1/models"]
            await seen(store, lambda _view: slow.stats.by_path["/v1/models"] >= hung + 4)
            view = await store.view()
    assert (of(view, slow).state, of(view, slow).breaker) == (WorkerState.READY, BreakerState.CLOSED)


@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
async def test_case_14_broken_telemetry_fades_the_load_and_touches_neither_state_nor_breaker(
    store: FleetStore, runtime: str
) -> None:
    async with engines({"runtime": runtime}) as [engine], watched(store, engine.url, stall_after_s=0.2):
        await seen(store, lambda view: read(view, engine))
        engine.control(BrokenMetricsFault())
        engine.control(AnswerFault(paths=("/v1/loads",), status=503))
        async with busy(engine):
            view = await seen(
                store, lambda view: "status 503" in of(view, engine).reason or runtime == "vllm"
            )
            last = of(view, engine).load
            await polled_again(store, engine, 10)
            view = await store.view()
            worker = of(view, engine)
            ask = Ask(lease_id("d", 1, 1), (worker.id,))
            assert isinstance((await store.acquire([ask]))[0], Grant)
    assert last is not None
    assert worker.load is not None
    assert (worker.state, worker.breaker) == (WorkerState.READY, BreakerState.CLOSED)
    assert worker.load.sampled_at <= last.sampled_at + 1.0
    assert "load unknown" in worker.reason
    [running] = [
        metric
        for metric in FleetCollector(view, {}, dead_after_s=0.0).collect()
        if metric.name == "forebay_worker_running"
    ]
    assert running.samples == []


def choices(view: FleetView, later_s: float) -> set[str]:
    """To whom requests are sent, so long after the view."""
    need, strategy = Need("sim-model", 100, 100, 500), Strategy.of("batch", DEFAULTS["batch"])
    model = FleetModel(view, stale_after_s=3.0, dead_after_s=10.0)
    found = [decide(need, model, strategy, Random(seed), view.now_s + later_s) for seed in range(40)]
    return {decision.pick for decision in found if isinstance(decision, Chosen)}


def heard_again(view: FleetView, worker: WorkerView, later_s: float) -> FleetView:
    """The view so much later, in which only this worker was read again."""
    assert worker.load is not None
    load = worker.load.model_copy(update={"sampled_at": view.now_s + later_s})
    workers = tuple(replace(one, load=load) if one.id == worker.id else one for one in view.workers)
    return replace(view, workers=workers)


@pytest.mark.parametrize("running", [0, 8])
async def test_case_15_and_16_a_worker_whose_telemetry_stopped_is_neither_preferred_nor_starved(
    store: FleetStore, running: int
) -> None:
    async with (
        engines({"runtime": "sglang"}, {"runtime": "sglang"}) as [silent, talks],
        watched(store, silent.url, talks.url),
        busy(silent, running),
    ):
        await seen(store, lambda view: read(view, silent, talks) and load_of(view, silent).running == running)
        silent.control(AnswerFault(paths=POLLED, status=500))
        view = await seen(store, lambda view: "status 500" in of(view, silent).reason)
    both = {of(view, silent).id, of(view, talks).id}
    assert choices(heard_again(view, of(view, talks), 20.0), 20.0) == both


async def test_case_18_an_endpoint_added_in_place_is_found_within_the_memos_time(store: FleetStore) -> None:
    async with engines({"runtime": "vllm"}) as [engine], watched(store, engine.url, memo_ttl_s=0.5):
        view = await seen(store, lambda view: read(view, engine))
        assert load_of(view, engine).source is LoadSource.METRICS
        engine.control(LoadsFault(served=True))
        view = await seen(store, lambda view: load_of(view, engine).source is LoadSource.NATIVE)
        assert await store.memos([worker_id(engine.url)]) == {}
    assert of(view, engine).incarnation == 1


async def test_case_19_a_replaced_worker_is_probed_anew_at_once(store: FleetStore) -> None:
    async with engines({"runtime": "vllm"}) as [engine], watched(store, engine.url):
        await seen(store, lambda view: read(view, engine))
        probes = engine.stats.by_path["/v1/loads"]
        again = await store.register(WorkerSpec(url=engine.url), replace=True)
        assert await store.memos([again.worker_id]) == {}
        view = await seen(store, lambda view: read(view, engine))
        await seen(store, lambda _view: engine.stats.by_path["/v1/loads"] > probes)
        assert of(view, engine).incarnation == again.incarnation


async def test_case_20_four_spellings_of_a_url_are_one_worker_polled_once(store: FleetStore) -> None:
    async with engines({"runtime": "sglang"}) as [engine]:
        spellings = [f"{engine.url}{end}" for end in ("", "/", "/v1", "/v1/")]
        async with watched(store, *spellings):
            view = await seen(store, lambda view: read(view, engine))
    assert [worker.url for worker in view.workers] == [engine.url]


async def test_case_21_the_key_goes_with_every_poll_to_its_worker_only_and_stays_out_of_redis_and_logs(
    store: FleetStore, tmp_path: Path, valkey: AsyncRedis
) -> None:
    key, file = "hush-hush-key", tmp_path / "key"
    file.write_text(f"{key}\n", encoding="utf-8")
    digest = hashlib.sha256(f"Bearer {key}".encode()).hexdigest()
    with structlog.testing.capture_logs() as logs:
        async with engines({"runtime": "sglang", "api_key": key}, {"runtime": "vllm"}) as [locked, open_]:
            for engine, key_file in ((locked, str(file)), (open_, None)):
                await store.register(WorkerSpec(url=engine.url, api_key_file=key_file))
            async with watched(store):
                view = await seen(store, lambda view: read(view, locked, open_))
            assert of(view, locked).state is WorkerState.READY
            assert locked.stats.last_authorization_sha256 == digest
            assert open_.stats.last_authorization_sha256 is None
            assert 401 not in locked.stats.by_status
    assert key not in repr(logs)
    stored = [await valkey.hgetall(name) async for name in valkey.scan_iter(_type="hash")]
    assert str(file) in repr(stored)
    assert key not in repr(stored)


async def test_case_21_a_worker_whose_key_is_missing_is_unready_and_says_why(
    store: FleetStore, tmp_path: Path
) -> None:
    file = tmp_path / "key"
    async with engines({"runtime": "sglang", "api_key": "k"}) as [engine]:
        await store.register(WorkerSpec(url=engine.url, api_key_file=str(file)))
        async with watched(store):
            view = await seen(store, lambda view: of(view, engine).state is WorkerState.UNREADY)
            assert of(view, engine).reason == f"key file {file} cannot be read: FileNotFoundError"
            file.write_text("k", encoding="utf-8")
            await seen(store, lambda view: of(view, engine).state is WorkerState.READY)


async def test_case_28_a_load_page_that_says_zero_while_the_worker_is_busy_is_never_asked(
    store: FleetStore,
) -> None:
    async with (
        engines({"runtime": "vllm", "load_tracking": False}) as [engine],
        watched(store, engine.url),
        busy(engine, 5),
    ):
        await seen(store, lambda view: read(view, engine) and load_of(view, engine).running == 5)
    assert "/load" not in engine.stats.by_path


async def test_a_memoized_worker_costs_exactly_one_request_a_poll(store: FleetStore) -> None:
    async with (
        engines({"runtime": "vllm"}) as [engine],
        watched(store, engine.url, readiness_interval_s=3600.0),
    ):
        await seen(store, lambda view: read(view, engine))
        await polled_again(store, engine, 5)
        before, requests = engine.stats.by_path["/metrics"], engine.stats.requests
        await polled_again(store, engine, 20)
        assert engine.stats.requests - requests == engine.stats.by_path["/metrics"] - before
