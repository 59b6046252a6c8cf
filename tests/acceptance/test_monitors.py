"""Whole monitor processes over simulated engines: who watches what, and what they see."""

from __future__ import annotations

import asyncio
import signal

import httpx
import pytest

from forebay.simulator.faults import SlowFault
from workers import keys
from workers.breaker import BreakerState

pytestmark = pytest.mark.acceptance

POLLED = ("/metrics", "/v1/loads")
FAST = {"poll_interval_s": 0.2, "heartbeat_s": 0.5}


def polls(engine):
    return sum(engine.stats.by_path[path] for path in POLLED)


async def test_the_workers_of_a_killed_monitor_are_polled_by_the_other(rig):
    engines = [await rig.engine(runtime) for runtime in ("vllm", "sglang") * 4]
    first = rig._start("monitor", name="first", **FAST)
    rig._start("monitor", name="second", **FAST)
    both = {"first", "second"}

    async def live():
        return {*await rig.store.client.zrange(keys.MONITORS.of(), 0, -1)} == both

    await rig.until(live, "both monitors are live")
    await rig.ready()
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = {engine.url: polls(engine) for engine in engines}
    # Whoever asks from now on is the second one.
    await rig.until(
        lambda: all(polls(engine) >= before[engine.url] + 3 for engine in engines), "all are polled again"
    )


async def test_an_engine_that_stands_still_opens_its_breaker_and_its_neighbour_serves_on(rig):
    still, well = [await rig.engine(runtime, tokens_per_s=5.0) for runtime in ("vllm", "vllm")]
    rig._start("monitor", stall_after_s=1.0, breaker__base_s=4000, breaker__cap_s=4000, **FAST)
    await rig.ready()
    still.control(SlowFault(factor=0.0))
    body = {"model": "sim-model", "prompt": "x", "max_tokens": 4000, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=None) as client:
        asked = [
            asyncio.create_task(client.post(f"{engine.url}/v1/completions", json=body))
            for engine in (still, well)
        ]

        async def opened():
            return (await rig.worker(still.url)).breaker is BreakerState.OPEN

        await rig.until(opened, "the breaker opens")
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    stalled = await rig.worker(still.url)
    assert stalled.breaker_reason == "stalled"
    assert stalled.breaker_open_until > await rig.store.now() + 1000  # as it was set, not as by default
    assert (await rig.worker(well.url)).breaker is BreakerState.CLOSED
