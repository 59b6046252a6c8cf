"""The fleet as decisions see it: one view in columns, kept true between views by this dispatcher's own
changes.

How numbers become scores belongs to ``scorers``; who may be used at all, to ``filters``. Columns hold one
number per worker in the order of ``ids``, which is sorted: the order workers are listed in can make no
difference. NaN is unknown.

Each column is "now": the sample, plus the leases that all dispatchers took since it (the view counts
them), plus what this dispatcher did since the view. A change is told once, after Redis agreed to it and
only to the model made from a view taken before it; a new view has it already.
"""

from __future__ import annotations

import math
from functools import lru_cache
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from workers.breaker import BreakerState
from workers.fleet import WorkerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from dispatcher.scheduler.question import Column, Mask, Need
    from workers.fleet import FleetView, WorkerView
    from workers.load import Load

Row = TypeVar("Row")

UNTIL_NEXT_VIEW = math.inf
LARGEST = 1e15
"""Counts and rates are cut here, and rates at its inverse, so that no sum, product or quotient overflows."""


class FleetModel:
    """A view that is kept current. Making one costs a few microseconds per worker; reading it, nothing.

    ``speeds``: tokens per second and sequence, by worker, of those whose speed is known.
    ``stale_after_s``, ``dead_after_s``: from the first to the second age of its sample a load fades to
    unknown.
    """

    def __init__(
        self,
        view: FleetView,
        *,
        speeds: Mapping[str, float] = MappingProxyType({}),
        stale_after_s: float = 3.0,
        dead_after_s: float = 10.0,
    ) -> None:
        if not 0 < stale_after_s < dead_after_s:
            raise ValueError(f"0 < stale_after_s < dead_after_s, not {stale_after_s} and {dead_after_s}")
        workers = sorted(view.workers, key=_id)
        self.view = view
        self.ids = tuple(worker.id for worker in workers)
        self._index = {name: place for place, name in enumerate(self.ids)}
        self._models = [worker.models for worker in workers]
        self._serving: dict[str, Mask | None] = {}
        self._names: dict[str, Sequence[str]] = {}
        self._names_for: dict[tuple[str | None, int, frozenset[str]], frozenset[str]] = {}
        self._stale_after_s = stale_after_s
        self._fading_s = dead_after_s - stale_after_s
        self._read_standing(workers)
        self._read_leases(workers)
        self._read_loads([worker.load for worker in workers])
        self.speed = _column(workers, lambda worker: _positive(speeds.get(worker.id)))
        """Tokens per second that one answer is written with; NaN where unknown."""

    def __len__(self) -> int:
        return len(self.ids)

    # -- what the view says -------------------------------------------------------------------------------

    def _read_standing(self, workers: list[WorkerView]) -> None:
        self.ready = np.array([worker.state is WorkerState.READY for worker in workers], dtype=bool)
        self.max_model_len = _column(workers, _context)
        """Tokens; infinite where the worker has not said."""
        self.least_context = float(self.max_model_len.min(initial=math.inf))
        self.breaker_until = _column(workers, _breaker_until)
        """When the breaker may admit; 0 where it is not open."""
        self.deferred_until = _column(workers, lambda worker: worker.deferred_until)
        self.refused_until = np.zeros(len(workers))
        """Until when an acquire that was refused is not tried again; infinite until the next view."""
        self.calm_from_s = float(max(self.breaker_until.max(initial=0), self.deferred_until.max(initial=0)))
        """From when on no breaker, deferral or refusal hinders anybody, as far as is known."""
        self.refusals: dict[str, str] = {}
        """Why the last acquire was refused, by worker; who is not in it was not refused since the view."""
        weight = _column(workers, lambda worker: worker.weight)
        self.weight_share = weight / (weight.max(initial=0.0) or 1.0)
        """Static weight over the fleet's largest."""
        self.hashes = np.array([key_hash(name) for name in self.ids], dtype=np.uint64)

    def _read_leases(self, workers: list[WorkerView]) -> None:
        self.leases = _column(workers, lambda worker: worker.leases)
        self.leases_total = float(self.leases.sum())
        self.limit = _column(workers, _limit)
        self.leases_since = _column(workers, lambda worker: worker.leases_since_sample)
        self.tokens_since = _column(workers, lambda worker: worker.tokens_since_sample)

    def _read_loads(self, loads: list[Load | None]) -> None:
        sampled_at = _column(loads, lambda load: load.sampled_at if load else math.nan)
        self.sampled_at = sampled_at
        known = sampled_at[self.ready & ~np.isnan(sampled_at)]
        self._all_fresh_until = float(known.min()) + self._stale_after_s if known.size else math.inf
        waiting = _column(loads, lambda load: _or_nan(load.waiting if load else None))
        self.waiting_now = waiting + self.leases_since
        self.drain_rate = _column(loads, lambda load: _positive(load.drain_rate if load else None))
        """Requests finished per second; NaN where none was seen to finish: nothing is known of an idle
        worker.
        """
        self.all_drain_known = not np.isnan(self.drain_rate).any()
        self.kv_usage = _column(loads, _kv_usage)
        capacity = _column(loads, lambda load: _positive(load.capacity_tokens if load else None))
        self.kv_per_token = np.nan_to_num(1.0 / capacity)
        """Usage that one more token makes; 0 where the capacity is unknown: no correction is possible."""
        self.queued_tokens, self.queued_unsized = _queued(loads, waiting)
        self.any_unsized = bool(self.queued_unsized.any())
        self.capacity_rate = _with_median(
            _column(loads, lambda load: _positive(load.capacity_rate if load else None))
        )
        """Tokens per second, the fleet's median where unknown; all NaN when no worker's is known."""

    # -- what follows from it -----------------------------------------------------------------------------

    def serving(self, model: str | None) -> Mask | None:
        """Who names ``model``; nobody does: who has not said what it serves. None: everybody."""
        if model is None:
            return None
        if model not in self._serving:
            mask = np.array([model in models for models in self._models], dtype=bool)
            if not mask.any():
                mask = np.array([not models for models in self._models], dtype=bool)
            self._serving[model] = None if mask.all() else mask
        return self._serving[model]

    def has_ready(self, model: str | None) -> bool:
        """Whether anybody is ready who serves ``model``."""
        serving = self.serving(model)
        return bool((self.ready if serving is None else self.ready & serving).any())

    def has_room(self, model: str | None, now_s: float) -> bool:
        """Whether anybody could take one more request for ``model`` now."""
        return bool(self.room(model, now_s).any())

    def with_room(self, model: str | None, now_s: float) -> list[str]:
        """Who could take one more request for ``model`` now, as far as this view knows."""
        return [self.ids[place] for place in np.flatnonzero(self.room(model, now_s)).tolist()]

    def room(self, model: str | None, now_s: float) -> Mask:
        """The same as a mask, which costs less where there are many."""
        free = self.ready & (self.leases < self.limit)
        if self.calm_from_s > now_s:
            until = np.maximum(np.maximum(self.breaker_until, self.deferred_until), self.refused_until)
            free &= until <= now_s
        serving = self.serving(model)
        return free if serving is None else free & serving

    def works(self, now_s: float) -> Mask:
        """Who takes requests as far as is known, with or without room: who is ready, and kept away from by
        neither its breaker nor a deferral.
        """
        if self.calm_from_s <= now_s:
            return self.ready
        return self.ready & (np.maximum(self.breaker_until, self.deferred_until) <= now_s)

    def free_slots(self, worker_id: str) -> int:
        """How many more leases a worker's limit allows now."""
        place = self._index[worker_id]
        return max(0, int(self.limit[place] - self.leases[place]))

    def names_serving(self, model: str | None) -> Sequence[str]:
        """Ids of those that name ``model``, ready or not; the same object each time."""
        serving = self.serving(model)
        if model is None or serving is None:
            return self.ids
        if model not in self._names:
            self._names[model] = tuple(self.ids[place] for place in np.flatnonzero(serving))
        return self._names[model]

    def names_for(self, need: Need) -> frozenset[str]:
        """Ids of those who could take a request, whether or not they have room: they serve its model, its
        context fits them, and it has not failed there. The same object for requests that are alike in that.
        """
        tokens = need.context_tokens if need.context_tokens > self.least_context else 0
        alike = (need.model, tokens, need.tried)
        if alike not in self._names_for:
            fits = self.max_model_len >= tokens
            names = (name for name in self.names_serving(need.model) if fits[self._index[name]])
            self._names_for[alike] = frozenset(names) - need.tried
        return self._names_for[alike]

    def cap_limit(self, worker_id: str, limit: int) -> None:
        """Until the next view, a worker's limit is this at most."""
        place = self._index.get(worker_id)
        if place is not None:
            self.limit[place] = min(self.limit[place], limit)

    def set_aside(self, worker_id: str, count: int) -> None:
        """Count so many slots as taken that are free, for somebody else; less than 0: as free again."""
        self._add_lease(self._index[worker_id], count)

    def none_of(self, names: Iterable[str]) -> Mask:
        """Everybody but these; names of no worker change nothing."""
        mask = np.ones(len(self.ids), dtype=bool)
        mask[[self._index[name] for name in names if name in self._index]] = False
        return mask

    def freshness(self, now_s: float) -> Column | None:
        """How far each load may be believed, 1 fully to 0 not at all (or never read); None: all fully."""
        if now_s <= self._all_fresh_until:
            return None
        beyond = (now_s - self.sampled_at - self._stale_after_s) / self._fading_s
        return np.nan_to_num(1.0 - np.clip(beyond, 0.0, 1.0))

    # -- what this dispatcher did since the view ----------------------------------------------------------

    def took(self, worker_id: str, tokens: int) -> None:
        """A lease was granted after the view was taken. A worker that the view lacks is ignored, here and
        below.
        """
        place = self._index.get(worker_id)
        if place is not None:
            self._add_lease(place, 1)
            self._add_since(place, 1, tokens)

    def gave_back(self, worker_id: str, tokens: int, *, granted_s: float | None = None) -> None:
        """A lease ended after the view was taken, which makes room where acquires were refused for want
        of it.

        ``granted_s``: when it was granted, on Redis' clock. The sample of a load counts only leases older
        than itself, so only a younger one is taken off what came since; None: taken to be younger while
        any is.
        """
        place = self._index.get(worker_id)
        if place is None:
            return
        self._add_lease(place, -1)
        if granted_s is None or not granted_s <= self.sampled_at[place]:
            self._add_since(place, -1, -tokens)
        if self.refused_until[place] == UNTIL_NEXT_VIEW:
            self.refused_until[place] = 0.0
            self.refusals.pop(worker_id, None)

    def deferred(self, worker_id: str, until_s: float) -> None:
        """The worker asked for time. A deferral is never shortened by a later, smaller one."""
        place = self._index.get(worker_id)
        if place is not None:
            self.deferred_until[place] = max(self.deferred_until[place], until_s)
            self.calm_from_s = max(self.calm_from_s, until_s)

    def refused(self, worker_id: str, reason: str, until_s: float | None) -> None:
        """An acquire was refused. ``until_s`` None or 0: nobody knows for how long, so until the next
        view.
        """
        place = self._index.get(worker_id)
        if place is not None:
            until_s = until_s or UNTIL_NEXT_VIEW
            self.refused_until[place] = until_s
            self.calm_from_s = max(self.calm_from_s, until_s)
            self.refusals[worker_id] = reason

    def _add_lease(self, place: int, count: int) -> None:
        count = max(count, -int(self.leases[place]))
        self.leases[place] += count
        self.leases_total += count

    def _add_since(self, place: int, count: int, tokens: int) -> None:
        count = max(count, -int(self.leases_since[place]))
        self.leases_since[place] += count
        self.waiting_now[place] += count
        self.tokens_since[place] = max(0.0, self.tokens_since[place] + tokens)


