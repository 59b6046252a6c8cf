"""Real vLLM servers on the CPU: a run over two of them, what the monitor reads, what they refuse."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import msgspec
import pytest

from dispatcher.batches.record import BatchStatus
from forebay.client import Forebay
from forebay.tally import count
from monitor.http import make_client
from monitor.probe import Verdict
from monitor.service import MonitorService
from monitor.settings import MonitorSettings
from monitor.sweep import sweep_fleet
from tests.engines.batches import assert_whole, chat, read, write
from tests.engines.servers import MODEL, Page, Server, Vllms
from workers.breaker import BreakerState
from workers.connection import AsyncRedis
from workers.fleet import WorkerState, WorkerView
from workers.load import Load, LoadSource
from workers.spec import Runtime, WorkerSpec
from workers.store import FleetStore

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
REFUSED = "vllm:admission_rejections_total"
GENERATED, DONE = "vllm:generation_tokens_total", "vllm:request_success_total"
MOST_TRIES = 20

Say = Callable[[str], None]


def idle(page: Page) -> bool:
    return page.total(RUNNING) == 0 == page.total(WAITING)


# -- a whole run -------------------------------------------------------------------------------------------


def test_a_run_over_a_fast_and_a_slow_engine_answers_every_line_once_and_uses_both(
    vllms: Vllms, tmp_path: Path, say: Say
) -> None:
    rng = random.Random(7)
    lines = [
        chat(f"line-{n}", f"word {n} " * rng.randint(1, 30), rng.choice([4, 16, 64, 256])) for n in range(120)
    ]
    write(tmp_path / "in.jsonl", lines)
    last = run_command(tmp_path, "--worker", vllms.eight.url, "--worker", vllms.two.url)
    assert last["status"] == "completed"
    assert last["request_counts"] == {"total": 120, "completed": 120, "failed": 0}
    results = read(tmp_path / "out.jsonl")
    assert_whole(results, lines)
    shares = count((tmp_path / "out.jsonl").read_bytes().splitlines())
    assert shares.keys() == {vllms.eight.id, vllms.two.id}
    eight, two = shares[vllms.eight.id], shares[vllms.two.id]
    say(
        f"of 120 requests, the engine with 8 slots did {eight.requests} ({eight.tokens} tokens), "
        f"that with 2 did {two.requests} ({two.tokens}), in {last['elapsed_s']:.1f} s"
    )


def run_command(folder: Path, *words: str) -> dict[str, object]:
    """`forebay run` on the folder's `in.jsonl`; returns its last line."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "forebay", "run", "in.jsonl", "-o", "out.jsonl", "--json", *words],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    last: dict[str, object] = msgspec.json.decode(done.stdout.splitlines()[-1])
    return last


# -- what the monitor reads --------------------------------------------------------------------------------


@pytest.fixture
async def store(valkey: AsyncRedis) -> FleetStore:
    return FleetStore(valkey)


@contextlib.asynccontextmanager
async def watched(store: FleetStore, engine: Server) -> AsyncIterator[None]:
    """A monitor at work on one engine."""
    await store.register(WorkerSpec(url=engine.url))
    async with make_client() as client:
        settings = MonitorSettings(poll_interval_s=0.2, redis_url="unix:///unused")
        task = asyncio.create_task(MonitorService(FleetStore(store.client), client, settings).run())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


@contextlib.asynccontextmanager
async def in_flight(engine: Server, count: int) -> AsyncIterator[None]:
    """So many clients past Forebay, each asking for something long, and again as soon as it is answered."""
    body = chat("", "tell me more", 1800)["body"]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:

        async def ask_for_ever() -> None:
            while True:
                (await client.post(f"{engine.url}/v1/chat/completions", json=body)).raise_for_status()

        clients = [asyncio.create_task(ask_for_ever()) for _ in range(count)]
        try:
            yield
        finally:
            for each in clients:
                each.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


async def monitored(store: FleetStore) -> WorkerView:
    """The worker, once its load was sampled after this call."""
    asked_s = await store.now()
    async with asyncio.timeout(60):
        while True:
            [worker] = (await store.view()).workers
            if worker.load is not None and worker.load.sampled_at > asked_s:
                return worker
            await asyncio.sleep(0.02)  # the monitor signals nobody


