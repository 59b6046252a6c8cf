"""How fast each worker writes one answer, learned from the answers that came back. Pure.

A load tells the sum over a worker's sequences at most; what a single request has to expect is seen best on
the requests themselves, and is what decides which worker finishes it first. Until the first answer a worker
is *unknown*, and only scouts go there (`placement`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from workers.fleet import WorkerView

_FORGET = 0.97
"""Weight that each new answer takes off all older ones: some thirty answers are remembered."""

_NEWS = 1.1
"""A speed that has changed by this factor is worth telling to others."""
RETELL_S = 300.0
"""A speed that stays the same is told again after so long, if the worker has answered since."""
_FORETOLD = 0.8
"""Answers that use so much of their ceilings are as long as the ceilings say."""


@dataclass(slots=True)
class _Sums:
    """Of one worker's answers, the older the less."""

    tokens: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0
    """How many answers they stand for."""
    incarnation: int | None = None
    """The worker's, as seen last; None: not seen yet."""
    fresh: bool = False
    """Whether there was an answer since it was told."""

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    def add(self, tokens: int, seconds: float) -> None:
        # Sums, not a mean of quotients: a short answer is mostly overhead and should count for little.
        self.tokens = self.tokens * _FORGET + tokens
        self.seconds = self.seconds * _FORGET + seconds
        self.weight = self.weight * _FORGET + 1.0
        self.fresh = True

    def live_anew(self, incarnation: int) -> None:
        """What was learned counts as one answer: the next engine behind the address may be another."""
        if self.incarnation is not None and self.incarnation != incarnation and self.weight > 1.0:
            self.tokens, self.seconds = self.tokens / self.weight, self.seconds / self.weight
            self.weight = 1.0
        self.incarnation = incarnation


@dataclass(frozen=True, slots=True)
class _Told:
    speed: float
    at_s: float


class Speeds:
    """Tokens per second and sequence, by worker; and whether ceilings foretell lengths."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sums] = {}
        self._heard: Mapping[str, float] = {}
        self._told: dict[str, _Told] = {}
        self._answers = _Sums()
        """Of all workers' together; of seconds, none."""
        self._bounded = 0.0
        self._allowed = 0.0

    @property
    def foretold(self) -> bool:
        """Whether answers with a ceiling got nearly as long as it allowed, lately; False: there were none."""
        return self._bounded > _FORETOLD * self._allowed

    @property
    def mean_answer(self) -> float:
        """Mean length of the answers lately, in tokens; 0: none was seen."""
        return self._answers.tokens / self._answers.weight if self._answers.weight else 0.0

    def saw(
        self, worker_id: str, tokens: int | None, seconds: float | None, *, allowed: int | None = None
    ) -> bool:
        """An answer of `tokens` took so long; None or 0: it says nothing. True: the worker was unknown.

        `allowed`: how long it might have been; None: nobody said.
        """
        if not tokens or not seconds or seconds <= 0:
            return False
        self._answers.add(tokens, 0.0)
        if allowed:
            self._bounded = self._bounded * _FORGET + tokens
            self._allowed = self._allowed * _FORGET + allowed
        new = worker_id not in self._sums
        self._sums.setdefault(worker_id, _Sums()).add(tokens, seconds)
        return new

    def of(self, worker: WorkerView) -> float | None:
        """A worker's speed: as seen here, else as heard of, else as its load tells it; None: unknown."""
        sums = self._sums.get(worker.id)
        if sums is not None:
            sums.live_anew(worker.incarnation)
            return sums.speed
        if (heard := self._heard.get(worker.id)) is not None:
            return heard
        load = worker.load
        if load is None or not load.running:
            return None
        rate = load.token_rate or load.gen_throughput
        return rate / load.running if rate else None

    def keep_only(self, workers: Collection[str]) -> None:
        """Forget all others: they are gone."""
        for gone in self._sums.keys() - workers:
            del self._sums[gone]
            self._told.pop(gone, None)

    def hear(self, speeds: Mapping[str, float]) -> None:
        """Know what others have seen, until they are seen here."""
        self._heard = speeds

    def has_seen(self, worker_id: str) -> bool:
        """Whether a speed is seen here or heard of; else what others have to tell is worth asking for."""
        return worker_id in self._sums or worker_id in self._heard

    def news(self, now_s: float) -> dict[str, float]:
        """Speeds seen here that were not told yet, are otherwise by now, or were told so long ago that they
        will not be believed much longer. `now_s`: any clock, the same for `told`.
        """
        return {
            worker: sums.speed for worker, sums in self._sums.items() if self._is_news(worker, sums, now_s)
        }

    def _is_news(self, worker_id: str, sums: _Sums, now_s: float) -> bool:
        told = self._told.get(worker_id)
        if told is None or not told.speed / _NEWS < sums.speed < told.speed * _NEWS:
            return True
        return sums.fresh and now_s - told.at_s >= RETELL_S

    def told(self, speeds: Mapping[str, float], now_s: float) -> None:
        """These have been told."""
        for worker, speed in speeds.items():
            self._told[worker] = _Told(speed, now_s)
            self._sums[worker].fresh = False