@lru_cache(maxsize=65_536)
def key_hash(text: str) -> int:
    """64 bits that depend on the text only: the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def _limit(worker: WorkerView) -> float:
    """Leases that it may have now: one more than it has, a trial, where its breaker is not closed."""
    limit = max(1, worker.limit)
    return limit if worker.breaker is BreakerState.CLOSED else min(limit, worker.leases + 1)


def _id(worker: WorkerView) -> str:
    return worker.id


def _column(rows: Sequence[Row], read: Callable[[Row], float]) -> Column:
    return np.array([read(row) for row in rows], dtype=np.float64)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else min(value, LARGEST)


def _positive(value: float | None) -> float:
    """NaN for 0 too: a worker that did nothing lately has shown no rate."""
    return min(max(value, 1.0 / LARGEST), LARGEST) if value else math.nan


def _context(worker: WorkerView) -> float:
    return math.inf if worker.max_model_len is None else worker.max_model_len


def _breaker_until(worker: WorkerView) -> float:
    return worker.breaker_open_until if worker.breaker is BreakerState.OPEN else 0.0


def _kv_usage(load: Load | None) -> float:
    if load is None:
        return math.nan
    return _or_nan(load.kv_usage_mean if load.kv_usage_max is None else load.kv_usage_max)


def _queued(loads: Sequence[Load | None], waiting: Column) -> tuple[Column, Column]:
    """Tokens that wait to be read, and the requests that wait with their tokens unknown.

    Most engines count only the requests. None waiting is no tokens; the others count as much each as the
    request to be placed, the best guess there is.
    """
    tokens = _column(loads, lambda load: _or_nan(load.waiting_uncached_tokens if load else None))
    unsized = np.isnan(tokens)
    return np.where(unsized, waiting * 0.0, tokens), np.where(unsized, waiting, 0.0)


def _with_median(column: Column) -> Column:
    known = column[~np.isnan(column)]
    return np.where(np.isnan(column), np.median(known), column) if known.size else column