async def swept(store: FleetStore) -> Load:
    """The load that `forebay workers loads` finds now."""
    async with make_client() as client:
        [found] = await sweep_fleet(store, client)
    assert found.load is not None, found.reason
    assert found.verdict is None, "a memo stands, and yet the probe was made"
    return found.load


async def between_pages(engine: Server, look: Callable[[], Awaitable[Load]]) -> tuple[Page, Load, Page]:
    """A reading between two pages of the engine that agree on who runs, who waits and how many are done."""
    for _ in range(MOST_TRIES):
        before = await asyncio.to_thread(engine.page)
        load = await look()
        after = await asyncio.to_thread(engine.page)
        if (queue(before), before.total(DONE)) == (queue(after), after.total(DONE)):
            return before, load, after
    raise AssertionError(f"{engine.id} was never at rest between two pages")


def queue(page: Page) -> tuple[float, float]:
    return page.total(RUNNING), page.total(WAITING)


def assert_equal_to_page(load: Load, page: Page) -> None:
    """Everything we read is what the page says: of an engine at rest."""
    assert (load.running, load.waiting) == queue(page)
    assert load.kv_usage_mean == load.kv_usage_max == page.total(KV_USAGE)
    assert load.prompt_tokens_total == page.total("vllm:prompt_tokens_total")
    assert load.generation_tokens_total == page.total(GENERATED)
    assert load.success_total == page.total(DONE)
    assert load.process_start_time == page.total("process_start_time_seconds")
    size, blocks = (
        int(page.label("vllm:cache_config_info", name)) for name in ("block_size", "num_gpu_blocks")
    )
    assert (load.block_size, load.num_gpu_blocks, load.capacity_tokens) == (size, blocks, size * blocks)


async def test_an_idle_engine_is_found_and_read_as_it_says_of_itself(
    vllms: Vllms, store: FleetStore, say: Say
) -> None:
    engine = vllms.eight
    await asyncio.to_thread(engine.until, idle)
    probes = engine.log.count("GET /v1/loads")
    async with watched(store, engine):
        before, load, _ = await between_pages(engine, lambda: load_of(monitored(store)))
        assert_equal_to_page(load, before)
        before, again, _ = await between_pages(engine, lambda: swept(store))
        assert_equal_to_page(again, before)
        worker = await monitored(store)
    assert (worker.state, worker.runtime, worker.version) == (WorkerState.READY, Runtime.VLLM, "0.32.0")
    assert (worker.models, worker.max_model_len) == (frozenset({MODEL}), 2048)
    assert load.source is again.source is LoadSource.METRICS
    memos = await store.memos([worker.id])
    assert memos[worker.id].reason == "status 404"
    assert engine.log.count("GET /v1/loads") == probes + 1, "asked again in spite of the memo"
    say(f"idle: running {load.running}, waiting {load.waiting}, KV {load.kv_usage_max}, as on its page")


async def load_of(reading: Awaitable[WorkerView]) -> Load:
    load = (await reading).load
    assert load is not None
    return load


async def test_an_engine_with_forty_requests_in_flight_is_read_as_it_says_of_itself(
    vllms: Vllms, store: FleetStore, say: Say
) -> None:
    engine = vllms.eight
    await asyncio.to_thread(engine.until, idle)
    async with watched(store, engine):
        await monitored(store)
        async with in_flight(engine, 40):
            await asyncio.to_thread(engine.until, lambda page: queue(page) == (8, 32))
            for name, look in (
                ("monitor", lambda: load_of(monitored(store))),
                ("sweep", lambda: swept(store)),
            ):
                before, load, after = await between_pages(engine, look)
                assert (load.running, load.waiting) == queue(before) == (8, 32)
                assert load.kv_usage_max is not None
                assert 0 < before.total(KV_USAGE) <= load.kv_usage_max <= after.total(KV_USAGE)
                assert load.generation_tokens_total is not None
                assert before.total(GENERATED) <= load.generation_tokens_total <= after.total(GENERATED)
                say(
                    f"{name}, 40 in flight: running {load.running}, waiting {load.waiting}, "
                    f"KV {load.kv_usage_max:.4f}; pages: {queue(before)}, "
                    f"KV {before.total(KV_USAGE):.4f} to {after.total(KV_USAGE):.4f}"
                )
        await asyncio.to_thread(engine.until, idle)


