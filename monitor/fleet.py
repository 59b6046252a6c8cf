"""The fleet as this monitor last saw it: views, memos, who watches what; refreshed by one loop.

Polling workers belongs to ``service``; this only reads Redis and survives its outages.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import structlog

from monitor.clock import RedisClock
from monitor.ownership import owned
from workers.connection import heed_cancellation
from workers.errors import StoreUnavailable

if TYPE_CHECKING:
    from monitor.settings import MonitorSettings
    from workers.fleet import FleetView, WorkerView
    from workers.store import FleetStore, Memo

log = structlog.get_logger()

_MIN_SPACING_S = 0.1
_LOOKS_APART = 2.0
"""Even when every poll wants a look, so many times as long as a look takes belongs to the polls."""
_LOOKING_SHARE = 0.03
"""The part of the time that looking may take before it is done less often."""
_BACKOFF_CAP_S = 5.0
_LIVE_HEARTBEATS = 1.5
"""A monitor is live for so many heartbeats; with beats twice in one, two heartbeats see every change."""


class FleetWatcher:
    """Keeps one look at the fleet fresh. Looks are numbered in the order in which they began."""

    def __init__(
        self, store: FleetStore, settings: MonitorSettings, clock: RedisClock, rng: random.Random
    ) -> None:
        self._store = store
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._wanted = asyncio.Event()
        self._looked = asyncio.Event()
        self._beat_at = 0.0
        self._monitors: tuple[str, ...] = ()
        self._failures = 0
        self._begun = 0
        self._cost_s = 0.0
        self._seen = 0
        self._seen_at = float("-inf")
        self.views: Mapping[str, WorkerView] = {}
        self.memos: Mapping[str, Memo] = {}
        self.mine: frozenset[str] = frozenset()

    @property
    def is_fresh(self) -> bool:
        """Whether Redis answered lately: without a view nothing can be decided, nor written."""
        age_s = asyncio.get_running_loop().time() - self._seen_at
        return age_s <= max(3.0, 3 * self._settings.poll_interval_s)

    def want(self) -> int:
        """Something was written that the next decision needs to see: look soon.

        Returns what ``wait_past`` needs to wait for a look that has begun after this.
        """
        self._wanted.set()
        return self._begun

    async def wait_past(self, number: int) -> None:
        """Until a look later than ``number`` has succeeded, and not long ago."""
        while self._seen <= number or not self.is_fresh:
            await self._looked.wait()

    async def run(self, changed: Callable[[], None]) -> None:
        """Look again and again until cancelled; ``changed`` is called after every look that succeeded."""
        while True:
            heed_cancellation()
            try:
                await self._look()
            except StoreUnavailable as error:
                await self._back_off("redis does not answer; trying on", error)
                continue
            except Exception as error:  # noqa: BLE001 - logged, and tried again
                # One record that somebody spoiled must not end the watch over all the others for good.
                await self._back_off("cannot read the fleet; trying on", error)
                continue
            if self._failures:
                log.info("redis answers again", failures=self._failures)
            self._failures = 0
            heed_cancellation()
            changed()
            spacing_s = max(_MIN_SPACING_S, _LOOKS_APART * self._cost_s)
            await asyncio.sleep(spacing_s)
            await self._pause(self._interval_s() - spacing_s)

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        self._begun += 1
        number = self._begun
        view = await self._store.view()
        self._clock.set(view.now_s, asked_at)
        await self._beat(loop.time())
        self._adopt(view)
        self.memos = await self._store.memos(sorted(self.mine))
        self._seen, self._seen_at = number, loop.time()
        self._cost_s = self._seen_at - asked_at
        self._looked.set()
        self._looked = asyncio.Event()

    def _adopt(self, view: FleetView) -> None:
        self.views = {worker.id: worker for worker in view.workers}
        self.mine = owned(self.views, self._settings.name, self._monitors)

    async def _beat(self, now: float) -> None:
        if now < self._beat_at:
            return
        heartbeat_s = self._settings.heartbeat_s
        self._monitors = await self._store.monitor_heartbeat(
            self._settings.name, _LIVE_HEARTBEATS * heartbeat_s
        )
        self._beat_at = now + heartbeat_s / 2 - _MIN_SPACING_S

    def _interval_s(self) -> float:
        """As often as a poll may come, unless the fleet is so large that looking would be our main work."""
        settings = self._settings
        affordable_s = max(settings.fast_interval_s, self._cost_s / _LOOKING_SHARE)
        return min(affordable_s, settings.poll_interval_s, settings.heartbeat_s / 2)

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._wanted.wait()
        except TimeoutError:
            pass
        self._wanted.clear()

    async def _back_off(self, what: str, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            log.warning(what, error=str(error))
        cap_s = min(_BACKOFF_CAP_S, 0.1 * 2 ** min(self._failures, 10))
        await asyncio.sleep(self._rng.uniform(0.05, cap_s))
