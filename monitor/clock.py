"""Redis' clock, carried forward on our own monotonic one: no round trip for a stamp."""

from __future__ import annotations

import time
from collections.abc import Callable


class RedisClock:
    """Set from every view of the fleet; between two of them, our clock's drift is microseconds."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._offset_s = time.time() - monotonic()

    def set(self, redis_s: float, asked_at: float) -> None:
        """Redis said ``redis_s`` to a question asked at ``asked_at`` of our clock and answered just now."""
        self._offset_s = redis_s - (asked_at + self._monotonic()) / 2

    def now(self) -> float:
        """Redis' time in seconds, right to half a round trip."""
        return self._monotonic() + self._offset_s
