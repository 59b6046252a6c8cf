"""The simulated engines of one run: fresh for it, in processes of their own, in trouble when that is due.

Belongs here: starting, trouble, what the engines have seen. Does not belong here: which trouble there is
(``scenarios``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import aiohttp
from bench_fleet import Engine

from benchmarks.peers.scenarios import PREFILL, Scenario
from forebay.simulator.calls import CHAT
from forebay.simulator.control import FAULT_PATH, STATE_PATH
from forebay.simulator.process import EngineProcess, start_engine
from forebay.simulator.settings import EngineSettings

_POLL_S = 0.05


def settings_of(scenario: Scenario, runtime: str | None) -> list[EngineSettings]:
    """The engines of a scenario. ``runtime`` None: the mix that it names."""
    engines = [replace(engine, runtime=runtime or engine.runtime) for engine in scenario.engines]
    return [_settings(engine, scenario) for engine in engines]


def _settings(engine: Engine, scenario: Scenario) -> EngineSettings:
    changed: dict[str, Any] = {"answer_tokens_sigma": scenario.sigma, "log_requests": 0}
    if scenario.prefixes:
        changed |= {"prefill_tokens_per_s": PREFILL * engine.tokens_per_s, "prefix_caching": True}
    return EngineSettings.model_validate(engine.settings().model_dump() | changed)


class Fleet:
    """Running engines."""

    def __init__(
        self, scenario: Scenario, engines: Sequence[EngineProcess], session: aiohttp.ClientSession
    ) -> None:
        self._scenario = scenario
        self._engines = engines
        self._session = session
        self._before_the_kill: dict[int, dict[str, Any]] = {}

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self._engines]

    async def asked(self) -> list[dict[str, int]]:
        """How often each engine was asked for each path; of a killed one, until its end."""
        return [(await self._state(place))["stats"]["by_path"] for place in range(len(self._engines))]

    async def _state(self, place: int) -> dict[str, Any]:
        if place in self._before_the_kill:
            return self._before_the_kill[place]
        async with self._session.get(self._engines[place].url + STATE_PATH) as answer:
            state: dict[str, Any] = await answer.json()
            return state

    async def _until_asked(self, before: int) -> None:
        # Looked for again and again: it is another process, which cannot signal us.
        while sum(paths.get(CHAT, 0) for paths in await self.asked()) <= before:  # noqa: ASYNC110 - see above
            await asyncio.sleep(_POLL_S)

    @contextlib.asynccontextmanager
    async def trouble(self, after_s: float) -> AsyncIterator[asyncio.Event]:
        """What the scenario has in store, so long after the first answer that is asked for in the block.

        The event tells that it has happened; where nothing is in store it is set.
        """
        happened = asyncio.Event()
        if self._scenario.place is None or self._scenario.from_start:
            happened.set()
            yield happened
            return
        before = sum(paths.get(CHAT, 0) for paths in await self.asked())
        task = asyncio.create_task(self._happen(after_s, before, happened))
        try:
            yield happened
        finally:
            task.cancel()
            await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    async def prepare(self) -> None:
        """Set what is wrong from the start."""
        if self._scenario.from_start:
            await self._set_faults()

    async def _happen(self, after_s: float, before: int, happened: asyncio.Event) -> None:
        await self._until_asked(before)
        await asyncio.sleep(after_s)
        if self._scenario.kills:
            await self._kill()
        else:
            await self._set_faults()
        happened.set()

    async def _kill(self) -> None:
        place = self._scenario.place
        assert place is not None, "only a scenario with an engine in trouble kills"
        self._before_the_kill[place] = await self._state(place)
        # Not waited for here: while a run is measured, nothing else that we started may be counted as ended.
        self._engines[place].process.kill()

    async def _set_faults(self) -> None:
        place = self._scenario.place
        assert place is not None, "only a scenario with an engine in trouble has faults"
        for fault in self._scenario.faults:
            url = self._engines[place].url + FAULT_PATH
            async with self._session.post(url, data=fault.model_dump_json()) as answer:
                answer.raise_for_status()


@contextlib.asynccontextmanager
async def running(scenario: Scenario, runtime: str | None) -> AsyncIterator[Fleet]:
    """Fresh engines while the block runs."""
    starting = [
        asyncio.to_thread(start_engine, settings, timeout_s=60.0)
        for settings in settings_of(scenario, runtime)
    ]
    started = await asyncio.gather(*starting, return_exceptions=True)
    engines = [each for each in started if isinstance(each, EngineProcess)]
    try:
        for each in started:
            if isinstance(each, BaseException):
                raise each
        async with aiohttp.ClientSession() as session:
            fleet = Fleet(scenario, engines, session)
            await fleet.prepare()
            yield fleet
    finally:
        for engine in engines:
            engine.kill()
