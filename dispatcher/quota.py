"""How many requests a dispatcher brings to wait, for each model and in all. Pure.

Few wait for the slots that there are: what waits here could be sent by another dispatcher, and holds memory.
Each model is counted against the slots of those who serve it, so that a model whose workers are full and slow
takes no room from another whose workers idle. And who asks for what is urgent counts only what would not go
after it, so that a batch takes no room from more urgent requests; all bounds are for each urgency, therefore.
Who of the waiting goes where is `assignment`'s subject.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from dispatcher.backlog import Backlog
from dispatcher.scheduler.fleet import FleetModel

MOST_WAITING = 1024
"""Requests that may wait for busy workers, where each of many models has room for a few."""
_WAITING_PER_SLOT = 0.5
_LEAST_WAITING = 16
_LEAST_PATIENT = 256
"""So many requests that wait for a faster worker, or one for each slot, are not counted as waiting: others
may go meanwhile. Each waits for a slot of its own, so with fewer a large fleet's slow workers would find
nobody who wants them."""
_MOST_APART = 4096
"""Requests that keep nobody else from coming may be so many before nothing more is brought: it bounds what
they hold.
"""

_Lanes: TypeAlias = AbstractSet[Hashable]


@dataclass(frozen=True, slots=True)
class _Count:
    """Requests that wait for busy workers, and those that keep nobody else from coming."""

    busy: int
    apart: int


def _count(
    backlog: Backlog[Any], apart: _Lanes, slots: float, urgency: int | None, *of: str | None
) -> _Count:
    """Count those that wait for so many slots, `of` these models; all where none is given."""
    busy = patient = lost = 0
    for lane in backlog.lanes():
        if (of and lane.model not in of) or (urgency is not None and lane.urgency > urgency):
            continue
        if lane.key in apart:
            lost += lane.waiting
        elif lane.declined:
            patient += lane.waiting
        else:
            busy += lane.waiting
    return _Count(busy + max(0, int(patient - max(_LEAST_PATIENT, slots))), lost)


def has_room(backlog: Backlog[Any], fleet: FleetModel, apart: _Lanes, urgency: int | None = None) -> bool:
    """Whether more of this urgency should be brought, whatever it asks for; None: however urgent it is.

    `apart`: lanes for which there is no worker at all, or that wait for few workers while others of their
    model have room. They do not count, within bounds: others need not wait for them.
    """
    slots = float(fleet.limit.sum())
    count = _count(backlog, apart, slots, urgency)
    return count.busy < _enough(slots) and count.apart < _MOST_APART


def has_room_for(
    model: str | None,
    backlog: Backlog[Any],
    fleet: FleetModel,
    apart: _Lanes,
    urgency: int | None = None,
) -> bool:
    """Whether more requests of this urgency for one model should be brought, whatever waits for others,
    within bounds. Those that are about to join count as waiting.
    """
    slots = float(fleet.limit.sum())
    every = _count(backlog, apart, slots, urgency)
    if every.busy + _announced(backlog, urgency) >= max(MOST_WAITING, _enough(slots)):
        return False
    serving = fleet.serving(model)
    if serving is not None:
        slots = float(fleet.limit[serving].sum())
    mine = _count(backlog, apart, slots, urgency, model)
    if mine.apart and every.apart >= _MOST_APART:
        return False
    return mine.busy + _announced(backlog, urgency, model) < _enough(slots)


def _announced(backlog: Backlog[Any], urgency: int | None, *of: str | None) -> int:
    return sum(
        count
        for (model, its_urgency), count in backlog.announced.items()
        if (not of or model in of) and (urgency is None or its_urgency <= urgency)
    )


def others_idle(backlog: Backlog[Any], fleet: FleetModel, apart: _Lanes, now_s: float) -> bool:
    """Whether somebody idles who serves nothing of what waits: something else may be wanted of it."""
    if len(backlog) >= MOST_WAITING:
        return False
    idle = fleet.room(None, now_s)
    for model in {lane.model for lane in backlog.lanes() if lane.key not in apart}:
        serving = fleet.serving(model)
        if serving is None:
            return False
        idle &= ~serving
    return bool(np.count_nonzero(idle))


def _enough(slots: float) -> float:
    return max(_LEAST_WAITING, _WAITING_PER_SLOT * slots)
