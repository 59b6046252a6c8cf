"""A dispatcher's second attempts: when it may make them, for which requests, and what they may cost. Pure.

Which requests gain by one is `hedges`' rule; leases are taken by `placement`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dispatcher.hedges import Candidate, Hedge, choose
from dispatcher.speeds import Speeds

MOST_TOKENS = 0.05
"""Second attempts may cost this part of all tokens written so far: what the attempts wrote that lost."""


class Hedging:
    """Keeps the account of second attempts."""

    def __init__(self, speeds: Speeds) -> None:
        self._speeds = speeds
        self._written = 0.0
        self._spent = 0.0
        self.due = False
        """Whether to look for requests that gain by it: nothing is left to start, no request here and no job
        in the queues."""
        self.made = 0
        """Second attempts made so far."""

    def wrote(self, tokens: int) -> None:
        """An answer came; the account grows with it."""
        self._written += tokens

    def pick(
        self,
        running: Iterable[Candidate],
        free: Mapping[str, int],
        speeds: Mapping[str, float],
        now_s: float,
    ) -> list[Hedge]:
        """The second attempts to make now, within what they may cost."""
        foretold = self._speeds.foretold
        candidates = {one.lease: one for one in running}
        affordable = []
        left = MOST_TOKENS * self._written - self._spent
        for hedge in choose(candidates.values(), free, speeds, now_s, foretold=foretold):
            if not hedge.idle:
                left -= self._expected(candidates[hedge.lease].tokens, foretold=foretold)
            if left >= 0 or hedge.idle:
                affordable.append(hedge)
        return affordable

    def made_one(self, tokens: int, *, idle: bool = False) -> float | None:
        """A second attempt was begun for a request whose answer may have so many tokens.

        Returns what is charged for it until one of the two is lost. `idle`: the first stands still, so
        nothing is written twice; None, nothing is charged.
        """
        self.made += 1
        if idle:
            return None
        charged = self._expected(tokens, foretold=self._speeds.foretold)
        self._spent += charged
        return charged

    def lost_one(self, charged: float, wrote: float) -> None:
        """One of two attempts was lost, with all that it wrote: that is what they cost.

        It is less than was charged where the first had only begun, and lets others have a second one. When
        the other is lost as well, nothing is `charged` any more.
        """
        self._spent += wrote - charged

    def _expected(self, tokens: int, *, foretold: bool) -> float:
        return tokens if foretold else min(tokens, self._speeds.mean_answer or tokens)
