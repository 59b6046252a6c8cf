"""Whether and when a request is tried again, and how long one try may take. Pure.

What an attempt's end means stands in ``outcome``; where the next one goes is the scheduler's business.
There is no other retry loop: the HTTP client makes none of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias, assert_never

from pydantic import BaseModel, ConfigDict, Field

from dispatcher.outcome import Label, Outcome, RequestFate

if TYPE_CHECKING:
    from random import Random

PREFILL_SPEEDUP = 10.0
"""How many times faster an engine reads a prompt than it writes an answer, at least."""


class RetryPolicy(BaseModel):
    """How often and how patiently."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_attempts: int = Field(default=5, ge=1, description="attempts charged to a request, the first too")
    base_s: float = Field(
        default=0.5, gt=0, description="longest wait before the second attempt; then doubled"
    )
    cap_s: float = Field(default=30.0, gt=0, description="longest wait before any")


@dataclass(frozen=True, slots=True)
class History:
    """A request's attempts so far."""

    charged: int = 0
    uncharged: int = 0
    """Attempts that met a full worker."""
    aside: frozenset[str] = frozenset()
    """Workers that it failed on."""
    labels: frozenset[Label] = frozenset()

    def after(self, outcome: Outcome, worker_id: str) -> History:
        """With one more attempt. A full worker is not set aside: its deferral is, for as long as it lasts."""
        labels = self.labels | {outcome.label}
        if outcome.charged:
            return History(self.charged + 1, self.uncharged, self.aside | {worker_id}, labels)
        return History(self.charged, self.uncharged + 1, self.aside, labels)


@dataclass(frozen=True, slots=True)
class Settled:
    """The attempt's end is the request's: answered, refused for good, or cancelled."""


@dataclass(frozen=True, slots=True)
class TryAgain:
    """Decide anew, not before a time."""

    not_before_s: float
    history: History

    @property
    def aside(self) -> frozenset[str]:
        """Workers to leave out while there are others."""
        return self.history.aside


class GiveUpCode(StrEnum):
    """The ``error.code`` of a line that got no HTTP answer (batches' output format)."""

    MAX_ATTEMPTS = "max_attempts"
    REQUEST_TIMEOUT = "request_timeout"


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No further attempt: the request fails for want of attempts or of time."""

    code: GiveUpCode
    message: str


Next: TypeAlias = Settled | TryAgain | GiveUp


def next_step(
    outcome: Outcome,
    worker_id: str,
    history: History,
    *,
    now_s: float,
    deadline_s: float,
    policy: RetryPolicy,
    rng: Random,
) -> Next:
    """What follows an attempt on ``worker_id`` that ended so; ``history`` is that of the attempts before it.

    ``now_s`` and ``deadline_s`` are seconds on one clock, any.
    """
    history = history.after(outcome, worker_id)
    match outcome.fate:
        case RequestFate.DONE | RequestFate.FINAL | RequestFate.CANCELLED:
            return Settled()
        case RequestFate.ELSEWHERE:
            if history.charged >= policy.max_attempts:
                return GiveUp(
                    GiveUpCode.MAX_ATTEMPTS,
                    f"{history.charged} attempts failed, the last with {outcome.label} on {worker_id}",
                )
            turn = history.charged
        case RequestFate.WAIT:
            turn = (
                1  # the worker's deferral paces; a request that waits longer and longer would be left behind
            )
        case _:
            assert_never(outcome.fate)
    not_before_s = now_s + backoff_s(turn, policy, rng)
    if not_before_s >= deadline_s:
        return GiveUp(
            GiveUpCode.REQUEST_TIMEOUT,
            f"no time is left for another attempt; the last ended with {outcome.label} on {worker_id}",
        )
    return TryAgain(not_before_s, history)


def backoff_s(turn: int, policy: RetryPolicy, rng: Random) -> float:
    """Seconds to wait after the ``turn``-th attempt (from 1): anything up to base * 2^(turn-1), capped.

    Full jitter: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """
    doublings = min(turn - 1, 60)  # far beyond any cap, and well within a float
    return rng.uniform(0.0, min(policy.cap_s, policy.base_s * 2.0**doublings))


def read_timeout_s(
    asked_tokens: int | None, prompt_tokens: int, request_timeout_s: float, slowest_rate: float
) -> float:
    """How long one attempt may take, in seconds: never less than ``request_timeout_s``.

    ``slowest_rate`` is the slowest plausible writing of one answer, in tokens per second, above 0. An
    answer of unknown length (``asked_tokens`` None) adds nothing beyond the prompt.
    """
    if slowest_rate <= 0:
        raise ValueError(f"slowest_rate must be above 0 tokens/s, not {slowest_rate}")
    tokens = (asked_tokens or 0) + prompt_tokens / PREFILL_SPEEDUP
    return max(request_timeout_s, tokens / slowest_rate)
