"""RQ's bookkeeping, called from the event loop: in one thread, in order, with patience while Redis is away.

Which step is due belongs to `service` and `running`, the steps themselves to `claims` and `queues`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import structlog

from workers.errors import StoreUnavailable

log = structlog.get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

PAUSE_S = (0.2, 5.0)
"""The first and the longest pause between two tries while Redis does not answer, in seconds."""


class Bookkeeping:
    """One dispatcher's bookkeeping thread. `ending`: the service was asked to end; `now`: to end at once."""

    def __init__(self, ending: asyncio.Event, now: asyncio.Event) -> None:
        self._ending = ending
        self._now = now
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rq")

    def close(self) -> None:
        """Wait for the step that runs, and end the thread."""
        self._thread.shutdown(wait=True)

    async def step(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """One step, after those that were asked for before it. Raises what it raises."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))

    async def surely(self, function: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> None:
        """A step that must not be skipped: repeated until Redis answers.

        Raises StoreUnavailable only when the service was asked to end at once.
        """
        await self.until_redis_answers(lambda: self.step(function, *args, **kwargs), ever=True)

    async def until_redis_answers(self, ask: Callable[[], Awaitable[R]], *, ever: bool = False) -> R | None:
        """What `ask` gives; None when the service was asked to end before (with `ever`, it goes on)."""
        pause_s = PAUSE_S[0]
        while ever or not self._ending.is_set():
            try:
                return await ask()
            except StoreUnavailable as error:
                log.warning("waiting for Redis", error=str(error), retry_in_s=pause_s)
                if ever and self._now.is_set():
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, PAUSE_S[1])
        return None
