"""What answers show of a silent worker: how much it does with as many requests as it may have. Pure.

Dispatchers count it (``dispatcher.witness``), it stands with the limit that it is about, and the monitor
learns from it (``monitor.exploring``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Evidence:
    """Answers to requests that were sent since the limit was last written: how many, their tokens, the sum of
    the seconds that each took, and the sum of the leases that the worker had when each came.
    """

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0
    leases: int = 0

    @property
    def at_once(self) -> float:
        """How many requests the worker had, on average; 0: there were no answers."""
        return self.leases / self.answers if self.answers else 0.0

    @property
    def work(self) -> float:
        """Tokens per second of all its requests together: how many there are, by what each gets.

        Little's law: as many as are there, over the time that each stays, come out in a second.
        """
        return self.at_once * self.tokens / self.seconds if self.seconds > 0 else 0.0

    def with_answer(self, tokens: int, seconds: float, leases: int) -> Evidence:
        """The same and one answer more."""
        return Evidence(self.answers + 1, self.tokens + tokens, self.seconds + seconds, self.leases + leases)


NONE = Evidence()
