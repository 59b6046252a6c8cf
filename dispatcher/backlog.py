"""Requests that wait for a lease, in the order they shall get one. Pure: no clock, no I/O.

Who asks the fleet for leases is `placement`. Requests of one batch and urgency that no worker can tell apart
stand in one lane; when the head of a lane finds every worker busy, so would the others, and none of them is
asked for. Between batches, what each has had of a model's workers decides (`dues`); requests of no batch go
first.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from dispatcher.dues import Dues
from dispatcher.scheduler.question import Need

Granted = TypeVar("Granted")


_Rank: TypeAlias = tuple[int, int, int]
"""Compared in C: a pass may look at hundreds of requests that then wait on. No two are equal."""


@dataclass(slots=True, eq=False)
class Waiting(Generic[Granted]):
    """One request's place. `urgency`: lower goes first; of one batch the costlier, then the earlier.

    `batch_id` None: it is of no batch. `share`: how much its batch gets beside others. `declined`: the kind
    of room that it was offered and rather waits than takes; None: it was not asked.
    """

    need: Need
    urgency: int
    serial: int
    granted: asyncio.Future[Granted] = field(repr=False)
    batch_id: str | None = None
    share: float = 1.0
    declined: int | None = None
    rank: _Rank = field(init=False)
    key: Hashable = field(init=False)
    """What tells it from others, until it declines room. A pass asks for both hundreds of times."""

    def __post_init__(self) -> None:
        need = self.need
        self.rank = (self.urgency, -need.cost_tokens, self.serial)
        # Contexts of one power of two fit the same workers, nearly always.
        context = need.context_tokens.bit_length()
        self.key = (self.urgency, self.batch_id, need.model, need.strategy, need.tried, context)


class Lane(NamedTuple):
    """One lane: what tells it from others, what its requests have in common, and how many wait in it.

    `declined`: whether they rather wait than take the room that there was.
    """

    key: Hashable
    model: str | None
    urgency: int
    waiting: int
    declined: bool


class Backlog(Generic[Granted]):
    """The lanes. Whoever gave up waiting (a cancelled future) is passed over."""

    def __init__(self) -> None:
        self._lanes: dict[Hashable, list[tuple[_Rank, Waiting[Granted]]]] = {}
        self._dues: defaultdict[str | None, Dues] = defaultdict(Dues)
        """By model: batches that ask for different ones do not take anything from each other."""
        self.announced: Counter[tuple[str | None, int]] = Counter()
        """Requests that are about to join, by model and urgency: whoever brings more counts them already."""
        self._serials = itertools.count()
        self._count = 0

    def __len__(self) -> int:
        """How many wait, those who gave up lately perhaps included."""
        return self._count

    def join(
        self,
        need: Need,
        urgency: int,
        granted: asyncio.Future[Granted],
        *,
        batch_id: str | None = None,
        share: float = 1.0,
    ) -> None:
        """Wait for a lease, which will be the result of ``granted``."""
        self._put(Waiting(need, urgency, next(self._serials), granted, batch_id, share))

    def rejoin(self, waiting: Waiting[Granted]) -> None:
        """Wait on, in the old place: an acquire was refused."""
        if waiting.batch_id is not None:
            self._dues_of(waiting).refund(waiting.batch_id, _charge(waiting))
        self._put(waiting)

    def first(self, lanes: AbstractSet[Hashable] | None = None) -> Waiting[Granted] | None:
        """The first of those in ``lanes``, taken out; None when there is none. ``lanes`` None: of all."""
        best: Hashable = None
        best_place: tuple[int, float, _Rank] | None = None
        for key in list(self._lanes if lanes is None else lanes):
            lane = self._lanes.get(key, [])
            while lane and lane[0][1].granted.done():
                self._take(key)
            if lane:
                place = self._place(lane[0][1])
                if best_place is None or place < best_place:
                    best, best_place = key, place
            else:
                self._lanes.pop(key, None)
        if best_place is None:
            return None
        return self._take(best, charged=True)

    def _place(self, waiting: Waiting[Granted]) -> tuple[int, float, _Rank]:
        ahead = -1.0 if waiting.batch_id is None else self._dues_of(waiting).ahead(waiting.batch_id)
        return (waiting.urgency, ahead, waiting.rank)

    def _put(self, waiting: Waiting[Granted]) -> None:
        heapq.heappush(self._lanes.setdefault(_lane(waiting), []), (waiting.rank, waiting))
        self._count += 1
        if waiting.batch_id is not None:
            self._dues_of(waiting).come(waiting.batch_id)

    def _take(self, lane: Hashable, *, charged: bool = False) -> Waiting[Granted]:
        """The head of a lane, out of it."""
        _, waiting = heapq.heappop(self._lanes[lane])
        self._count -= 1
        if waiting.batch_id is not None:
            dues = self._dues_of(waiting)
            if charged:
                dues.charge(waiting.batch_id, _charge(waiting))
            dues.leave(waiting.batch_id)
        if not self._count:
            self._dues.clear()  # there is room for all: nobody owes anybody anything
        return waiting

    def _dues_of(self, waiting: Waiting[Granted]) -> Dues:
        return self._dues[waiting.need.model]

    def lanes(self) -> Iterator[Lane]:
        """Each lane in which somebody waits."""
        for key, lane in self._lanes.items():
            if lane:
                first = lane[0][1]
                yield Lane(key, first.need.model, first.urgency, len(lane), first.declined is not None)

    def count(self, model: str | None, urgency: int) -> int:
        """How many requests of this urgency wait for a model."""
        heads = ((lane[0][1], len(lane)) for lane in self._lanes.values() if lane)
        return sum(count for head, count in heads if head.need.model == model and head.urgency == urgency)

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
                for _, waiting in lane:
                    waiting.declined = None
                    heapq.heappush(self._lanes.setdefault(_lane(waiting), []), (waiting.rank, waiting))


def _charge(waiting: Waiting[Granted]) -> float:
    return waiting.need.cost_tokens / waiting.share


def _lane(waiting: Waiting[Granted]) -> Hashable:
    return (waiting.key, waiting.declined)
