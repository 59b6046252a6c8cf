"""Engines that hang, refuse, break off, come back as something else: in the end the monitor knows the truth.

A short seeded run is part of the tests. A long one, of 50 engines for two minutes::

    CHAOS_ENGINES=50 CHAOS_S=120 CHAOS_POLL_S=1 pytest tests/acceptance/test_monitor_chaos.py
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from random import Random

import httpx
import pytest

from forebay.simulator.faults import (
    AnswerFault,
    BrokenMetricsFault,
    CutBodyFault,
    HangFault,
    LoadsFault,
    ResetFault,
    SlowFault,
)
from forebay.simulator.server import SimulatedEngine
from forebay.simulator.settings import EngineSettings
from monitor.watch import EAGER_POLLS
from workers.fleet import WorkerState
from workers.load import LoadSource
from workers.spec import WorkerSpec, worker_id

ENGINES = int(os.environ.get("CHAOS_ENGINES", "12"))
LASTS_S = float(os.environ.get("CHAOS_S", "5"))
POLL_S = float(os.environ.get("CHAOS_POLL_S", "0.2"))
SEED = int(os.environ.get("CHAOS_SEED", "7"))

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(120 + LASTS_S)]

SHORTEST_LIFE_S = 1.1
"""No engine starts faster; start times so near to each other are taken for one."""
POLLED = ("/metrics", "/v1/loads")
ASKED = (*POLLED, "/v1/models", "/version")
REQUEST = {"model": "sim-model", "prompt": "x", "max_tokens": 4000, "ignore_eos": True}


class Place:
    """One address, at which one engine after the other lives."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._port = 0
        self.lives = 0

    async def begin(self) -> None:
        """The next life: either runtime; vLLM with or without ``/v1/loads``, as after an upgrade."""
        runtime = self._rng.choice(("vllm", "sglang"))
        served = runtime == "sglang" or self._rng.random() < 0.3
        faults = (LoadsFault(served=True),) if served and runtime == "vllm" else ()
        self.native = served
        self.engine = SimulatedEngine(
            EngineSettings(runtime=runtime, port=self._port, slots=4, faults=faults)
        )
        await self.engine.__aenter__()
        self._port = self.engine.port
        self.lives += 1
        self._began_s = asyncio.get_running_loop().time()

    async def end(self) -> None:
        await self.engine.__aexit__(None, None, None)

    async def suffer(self) -> None:
        """Something happens to it."""
        if self._rng.random() < 0.2 and asyncio.get_running_loop().time() - self._began_s > SHORTEST_LIFE_S:
            await self.end()
            await asyncio.sleep(self._rng.choice((0.0, 0.0, 2 * POLL_S)))
            await self.begin()
            return
        paths = self._rng.choice((POLLED, ASKED, ("/metrics",), ("/v1/loads",)))
        for_s = self._rng.uniform(0.5, 8) * POLL_S
        kind = self._rng.choice((HangFault, CutBodyFault, ResetFault, AnswerFault, BrokenMetricsFault))
        match kind.__name__:
            case "AnswerFault":
                fault = AnswerFault(paths=paths, status=self._rng.choice((500, 503, 429)), for_s=for_s)
            case "BrokenMetricsFault":
                fault = BrokenMetricsFault(for_s=for_s)
            case _:
                fault = kind(paths=paths, for_s=for_s)
        self.engine.control(fault)

    def calm(self) -> None:
        """Nothing is amiss any more; it still stands still."""
        self.engine.clear()
        self.engine.control(SlowFault(factor=0.0))
        if self.native and self.engine.settings.runtime == "vllm":
            self.engine.control(LoadsFault(served=True))

    @property
    def polls(self) -> int:
        """Polls so far; one that asks for both pages is one."""
        by_path = self.engine.stats.by_path
        return by_path["/v1/loads" if self.native else "/metrics"]


