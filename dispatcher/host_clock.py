"""This host's clock beside Redis': whether RQ may go by it.

RQ stamps a claim with the clock of whoever holds it, and takes it over by the clock of whoever looks. A host
half a minute ahead would take everybody's jobs over again and again, and lines be charged with deaths; one
that is behind would lose its own. All else of ours goes by Redis' clock. Who asks, and when, is `presence`'
subject.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from workers.connection import SyncRedis, translated

log = structlog.get_logger(__name__)

MOST_OFF_S = 4.0
"""So far a host's clock may be off, in seconds. Two hosts may then be twice as far apart: less than any time
after which one does away with what the other left (`presence.CLAIM_TTL_S`, `upkeep.UNREGISTERED_S`)."""


class HostClock:
    """One process' view of its host's clock. Until `compare` was called, it is in order."""

    def __init__(self, connection: SyncRedis, host_clock: Callable[[], float] = time.time) -> None:
        """`host_clock` gives seconds since 1970."""
        self._connection = connection
        self._host_clock = host_clock
        self.is_off = False

    def compare(self) -> None:
        """Ask Redis for its time, and say so when the judgement changes. Raises StoreUnavailable.

        An answer that took too long to tell anything changes nothing.
        """
        before = self._host_clock()
        with translated():
            seconds, micros = self._connection.time()
        after = self._host_clock()
        off_s = least_off(before, seconds + micros / 1e6, after)
        if abs(off_s) > MOST_OFF_S:
            if not self.is_off:
                log.error(
                    "this host's clock is off; no jobs are taken until that is mended",
                    ahead_of_redis_s=round(off_s, 1),
                )
            self.is_off = True
        elif self.is_off and 0 <= after - before <= MOST_OFF_S:
            log.warning("this host's clock agrees with Redis' again; jobs are taken")
            self.is_off = False


def least_off(before: float, theirs: float, after: float) -> float:
    """How far a clock is ahead of theirs at least; below 0: behind. Theirs was read between the two."""
    if theirs < before:
        return before - theirs
    return min(0.0, after - theirs)
