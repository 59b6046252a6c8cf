"""Pickers: in which order the scored candidates are asked for a lease. Each is one class and one line of
``PICKERS``.

How totals come about belongs to ``scorers`` and ``strategies``. Chance comes in as a seeded
``random.Random``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    import numpy.typing as npt

    from dispatcher.scheduler.question import Column


@dataclass(frozen=True, slots=True)
class Ballot:
    """The candidates to choose from, at least one."""

    totals: Column
    """One for each candidate, higher is better."""
    places: npt.NDArray[np.intp]
    """Each candidate's place in ``ids``, rising."""
    ids: tuple[str, ...]
    """All workers of the fleet, sorted."""


class Picker(Protocol):
    def order(self, ballot: Ballot, rng: Random, keep: int) -> list[int]:
        """Which entries of the ballot to ask, the picked one first, at most ``keep``, none twice."""


class MaxScore:
    """The best first; equal firsts in random order, so that dispatchers do not all run to the same one."""

    def order(self, ballot: Ballot, rng: Random, keep: int) -> list[int]:
        return _best_first(ballot.totals, rng, keep)


class TwoChoices:
    """The better of two drawn at random, then the other, then the rest, best first."""

    def order(self, ballot: Ballot, rng: Random, keep: int) -> list[int]:
        totals = ballot.totals
        if len(totals) == 1:
            return [0]
        pair = rng.sample(range(len(totals)), 2)
        if totals[pair[1]] > totals[pair[0]]:
            pair.reverse()
        rest = [entry for entry in _best_first(totals, rng, keep) if entry not in pair]
        return (pair + rest)[:keep]


@dataclass(frozen=True, slots=True)
class Softmax:
    """Each place in the order is drawn with chances in proportion to exp(total / temperature)."""

    temperature: float

    def order(self, ballot: Ballot, rng: Random, keep: int) -> list[int]:
        # Sorting by noisy totals draws without replacement (the Gumbel-top-k trick: Kool, van Hoof,
        # Welling, ICML 2019).
        noise = [-math.log(-math.log(rng.random() or 0.5)) for _ in range(len(ballot.totals))]
        return _best_first(ballot.totals / self.temperature + np.array(noise), rng, keep)


class RoundRobin:
    """Each in its turn, by name, whatever its score. Remembers whose turn was last, so it serves one
    strategy.
    """

    def __init__(self) -> None:
        self._last = ""

    def order(self, ballot: Ballot, rng: Random, keep: int) -> list[int]:  # noqa: ARG002 - no chance
        places = ballot.places.tolist()
        first = bisect_right(places, self._last, key=ballot.ids.__getitem__) % len(places)
        self._last = ballot.ids[places[first]]
        return [*range(first, len(places)), *range(first)][:keep]


PICKERS: dict[str, Callable[[float], Picker]] = {
    "max-score": lambda _temperature: MaxScore(),
    "p2c": lambda _temperature: TwoChoices(),
    "softmax": Softmax,
    "round-robin": lambda _temperature: RoundRobin(),
}
"""A new picker of each kind, from the strategy's temperature."""


def _best_first(totals: Column, rng: Random, keep: int) -> list[int]:
    order: list[int] = np.argsort(-totals, kind="stable")[:keep].tolist()
    best = totals[order[0]]
    if len(order) > 1 and totals[order[1]] == best:
        tied = np.flatnonzero(totals == best).tolist()
        head = rng.sample(tied, min(keep, len(tied)))
        order = (head + order[len(head) :])[:keep]
    return order
