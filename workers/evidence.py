"""What answers show of a silent worker: how fast it writes at its present limit. Pure.

Dispatchers count it (``dispatcher.witness``), it stands with the limit that it is about, and the monitor
learns from it (``monitor.exploring``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Evidence:
    """Answers to requests that were sent since the limit last changed: how many, their tokens, and the sum of
    the seconds that each took.
    """

    answers: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def speed(self) -> float | None:
        """Tokens per second of one answer, waiting in the engine included; None: there is nothing to tell."""
        return self.tokens / self.seconds if self.tokens > 0 and self.seconds > 0 else None

    def with_answer(self, tokens: int, seconds: float) -> Evidence:
        """The same and one answer more."""
        return Evidence(self.answers + 1, self.tokens + tokens, self.seconds + seconds)


NONE = Evidence()
