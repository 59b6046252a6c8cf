"""What goes wrong in a benchmark's fleet, when, and how soon a batch could end all the same.

Belongs here: the scenarios, their injection, the bound they leave. The fleet is `bench_fleet`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import httpx
from bench_fleet import Engine, Rig

from forebay.simulator.control import FAULT_PATH
from forebay.simulator.faults import AnswerFault

REFUSED_S = 5.0
"""How long the worker that answers 503 does so."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Places in the fleet: of the engine that is killed, and of the one that answers 503 for a while.

    None: no engine. Both begin at the same moment.
    """

    killed: int | None = None
    refusing: int | None = None


SCENARIOS = {
    "calm": Trouble(),
    "killed": Trouble(killed=2),
    "503": Trouble(refusing=0),
    "killed+503": Trouble(killed=2, refusing=0),
}
"""For `bench_fleet.MIXED`: killed is the worker of speed 2, and one of speed 1 answers 503."""


@contextlib.asynccontextmanager
async def happening(rig: Rig, trouble: Trouble, after_s: float) -> AsyncIterator[None]:
    """Let it happen so long after the block began. A block that ends sooner is a mistake of its figures."""
    task = asyncio.create_task(_happen(rig, trouble, after_s))
    try:
        yield
        if not task.done():
            raise RuntimeError("the batch ended before the trouble began")
        await task
    finally:
        task.cancel()


async def _happen(rig: Rig, trouble: Trouble, after_s: float) -> None:
    await asyncio.sleep(after_s)
    if trouble.killed is not None:
        rig.engines[trouble.killed].kill()
    if trouble.refusing is not None:
        fault = AnswerFault(status=503, body='{"error": "out of order"}', for_s=REFUSED_S)
        async with httpx.AsyncClient() as client:
            url = rig.engines[trouble.refusing].url + FAULT_PATH
            (await client.post(url, content=fault.model_dump_json())).raise_for_status()


def remaining_bound_s(
    tokens: Sequence[int], engines: Sequence[Engine], trouble: Trouble, after_s: float
) -> float:
    """When the capacity that remains could end the work, counted from the start.

    With W tokens of work, C the whole capacity, k that of the killed worker and r that of the refusing one,
    in tokens per second, and t = `after_s`::

        C t + (C - k) (T - t) - r REFUSED_S = W,  so  T = t + (W - C t + r REFUSED_S) / (C - k)

    It may not be reached even in theory: the killed worker takes what it had begun with it, which counts
    here as work done. The longest answer alone on the fastest worker that lives is a bound as well.
    """
    whole = sum(engine.capacity for engine in engines)
    killed = engines[trouble.killed].capacity if trouble.killed is not None else 0.0
    refused = engines[trouble.refusing].capacity * REFUSED_S if trouble.refusing is not None else 0.0
    alive = [engine for place, engine in enumerate(engines) if place != trouble.killed]
    fluid_s = after_s + (sum(tokens) - whole * after_s + refused) / (whole - killed)
    fastest = max(engine.tokens_per_s for engine in alive)
    return max(fluid_s, max(tokens) / fastest)
