"""Counters over time -> drain rate, token rate and the slow capacity estimate of one incarnation. Pure.

Reading the counters belongs to ``probe`` and ``gauges``; what the rates are used for, to the scheduler.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from workers.load import Load

WINDOW_S = 10.0
MIN_SPAN_S = 2.0
"""A rate over less than this is a moment's, not a sustained one."""
SUSTAINED_S = 3.0
"""A token rate held for so long counts as capacity; the whole window would lag behind a batch that begins."""
CAPACITY_HALF_LIFE_S = 600.0
"""In so much time under full load, an estimate that is no longer reached halves."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second; None: not known (yet). ``token_rate`` counts generated tokens."""

    drain_rate: float | None = None
    token_rate: float | None = None
    capacity_rate: float | None = None


@dataclass(frozen=True, slots=True)
class _Point:
    at_s: float
    tokens: float | None
    finished: float | None


class RateMeter:
    """Takes the loads of one incarnation in order of their samples; a counter that fell starts it anew."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._points: deque[_Point] = deque()
        self._capacity: float | None = None
        self._integral = 0.0
        self._throughput: tuple[float, float] | None = None
        self._kind: tuple[object, ...] = ()

    def add(self, load: Load, *, loaded: bool) -> Rates:
        """The rates with this load counted in.

        ``loaded``: the worker has all the work it can take; only then does a lower rate mean less capacity.
        """
        last = self._points[-1] if self._points else None
        if last is not None and load.sampled_at <= last.at_s:
            return self.rates()
        point = _Point(load.sampled_at, self._tokens(load), _as_float(load.success_total))
        if self._kind != (kind := _kind(load)) or (last is not None and _fell(last, point)):
            self._points.clear()
            self._kind = kind
        self._points.append(point)
        # One point older than the window stays: it is where the window begins.
        while len(self._points) > 2 and self._points[1].at_s <= point.at_s - self._window_s:
            self._points.popleft()
        self._learn_capacity(point.at_s - last.at_s if last else 0.0, loaded=loaded)
        return self.rates()

    def rates(self) -> Rates:
        """The rates as of the last sample."""
        return Rates(self._rate("finished", 0), self._rate("tokens", 0), self._capacity)

    def _tokens(self, load: Load) -> float | None:
        if load.generation_tokens_total is not None:
            return float(load.generation_tokens_total)
        return self._integrated(load)

    def _integrated(self, load: Load) -> float | None:
        """Tokens so far of an engine that tells its throughput but no counter: the area under it.

        Over a window that is a sustained rate, which the momentary throughput is not.
        """
        if load.gen_throughput is None:
            self._throughput = None
            return None
        if self._throughput is not None:
            before_s, before = self._throughput
            self._integral += (load.sampled_at - before_s) * (before + load.gen_throughput) / 2
        self._throughput = (load.sampled_at, load.gen_throughput)
        return self._integral

    def _rate(self, what: str, begin: int) -> float | None:
        """Per second from the point numbered ``begin`` to the last one."""
        if not self._points:
            return None
        first, last = self._points[begin], self._points[-1]
        span_s = last.at_s - first.at_s
        before, after = getattr(first, what), getattr(last, what)
        if span_s < MIN_SPAN_S or before is None or after is None:
            return None
        return float(after - before) / span_s

    def _sustained_begin(self) -> int:
        """The newest point that lies ``SUSTAINED_S`` back, else the oldest."""
        begin_s = self._points[-1].at_s - SUSTAINED_S
        numbers = range(len(self._points) - 1, 0, -1)
        return next((number for number in numbers if self._points[number].at_s <= begin_s), 0)

    def _learn_capacity(self, elapsed_s: float, *, loaded: bool) -> None:
        sustained = self._rate("tokens", self._sustained_begin())
        if sustained is None:
            return
        held = self._capacity or 0.0
        if loaded:
            held *= math.exp2(-elapsed_s / CAPACITY_HALF_LIFE_S)
        self._capacity = max(held, sustained) or None


def _as_float(value: int | None) -> float | None:
    return None if value is None else float(value)


def _kind(load: Load) -> tuple[object, ...]:
    """Which counters a load carries: two endpoints of one engine count differently."""
    return load.source, load.generation_tokens_total is None, load.success_total is None


def _fell(last: _Point, point: _Point) -> bool:
    pairs = ((last.tokens, point.tokens), (last.finished, point.finished))
    return any(before is not None and after is not None and after < before for before, after in pairs)
