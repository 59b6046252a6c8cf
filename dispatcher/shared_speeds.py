"""Workers' speeds, which dispatchers tell each other through Redis: who comes new need not find out again.

What is learned, and what counts more, is `speeds`' subject. The one door to its key. Methods raise
StoreUnavailable when Redis does not answer.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

from dispatcher.speeds import Speeds
from workers import keys
from workers.connection import AsyncRedis, Refused, text_fields, translated
from workers.scripts import Scripts

INTERVAL_S = 0.2
"""How often news is told, in seconds, if there is any: at a batch's start each moment counts."""
TTL_S = 600
"""What is older may be of another engine behind the same address."""
_TOLD = re.compile(r"rate=(\d+(?:\.\d+)?(?:e[+-]?\d+)?) at=(\d+(?:\.\d+)?)")


class SharedSpeeds:
    """One dispatcher's part in it."""

    def __init__(
        self, client: AsyncRedis, speeds: Speeds, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._scripts = Scripts(client, "dispatcher")
        self._speeds = speeds
        self._clock = clock

    async def tell(self) -> None:
        """Tell what is new since the last time; what cannot be told is told the next time."""
        now_s = self._clock()
        news = self._speeds.news(now_s)
        if not news:
            return
        args: list[str | int | float | bytes] = [TTL_S]
        for worker, speed in news.items():
            args += [worker, repr(speed)]
        await self._scripts.run("note_speeds", [keys.SPEEDS.of()], args)
        self._speeds.told(news, now_s)

    async def listen(self, now_s: float) -> None:
        """Learn what others told lately. `now_s`: Redis' clock. What nobody of us wrote is not heard."""
        try:
            with translated():
                fields = text_fields(await self._client.hgetall(keys.SPEEDS.of()))
        except (Refused, UnicodeDecodeError):  # no hash, or no text
            return
        told = {worker: _read(text, now_s) for worker, text in fields.items()}
        self._speeds.hear({worker: speed for worker, speed in told.items() if speed is not None})


def _read(text: str, now_s: float) -> float | None:
    """A speed that was told lately; None: it is old, or no speed, whoever wrote that."""
    told = _TOLD.fullmatch(text)
    if told is None or now_s - float(told[2]) >= TTL_S:
        return None
    speed = float(told[1])
    return speed if 0 < speed < math.inf else None
