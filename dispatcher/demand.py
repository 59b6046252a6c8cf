"""What of several dispatchers' requests found no room, and what each leaves to the others. Pure.

A dispatcher that gives every slot it frees to the next of its own requests leaves others none, however urgent
what waits there is. So each tells what waits in vain, and leaves slots free: to more urgent requests as many
as wait; to equally urgent ones those that it has of a worker beyond its part. How it is told is
`shared_demand`'s subject, whose requests go first within one dispatcher `backlog`'s.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from dispatcher.scheduler.fleet import FleetModel


class Demand(msgspec.Struct, frozen=True, array_like=True):
    """What one dispatcher has waiting for a model: the most urgent of it, and how many are as urgent.

    ``model`` None: any. ``urgency``: lower goes first. ``beyond``: workers no faster have room that all of
    them declined (tokens per second of one request); 0: whoever has room is welcome.
    """

    model: str | None
    urgency: int
    count: int
    beyond: float = 0.0

    @property
    def sensible(self) -> bool:
        """Whether a dispatcher of ours could have told it: others can write what it is told by."""
        return self.count > 0 and 0 <= self.beyond < math.inf


class Courtesy:
    """What one dispatcher leaves to others between two looks."""

    def __init__(
        self, others: Iterable[Sequence[Demand]] = (), held: Mapping[str, int] | None = None
    ) -> None:
        """``others``: what each other dispatcher told. ``held``: the leases that this one has, by worker."""
        demands = [demand for told in others for demand in told]
        self._demands = sorted(demands, key=lambda demand: demand.urgency)
        self._held = held or {}
        self._rivals = Counter((demand.model, demand.urgency) for demand in demands)

    def __bool__(self) -> bool:
        """Whether anything waits elsewhere."""
        return bool(self._demands)

    def begin(self, fleet: FleetModel, now_s: float) -> Leaving:
        """Begin a pass over this fleet."""
        return Leaving(self._demands, self._rivals, self._held, fleet, now_s)


class Leaving:
    """The slots that one pass leaves free. They count as taken until ``end``."""

    def __init__(
        self,
        demands: Sequence[Demand],
        rivals: Mapping[tuple[str | None, int], int],
        held: Mapping[str, int],
        fleet: FleetModel,
        now_s: float,
    ) -> None:
        """Use ``Courtesy.begin`` instead."""
        self._demands = demands
        self._rivals = rivals
        self._held = held
        self._fleet = fleet
        self._now_s = now_s
        self._left = [demand.count for demand in demands]
        self._aside: Counter[str] = Counter()
        self._urgency: int | None = None

    def before(self, urgency: int) -> bool:
        """Set aside what goes before one's own requests of this urgency; whether that was more than before.

        Called with growing urgencies, the most urgent requests first.
        """
        if not self._demands or urgency == self._urgency:
            return False
        self._urgency = urgency
        before = self._aside.total()
        for number, demand in enumerate(self._demands):
            if demand.urgency < urgency:
                self._set_aside(number, demand, fair=False)
            elif demand.urgency == urgency:
                self._set_aside(number, demand, fair=True)
        return self._aside.total() > before

    def _set_aside(self, number: int, demand: Demand, *, fair: bool) -> None:
        fleet = self._fleet
        wanted = fleet.room(demand.model, self._now_s) & ~(fleet.speed <= demand.beyond)
        for place in np.flatnonzero(wanted).tolist():
            worker, limit = fleet.ids[place], int(fleet.limit[place])
            count = min(self._left[number], limit - int(fleet.leases[place]))
            if fair:
                parts = 1 + self._rivals[demand.model, demand.urgency]
                part = math.ceil(limit / parts) if limit >= parts else 0  # then they take turns
                count = min(count, self._held.get(worker, 0) - part - self._aside[worker])
            if count > 0:
                fleet.set_aside(worker, count)
                self._aside[worker] += count
                self._left[number] -= count

    def end(self) -> None:
        """Let the fleet count them as free again."""
        for worker, count in self._aside.items():
            self._fleet.set_aside(worker, -count)
        self._aside.clear()
