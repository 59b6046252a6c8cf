"""Whether a request had better wait: a faster worker that is full now may still finish it first. Pure.

Earliest finish first, for the longest first, is what ends a batch on unequal machines near the possible; a
scorer cannot say it, since it only compares workers that have room. Who has room belongs to `fleet`, what a
worker with room is worth to `scorers`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_WORTH_IT = 0.9
"""Waiting must end at most at this part of the time that going now takes: estimates are rough."""


@dataclass(frozen=True, slots=True)
class Underway:
    """A request that a worker is running: since when, and how many tokens it shall write."""

    worker_id: str
    since_s: float
    tokens: int


class Outlook:
    """One pass's view of when slots come free. Each request that waits takes the slot it waits for."""

    def __init__(self, now_s: float, speeds: Mapping[str, float], underway: Iterable[Underway]) -> None:
        """`speeds`: tokens per second and sequence, of the workers whose speed is known."""
        self._now_s = now_s
        self._speeds = speeds
        self._free_at: dict[str, list[float]] = {}
        for one in underway:
            speed = speeds.get(one.worker_id)
            if speed is not None:
                end_s = max(now_s, one.since_s + one.tokens / speed)
                self._free_at.setdefault(one.worker_id, []).append(end_s)
        for ends in self._free_at.values():
            heapq.heapify(ends)

    def better_waits(self, tokens: int, with_room: Iterable[str], served_by: Iterable[str]) -> bool:
        """Whether a request of so many tokens finishes sooner by waiting for one of `served_by`.

        `with_room`: workers that could take it now. One of unknown speed among them is worth trying: no.
        """
        now_takes_s = self._at_once(tokens, with_room)
        if now_takes_s is None:
            return False
        best, best_takes_s = None, now_takes_s * _WORTH_IT
        for worker in served_by:
            ends = self._free_at.get(worker)
            if ends:
                takes_s = ends[0] - self._now_s + tokens / self._speeds[worker]
                if takes_s < best_takes_s:
                    best, best_takes_s = worker, takes_s
        if best is None:
            return False
        heapq.heappop(self._free_at[best])
        return True

    def _at_once(self, tokens: int, with_room: Iterable[str]) -> float | None:
        """Seconds on the fastest that has room; None: nobody has, or one of unknown speed has."""
        speeds = [self._speeds.get(worker) for worker in with_room]
        known = [speed for speed in speeds if speed is not None]
        return tokens / max(known) if known and len(known) == len(speeds) else None
