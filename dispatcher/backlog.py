"""Requests that wait for a lease, in the order they shall get one. Pure: no clock, no I/O.

Who asks the fleet for leases is `placement`. Requests that no worker can tell apart stand in one lane; when
the head of a lane finds every worker busy, so would the others, and none of them is asked for.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from dispatcher.scheduler.question import Need

Granted = TypeVar("Granted")


_Rank: TypeAlias = tuple[int, int, int]
"""Compared in C: a pass may look at hundreds of requests that then wait on. No two are equal."""


@dataclass(slots=True, eq=False)
class Waiting(Generic[Granted]):
    """One request's place. `urgency`: lower goes first; among equals the costlier, then the earlier.

    `declined`: the kind of room that it was offered and rather waits than takes; None: it was not asked.
    """

    need: Need
    urgency: int
    serial: int
    granted: asyncio.Future[Granted] = field(repr=False)
    declined: int | None = None

    @property
    def rank(self) -> _Rank:
        return (self.urgency, -self.need.cost_tokens, self.serial)


class Backlog(Generic[Granted]):
    """The lanes. Whoever gave up waiting (a cancelled future) is passed over."""

    def __init__(self) -> None:
        self._lanes: dict[Hashable, list[tuple[_Rank, Waiting[Granted]]]] = {}
        self._serials = itertools.count()
        self._count = 0

    def __len__(self) -> int:
        """How many wait, those who gave up lately perhaps included."""
        return self._count

    def join(self, need: Need, urgency: int, granted: asyncio.Future[Granted]) -> None:
        """Wait for a lease, which will be the result of ``granted``."""
        self.rejoin(Waiting(need, urgency, next(self._serials), granted))

    def rejoin(self, waiting: Waiting[Granted]) -> None:
        """Wait on, in the old place: an acquire was refused."""
        heapq.heappush(self._lanes.setdefault(_lane(waiting), []), (waiting.rank, waiting))
        self._count += 1

    def first(self, closed: set[Hashable]) -> Waiting[Granted] | None:
        """The first of all whose lane is not in ``closed``, taken out; None when there is none."""
        best: Hashable = None
        head: tuple[_Rank, Waiting[Granted]] | None = None
        for key in list(self._lanes):
            lane = self._lanes[key]
            while lane and lane[0][1].granted.done():
                heapq.heappop(lane)
                self._count -= 1
            if not lane:
                del self._lanes[key]
            elif key not in closed and (head is None or lane[0][0] < head[0]):
                best, head = key, lane[0]
        if head is None:
            return None
        heapq.heappop(self._lanes[best])
        self._count -= 1
        return head[1]

    def count(self, lanes: set[Hashable]) -> int:
        """How many wait in these lanes; lanes that are no more are taken out of the set."""
        lanes.intersection_update(self._lanes)
        return sum(len(self._lanes[lane]) for lane in lanes)

    @staticmethod
    def lane(waiting: Waiting[Granted]) -> Hashable:
        """The lane that a request stands in."""
        return _lane(waiting)

    @property
    def patient(self) -> int:
        """How many have declined room."""
        return sum(len(lane) for lane in self._lanes.values() if lane and lane[0][1].declined is not None)

    def ask_again(self) -> None:
        """Let those who have declined room be asked for it again."""
        for key, lane in list(self._lanes.items()):
            if lane and lane[0][1].declined is not None:
                del self._lanes[key]
                self._count -= len(lane)
                for _, waiting in lane:
                    waiting.declined = None
                    self.rejoin(waiting)


def _lane(waiting: Waiting[Granted]) -> Hashable:
    need = waiting.need
    # Contexts of one power of two fit the same workers, nearly always.
    return (need.model, need.strategy, need.tried, need.context_tokens.bit_length(), waiting.declined)
