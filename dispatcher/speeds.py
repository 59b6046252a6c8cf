"""How fast each worker writes one answer, learned from the answers that came back. Pure.

A load tells the sum over a worker's sequences at most; what a single request has to expect is seen best on
the requests themselves, and is what decides which worker finishes it first. Until the first answer a worker
is *unknown*, and only scouts go there (`placement`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from workers.fleet import WorkerView

_FORGET = 0.97
"""Weight that each new answer takes off all older ones: some thirty answers are remembered."""

_NEWS = 1.1
"""A speed that has changed by this factor is worth telling to others."""
_FORETOLD = 0.8
"""Answers that use so much of their ceilings are as long as the ceilings say."""


@dataclass(slots=True)
class _Sums:
    tokens: float = 0.0
    seconds: float = 0.0


class Speeds:
    """Tokens per second and sequence, by worker; and whether ceilings foretell lengths."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}
        self._heard: Mapping[str, float] = {}
        self._told: dict[str, float] = {}
        self._written = 0.0
        self._allowed = 0.0

    @property
    def foretold(self) -> bool:
        """Whether answers got nearly as long as they were allowed to, lately."""
        return self._written > _FORETOLD * self._allowed

    @property
    def mean_answer(self) -> float:
        """Mean length of the answers lately, in tokens; 0: none was seen."""
        return self._written * (1 - _FORGET)

    def saw(
        self, worker_id: str, tokens: int | None, seconds: float | None, *, allowed: int | None = None
    ) -> bool:
        """An answer of `tokens` took so long; None or 0: it says nothing. True: the worker was unknown.

        `allowed`: how long it might have been.
        """
        if not tokens or not seconds or seconds <= 0:
            return False
        self._written = self._written * _FORGET + tokens
        self._allowed = self._allowed * _FORGET + (allowed or 0)
        new = worker_id not in self._sums
        sums = self._sums.setdefault(worker_id, _Sums())
        # Sums, not a mean of quotients: a short answer is mostly overhead and should count for little.
        sums.tokens = sums.tokens * _FORGET + tokens
        sums.seconds = sums.seconds * _FORGET + seconds
        return new

    def of(self, worker: WorkerView) -> float | None:
        """A worker's speed: as seen here, else as heard of, else as its load tells it; None: unknown."""
        sums = self._sums.get(worker.id)
        if sums is not None:
            return sums.tokens / sums.seconds
        if (heard := self._heard.get(worker.id)) is not None:
            return heard
        load = worker.load
        if load is None or not load.running:
            return None
        rate = load.token_rate or load.gen_throughput
        return rate / load.running if rate else None

    def hear(self, speeds: Mapping[str, float]) -> None:
        """Know what others have seen, until they are seen here."""
        self._heard = speeds

    def has_seen(self, worker_id: str) -> bool:
        """Whether a speed is seen here or heard of; else what others have to tell is worth asking for."""
        return worker_id in self._sums or worker_id in self._heard

    def news(self) -> dict[str, float]:
        """Speeds seen here that were not told yet, or are otherwise by now."""
        seen = {worker: sums.tokens / sums.seconds for worker, sums in self._sums.items()}
        return {worker: speed for worker, speed in seen.items() if self._is_news(worker, speed)}

    def _is_news(self, worker_id: str, speed: float) -> bool:
        told = self._told.get(worker_id)
        return told is None or not told / _NEWS < speed < told * _NEWS

    def told(self, speeds: Mapping[str, float]) -> None:
        """These have been told."""
        self._told |= speeds
