"""Whether a request had better wait: a faster worker that is full now may still finish it first. Pure.

Earliest finish first, for the longest first, is what ends a batch on unequal machines near the possible; a
scorer cannot say it, since it only compares workers that have room. Who has room belongs to `fleet`, what a
worker with room is worth to `scorers`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dispatcher.scheduler.question import Mask

WORTH_IT = 0.9
"""Waiting must end at most at this part of the time that going now takes: estimates are rough."""
STANDS_STILL = 2.0
"""What has not ended after so many times as long as its longest answer takes may be on one that hangs."""


def stands_still(since_s: float, tokens: int, speed: float, now_s: float) -> bool:
    """Whether a request of so many tokens at most, at so many per second, should have ended long ago."""
    return (now_s - since_s) * speed > STANDS_STILL * tokens


@dataclass(frozen=True, slots=True)
class Underway:
    """A request that a worker is running: since when, and how many tokens it shall write."""

    worker_id: str
    since_s: float
    tokens: int


class Outlook:
    """One pass's view of when slots come free. Each request that waits takes the slot it waits for.

    Hundreds may ask in one pass, of as many workers: each answer costs a few microseconds, some ten when
    `with_room` or `served_by` is another object than the time before.
    """

    def __init__(self, now_s: float, speeds: Mapping[str, float], underway: Iterable[Underway]) -> None:
        """`speeds`: tokens per second and sequence, of the workers whose speed is known.

        A slot whose request stands still is not expected to come free.
        """
        self._speeds = speeds
        self._place = {worker: place for place, worker in enumerate(speeds)}
        self._token_s = np.array([1.0 / speed for speed in speeds.values()])
        self._free_in: list[list[float]] = [[] for _ in speeds]
        """By worker: in how many seconds its slots come free, the soonest last."""
        for one in underway:
            place = self._place.get(one.worker_id)
            speed = speeds.get(one.worker_id, 0.0)
            if place is not None and not stands_still(one.since_s, one.tokens, speed, now_s):
                end_s = one.since_s + one.tokens / speed
                self._free_in[place].append(max(0.0, end_s - now_s))
        for free_in in self._free_in:
            free_in.sort(reverse=True)
        self._soonest = np.array([free_in[-1] if free_in else math.inf for free_in in self._free_in])
        self._with_room: Sequence[str] | None = None
        self._fastest_with_room: float | None = None
        self._served_by: Collection[str] | None = None
        self._elsewhere: Mask | None = None

    def better_waits(self, tokens: int, with_room: Sequence[str], served_by: Collection[str]) -> bool:
        """Whether a request of so many tokens finishes sooner by waiting for one of `served_by`.

        `with_room`: workers that could take it now. One of unknown speed among them is worth trying: no.
        Neither may be changed after it was handed in.
        """
        fastest = self._fastest(with_room)
        return fastest is not None and self.wait_for(tokens, fastest, served_by) is not None

    def wait_for(self, tokens: int, fastest: float, served_by: Collection[str]) -> float | None:
        """In how many seconds a request ends that waits for the best slot; None: it had better go now.

        `fastest`: speed of the fastest worker that has room.
        """
        if not self._free_in:
            return None
        takes_s = self._soonest + tokens * self._token_s
        if (elsewhere := self._not_among(served_by)) is not None:
            takes_s[elsewhere] = math.inf
        best = int(takes_s.argmin())
        ends_in_s = float(takes_s[best])
        if not ends_in_s < tokens / fastest * WORTH_IT:
            return None
        free_in = self._free_in[best]
        free_in.pop()
        self._soonest[best] = free_in[-1] if free_in else math.inf
        return ends_in_s

    def _fastest(self, with_room: Sequence[str]) -> float | None:
        """The highest speed of those that have room; None: nobody has, or one of unknown speed has."""
        if with_room is not self._with_room:
            speeds = [self._speeds.get(worker) for worker in with_room]
            known = [speed for speed in speeds if speed is not None]
            self._with_room = with_room
            self._fastest_with_room = max(known) if known and len(known) == len(speeds) else None
        return self._fastest_with_room

    def _not_among(self, served_by: Collection[str]) -> Mask | None:
        """Places of the workers that do not serve the request; None: all do."""
        if served_by is not self._served_by:
            elsewhere = np.ones(len(self._free_in), dtype=bool)
            elsewhere[[self._place[worker] for worker in served_by if worker in self._place]] = False
            self._served_by = served_by
            self._elsewhere = elsewhere if elsewhere.any() else None
        return self._elsewhere
