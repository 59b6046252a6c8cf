"""Loads of many workers on their way to Redis, written together: a step for each would cost more than a poll.

What a load is and when it is written belongs to ``watch`` and ``poller``.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from workers.connection import heed_cancellation

if TYPE_CHECKING:
    from workers.load import Load
    from workers.store import FleetStore

GATHER_S = 0.01
"""How long the first load waits for others: little beside the time between two polls of a worker."""
MOST = 256
"""Loads in one step: longer ones would keep other clients of Redis waiting."""


class LoadWriter:
    """Shared by the pollers of one monitor; ``run`` belongs to one task."""

    def __init__(self, store: FleetStore) -> None:
        self._store = store
        self._waiting: list[tuple[tuple[str, int, Load], asyncio.Future[bool]]] = []
        self._wanted = asyncio.Event()

    async def write(self, worker: str, incarnation: int, load: Load) -> bool:
        """Write it soon, as ``FleetStore.write_load`` does. Raises StoreUnavailable."""
        heed_cancellation()  # one that was lost before would wait here for a writer that has ended
        written: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append(((worker, incarnation, load), written))
        self._wanted.set()
        return await written

    async def run(self) -> None:
        """Write until cancelled; whoever waits then is cancelled, too."""
        try:
            await self._write_on()
        finally:
            for _given, written in self._waiting:
                written.cancel()

    async def _write_on(self) -> None:
        while True:
            heed_cancellation()  # before the wait: pollers that have ended wake nobody
            await self._wanted.wait()
            await asyncio.sleep(GATHER_S)
            batch, self._waiting = self._waiting[:MOST], self._waiting[MOST:]
            if not self._waiting:
                self._wanted.clear()
            await self._write(batch)

    async def _write(self, batch: list[tuple[tuple[str, int, Load], asyncio.Future[bool]]]) -> None:
        try:
            answers = await self._store.write_loads([given for given, _written in batch])
        except asyncio.CancelledError:
            for _given, written in batch:
                written.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - it is each poller's, who tells an outage from a mistake
            for _given, written in batch:
                if not written.done():
                    written.set_exception(error)
            return
        for (_given, written), answer in zip(batch, answers, strict=True):
            # A poller that ended meanwhile has cancelled its own.
            if not written.done():
                written.set_result(answer)
