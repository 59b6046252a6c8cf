"""Many dispatchers, loads from long before: each counts what the others took, so that nobody is run over."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter

import pytest

from dispatcher.hedging import Hedging
from dispatcher.lookout import Lookout
from dispatcher.placement import Placement
from dispatcher.scheduler.question import Need
from dispatcher.scheduler.strategies import SchedulerPolicy, Strategies
from dispatcher.speeds import Speeds
from workers.breaker import Verdict
from workers.fleet import WorkerState
from workers.load import Load, LoadSource
from workers.spec import WorkerSpec
from workers.store import FleetStore

pytestmark = pytest.mark.integration

DISPATCHERS = 8
WORKERS = tuple(f"127.0.0.1:{port}" for port in range(1, 9))
LIMIT = 16
IN_FLIGHT = 96
REQUESTS = 480
LOADS_AGE_S = 5.0
BETWEEN_S = 0.01
"""From one request to the next, fleet-wide: a dispatcher's view (0.1 s) misses ten of the others'."""
NO_HERD = 1.3


async def equal_workers(store):
    """Equal, and seen five seconds ago each with another handful of requests: the bait for a herd."""
    now_s = await store.now()
    for number, name in enumerate(WORKERS):
        registered = await store.register(WorkerSpec(url=f"http://{name}"))
        await store.write_state(name, registered.incarnation, WorkerState.READY, models=["m"])
        assert await store.write_limit(name, registered.incarnation, LIMIT, "test", seen=1)
        load = Load(
            source=LoadSource.METRICS,
            sampled_at=now_s - LOADS_AGE_S,
            received_at=now_s - LOADS_AGE_S,
            running=4 + number,
            waiting=number // 3,
            kv_usage_max=0.2 + number / 80,
            capacity_tokens=100_000,
            drain_rate=2.0,
            capacity_rate=1000.0,
        )
        assert await store.write_load(name, registered.incarnation, load)


def placement(client, number, clock):
    speeds = Speeds()
    for name in WORKERS:
        speeds.saw(name, 100, 1.0)
    store = FleetStore(client, rng=random.Random(number))
    return Placement(
        store,
        Lookout(store, speeds, interval_s=0.1, clock=clock),
        Strategies(SchedulerPolicy()),
        speeds,
        Hedging(speeds),
        owner=f"d{number}",
        rng=random.Random(number),
    )


@contextlib.asynccontextmanager
async def dispatchers(client, clock):
    made = [placement(client, number, clock) for number in range(DISPATCHERS)]
    tasks = [asyncio.create_task(one.run()) for one in made]
    yield made
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


async def test_eight_dispatchers_with_loads_five_seconds_old_make_no_herd(valkey):
    store = FleetStore(valkey)
    await equal_workers(store)
    rng = random.Random(3)
    clock_s = 1000.0
    granted, held, crowding = Counter(), [], []
    asked = Need(model="m", prompt_tokens=100, asked_tokens=100, cost_tokens=200)
    async with dispatchers(valkey, lambda: clock_s) as made:
        for _ in range(REQUESTS):
            if len(held) == IN_FLIGHT:
                owner, lease = held.pop(rng.randrange(len(held)))
                owner.give_back(lease, Verdict.SUCCESS)
                await owner.settle_all()
                in_flight = Counter(lease.worker_id for _, lease in held)
                crowding.append(max(in_flight.values()) / (len(held) / len(WORKERS)))
            owner = rng.choice(made)
            lease = await owner.lease(asked, 1)
            held.append((owner, lease))
            granted[lease.worker_id] += 1
            clock_s += BETWEEN_S
    assert sum(granted.values()) == REQUESTS
    assert max(granted.values()) < NO_HERD * REQUESTS / len(WORKERS)
    assert max(crowding) < NO_HERD
