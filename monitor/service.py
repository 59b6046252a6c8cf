"""The monitor's loop: every worker polled on its own, at its own pace, and what was found written to Redis.

What one worker's poll asks and writes belongs to ``poller``, which workers are ours to ``fleet``.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from monitor.clock import RedisClock
from monitor.fleet import FleetWatcher
from monitor.loads import LoadWriter
from monitor.poller import Poller
from workers.connection import heed_cancellation

if TYPE_CHECKING:
    import httpx

    from monitor.settings import MonitorSettings
    from workers.store import FleetStore


def _ignore(_source: str, _seconds: float) -> None:
    """Nobody measures."""


class MonitorService:
    """One monitor. It is handed its store and its HTTP client, and closes neither."""

    def __init__(
        self,
        store: FleetStore,
        client: httpx.AsyncClient,
        settings: MonitorSettings,
        *,
        environ: Mapping[str, str] = os.environ,
        rng: random.Random | None = None,
        on_poll: Callable[[str, float], None] = _ignore,
    ) -> None:
        """``on_poll`` hears of every poll: where the load came from, and the seconds it took."""
        self._store = store
        self._client = client
        self._settings = settings
        self._environ = environ
        self._rng = rng or random.Random()
        self._on_poll = on_poll
        self._clock = RedisClock()
        self.fleet = FleetWatcher(store, settings, self._clock, self._rng)
        self._loads = LoadWriter(store)
        self._pollers: dict[str, asyncio.Task[None]] = {}
        self._awaken: dict[str, Callable[[], None]] = {}
        """By worker: has its poller see whether the last look is a reason to poll before it is due."""

    async def run(self) -> None:
        """Watch the fleet until cancelled. Outages of Redis or of workers never end it."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._loads.run())
            await self.fleet.run(lambda: self._assign(tasks))

    def _assign(self, tasks: asyncio.TaskGroup) -> None:
        """One poller for every worker of ours, and no other; each sees what was just looked at."""
        for worker in self._pollers.keys() - self.fleet.mine:
            self._pollers.pop(worker).cancel()
            self._awaken.pop(worker, None)
        for worker in self.fleet.mine - self._pollers.keys():
            self._pollers[worker] = tasks.create_task(self._poll_on(worker), name=f"poll {worker}")
        for awaken in self._awaken.values():
            awaken()

    async def _poll_on(self, worker: str) -> None:
        loop = asyncio.get_running_loop()
        poller = Poller(
            worker,
            store=self._store,
            loads=self._loads,
            fleet=self.fleet,
            client=self._client,
            settings=self._settings,
            clock=self._clock,
            environ=self._environ,
            on_poll=self._on_poll,
        )
        early = asyncio.Event()
        self._awaken[worker] = lambda: early.set() if poller.should_be_early() else None
        # Spread the fleet over the interval instead of asking everybody at once.
        await asyncio.sleep(self._rng.uniform(0, min(0.2, self._settings.poll_interval_s / 4)))
        due = loop.time()
        while True:
            fast = await poller.turn()
            early.clear()
            heed_cancellation()
            # Counted from when the poll was due, not from when it began: being woken late must not add up.
            due += self._settings.fast_interval_s if fast else self._settings.poll_interval_s
            due = max(due, loop.time())
            try:
                async with asyncio.timeout_at(due):
                    await early.wait()
                due = loop.time()
            except TimeoutError:
                pass
