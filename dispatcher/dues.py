"""What each of several batches has had of something that they share, and so who is next. Pure.

Start-time fair queueing [Goyal, Vin and Cheng 1996]: having something moves a batch's time on by its cost
over the batch's share; the batch with the smallest time is next. `lua/claim_job.lua` goes by the same rule
for the shards in a queue; this is for the requests that wait inside a dispatcher.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable


class Dues:
    """The times of batches that share one thing, such as the workers of a model."""

    def __init__(self) -> None:
        self._times: dict[Hashable, float] = {}
        """Of those who wait, and of those who left ahead of the others."""
        self._waiting: Counter[Hashable] = Counter()
        self._clock = 0.0
        """The time of whoever was served last: all who left behind it may be forgotten."""

    def __len__(self) -> int:
        """How many batches wait."""
        return len(self._waiting)

    def come(self, batch: Hashable) -> None:
        """One more request of a batch waits. Who comes anew is level with the last of those who wait.

        Nobody saves up by staying away, nor sheds what it had by leaving for a moment.
        """
        if not self._waiting[batch]:
            self._times[batch] = max(self._floor(), self._times.get(batch, 0.0))
        self._waiting[batch] += 1

    def leave(self, batch: Hashable) -> None:
        """One request of a batch waits no more."""
        self._waiting[batch] -= 1
        if not self._waiting[batch]:
            del self._waiting[batch]
            self._times = {
                one: time for one, time in self._times.items() if one in self._waiting or time > self._clock
            }

    def charge(self, batch: Hashable, cost: float) -> None:
        """A batch whose request waits gets what costs so much, over its share."""
        self._clock = max(self._clock, self._times[batch])
        self._times[batch] += cost

    def refund(self, batch: Hashable, cost: float) -> None:
        """It did not get it after all; its request waits again, or has just come to wait."""
        self._times[batch] = self._times.get(batch, cost) - cost

    def ahead(self, batch: Hashable) -> float:
        """How much more it had than whoever had the least; 0: it is next. It must wait."""
        return self._times[batch] - self._floor()

    def _floor(self) -> float:
        return min((self._times[one] for one in self._waiting if self._waiting[one]), default=self._clock)
