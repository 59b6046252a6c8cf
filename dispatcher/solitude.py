"""Who may send now: all together, or one request alone, so that a death of the process has one suspect only.

Which request that is, and what its sender's death means, is the subject of `shard` and `batches.poison`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager


class Solitude:
    """One dispatcher's. Whoever asks to be alone goes before all that have not begun to send."""

    def __init__(self) -> None:
        self._sending = 0
        self._nobody_sends = asyncio.Event()
        self._nobody_sends.set()
        self._asking = 0
        self._nobody_asks = asyncio.Event()
        self._nobody_asks.set()
        self._one = asyncio.Lock()

    @asynccontextmanager
    async def sending(self, alone: Callable[[], Awaitable[object]] | None = None) -> AsyncIterator[None]:
        """Send inside the block, beside others; with `alone` when nobody else does, after it was awaited.

        What `alone` raises comes out, and nothing is sent.
        """
        if alone is None:
            async with self._beside_others():
                yield
        else:
            async with self._alone():
                await alone()
                yield

    @asynccontextmanager
    async def _beside_others(self) -> AsyncIterator[None]:
        while self._asking:
            await self._nobody_asks.wait()
        self._sending += 1
        self._nobody_sends.clear()
        try:
            yield
        finally:
            self._sending -= 1
            if not self._sending:
                self._nobody_sends.set()

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        self._asking += 1
        self._nobody_asks.clear()
        try:
            async with self._one:
                await self._nobody_sends.wait()
                yield
        finally:
            self._asking -= 1
            if not self._asking:
                self._nobody_asks.set()