async def test_the_verdict_on_the_probe_is_absent(vllms: Vllms, store: FleetStore) -> None:
    await store.register(WorkerSpec(url=vllms.two.url))
    async with make_client() as client:
        [found] = await sweep_fleet(store, client)
    assert found.verdict is not None
    assert (found.verdict.verdict, found.verdict.reason) == (Verdict.ABSENT, "status 404")
    assert found.load is not None
    assert found.load.source is LoadSource.METRICS


# -- what engines refuse, and what we give up --------------------------------------------------------------


@pytest.mark.parametrize("forebay", [{"FOREBAY_INITIAL_LIMIT": "16"}], indirect=True)  # more than it takes
def test_an_engine_whose_queue_is_full_slows_us_down_and_fails_nothing(
    vllms: Vllms, forebay: Forebay, tmp_path: Path, say: Say
) -> None:
    engine = vllms.bounded
    before = engine.until(idle).total(REFUSED)
    lines = [chat(f"line-{n}", f"word {n}", 64) for n in range(60)]
    forebay.workers.add(engine.url)
    batch = forebay.submit(write(tmp_path / "in.jsonl", lines))
    looks = []
    record = forebay.wait(batch.id, on_progress=lambda seen: looks.append(seen.workers[0]), timeout_s=600)
    refused = engine.page().total(REFUSED) - before
    assert refused > 0, "the engine was never full: this test shows nothing"
    assert (record.status, record.request_counts.completed) == (BatchStatus.COMPLETED, 60)
    results = list(forebay.results(batch.id))
    assert_whole(results, lines)
    assert sum(result["forebay"]["attempts"] for result in results) == 60 + refused
    assert {look.breaker for look in looks} == {BreakerState.CLOSED}
    worker = forebay.workers.show(engine.url)
    assert (worker.breaker_trips, worker.breaker_reason) == (0, "")
    limits = [look.limit for look in looks]
    assert min(limits) < 16
    say(f"queue full: {refused:.0f} of {60 + refused:.0f} attempts refused, limit {limits}, breaker closed")


def test_a_prompt_over_the_context_keeps_the_engines_400_and_is_nobodys_fault(
    vllms: Vllms, forebay: Forebay, tmp_path: Path
) -> None:
    engine = vllms.two
    long = [chat(f"long-{n}", "too long " * 3000, 8) for n in range(4)]
    short = [chat(f"short-{n}", "hello", 8) for n in range(4)]
    forebay.workers.add(engine.url)
    batch = forebay.submit(write(tmp_path / "in.jsonl", [*long, *short]))
    record = forebay.wait(batch.id, timeout_s=300)
    assert record.request_counts.model_dump() == {"total": 8, "completed": 4, "failed": 4}
    saved = forebay.save_results(batch.id, tmp_path / "out.jsonl")
    assert saved.errors is not None
    assert_whole(read(tmp_path / "out.jsonl"), short)
    for result in read(saved.errors):
        assert (result["response"]["status_code"], result["error"]) == (400, None)
        assert "context length" in result["response"]["body"]["error"]["message"]
        assert result["forebay"]["attempts"] == 1
    worker = forebay.workers.show(engine.url)
    assert (worker.breaker, worker.breaker_trips) == (BreakerState.CLOSED, 0)


def test_a_cancelled_batch_frees_its_engine(vllms: Vllms, forebay: Forebay, tmp_path: Path) -> None:
    engine = vllms.two
    begun = engine.until(idle).total(GENERATED)
    lines = [chat(f"line-{n}", "go on", 1900) for n in range(40)]
    forebay.workers.add(engine.url)
    batch = forebay.submit(write(tmp_path / "in.jsonl", lines))
    full = engine.until(lambda page: page.total(RUNNING) == 2 and page.total(WAITING) > 0)
    forebay.cancel(batch.id)
    record = forebay.wait(batch.id, timeout_s=60)
    ended = engine.until(idle, within_s=30)
    assert record.status is BatchStatus.CANCELLED
    assert record.request_counts.completed + record.request_counts.failed == 40
    # What it did not write shows that it stopped, and did not just come to the end of what it had.
    assert ended.total(GENERATED) - begun < sum(queue(full)) * 1900 / 2
    worker = forebay.workers.show(engine.url)
    assert (worker.breaker, worker.leases) == (BreakerState.CLOSED, 0)