async def torment(places: list[Place], rng: Random) -> None:
    """Let things happen all over the fleet, for the time of the run."""
    async with asyncio.TaskGroup() as happenings:
        end_s = asyncio.get_running_loop().time() + LASTS_S
        busy: set[Place] = set()

        async def happen(place: Place) -> None:
            busy.add(place)
            await place.suffer()
            busy.discard(place)

        while asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(POLL_S / len(places))
            place = rng.choice(places)
            if place not in busy:
                happenings.create_task(happen(place))


@contextlib.asynccontextmanager
async def known_work(places: list[Place], rng: Random):
    """Every engine stands still with work of its own: up to four requests run, more wait."""
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        wanted = {place: rng.randrange(7) for place in places}
        for place in places:
            place.engine.control(SlowFault(factor=0.0))
        asked = [
            asyncio.create_task(client.post(f"{place.engine.url}/v1/completions", json=REQUEST))
            for place, count in wanted.items()
            for _ in range(count)
        ]

        def there() -> bool:
            loads = {place: place.engine.load() for place in places}
            return all(
                loads[place].running + loads[place].waiting == count for place, count in wanted.items()
            )

        async with asyncio.timeout(60):
            while not there():  # noqa: ASYNC110 - the engines have no event for it
                await asyncio.sleep(0.01)
        yield
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


@pytest.fixture
async def places(rig):
    """The addresses, with their first engines, registered."""
    rng = Random(SEED)
    places = [Place(Random(rng.random())) for _ in range(ENGINES)]
    for place in places:
        await place.begin()
        await rig.store.register(WorkerSpec(url=place.engine.url))
    yield places
    for place in places:
        await place.end()


async def test_after_any_chaos_every_load_is_true_within_two_polls_and_every_memo_is_right(rig, places):
    rng = Random(SEED)
    rig._start(
        "monitor",
        poll_interval_s=POLL_S, poll_budget_s=2 * POLL_S, fast_interval_s=POLL_S / 4, stall_after_s=3600,
        readiness_interval_s=10 * POLL_S, log_level="debug",
    )  # fmt: skip
    await rig.ready()
    await torment(places, rng)
    async with known_work(places, rng):
        for place in places:
            place.calm()
        calm_s = await rig.store.now()
        begun = {place: place.polls for place in places}
        needed: dict[Place, int] = {}
        wrong: dict[Place, str] = {}

        async def all_true():
            polls = {place: place.polls - begun[place] for place in places}
            wrong.clear()
            wrong.update([one async for one in untruths(rig, places, calm_s)])
            for place in places:
                if place in wrong:
                    needed.pop(place, None)
                else:
                    needed.setdefault(place, polls[place])
            return not wrong

        try:
            await rig.until(all_true, "every load and memo is true")
        except AssertionError as error:
            pytest.fail(f"{list(wrong.values())}\n{error}")
    assert sum(place.lives for place in places) > ENGINES
    # The one under way when calm came, the two that are allowed, and one that came while we looked; between
    # them, a quarter of a tick apart, those that follow a change of the limit.
    allowed = 4 + EAGER_POLLS
    assert not {place.engine.url: polls for place, polls in needed.items() if polls > allowed}


async def untruths(rig, places: list[Place], calm_s: float):
    """Of whom something is stored that is not true, and what."""
    view = await rig.store.view()
    workers = {worker.id: worker for worker in view.workers}
    memos = await rig.store.memos(list(workers))
    for place in places:
        worker, true = workers[worker_id(place.engine.url)], place.engine.load()
        source = LoadSource.NATIVE if place.native else LoadSource.METRICS
        stored = worker.load
        if worker.state is not WorkerState.READY or stored is None or stored.sampled_at < calm_s:
            yield place, f"{worker.id} {worker.state}: {worker.reason}"
        elif (stored.source, stored.running, stored.waiting) != (source, true.running, true.waiting):
            yield place, f"{worker.id}: {stored} is not {true} from {source}"
        elif (worker.id in memos) == place.native:
            yield place, f"{worker.id}: memo {memos.get(worker.id)}, native {place.native}"
        elif worker.runtime != place.engine.settings.runtime:
            yield place, f"{worker.id}: {worker.runtime}, is {place.engine.settings.runtime}"
