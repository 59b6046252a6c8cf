"""The circuit breaker's states and its one transition table, pure.

``lua/breaker.inc.lua`` is the same table inside Redis, where every replica's reports meet; tests drive both
with the same histories. Here is the definition, and what shows and simulates it. Times are seconds on one
clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

BUCKET_S = 5
"""Width of one bucket of the outcome window, in seconds."""


class BreakerState(StrEnum):
    """Where a breaker stands.

    closed: requests flow; enough failures open it. open: none until ``open_until``; then the next acquire
    makes it half-open. half_open: one trial, fleet-wide; its outcome closes or opens it again.
    """

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Verdict(StrEnum):
    """What an attempt's end says about the worker."""

    SUCCESS = "success"
    FAILURE = "failure"
    NEUTRAL = "neutral"


class BreakerPolicy(BaseModel):
    """When a breaker opens and for how long. ``failure_threshold = 1`` is a plain cool-down."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    failure_threshold: int = Field(default=3, ge=1, description="failures in a row")
    failure_rate: float = Field(default=0.5, gt=0, le=1, description="share of failures in the window")
    rate_minimum: int = Field(default=20, ge=1, description="outcomes in the window before the rate counts")
    window_s: float = Field(default=30.0, gt=0)
    base_s: float = Field(default=5.0, gt=0, description="first opening; doubles with every trip")
    cap_s: float = Field(default=300.0, gt=0)
    decay_s: float = Field(default=60.0, gt=0, description="healthy time that forgives one trip")
    trial_s: float = Field(default=20.0, gt=0, description="how long a trial is owned without being renewed")
    restart_limit: int = Field(default=2, ge=1, description="the limit after healing, from where it grows")


@dataclass(frozen=True, slots=True)
class Breaker:
    """One worker's breaker. ``window`` holds (bucket number, successes, failures), oldest first."""

    state: BreakerState = BreakerState.CLOSED
    epoch: int = 0
    trips: int = 0
    open_until: float = 0.0
    failures: int = 0
    reason: str = ""
    trial: str = ""
    trial_until: float = 0.0
    healthy_since: float = 0.0
    window: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether an attempt may go. ``until``: when to ask again if not."""

    admitted: bool
    trial: bool = False
    until: float = 0.0


def admit(breaker: Breaker, attempt: str, now_s: float, policy: BreakerPolicy) -> tuple[Breaker, Admission]:
    """Ask for one attempt. In an open breaker whose time has passed, the attempt becomes the single trial."""
    if breaker.state is BreakerState.CLOSED:
        return breaker, Admission(admitted=True)
    blocked_until = breaker.open_until if breaker.state is BreakerState.OPEN else breaker.trial_until
    if now_s < blocked_until:
        return breaker, Admission(admitted=False, until=blocked_until)
    trial = replace(breaker, state=BreakerState.HALF_OPEN, trial=attempt, trial_until=now_s + policy.trial_s)
    return trial, Admission(admitted=True, trial=True)


def report(
    breaker: Breaker,
    attempt: str,
    epoch: int,
    verdict: Verdict,
    now_s: float,
    policy: BreakerPolicy,
    *,
    reason: str = "",
    jitter: float = 0.0,
) -> Breaker:
    """Account for the end of an attempt that was admitted in ``epoch``; older epochs are ignored.

    ``jitter`` is between -0.1 and 0.1 and comes from the caller, so that replicas do not return in step.
    """
    if epoch != breaker.epoch:
        return breaker
    if breaker.state is BreakerState.HALF_OPEN:
        return _report_trial(breaker, attempt, verdict, now_s, policy, reason=reason, jitter=jitter)
    if breaker.state is BreakerState.OPEN or verdict is Verdict.NEUTRAL:
        return breaker
    failed = verdict is Verdict.FAILURE
    window = _counted(breaker.window, now_s, policy, failed=failed)
    counted = replace(breaker, failures=breaker.failures + 1 if failed else 0, window=window)
    if failed and (counted.failures >= policy.failure_threshold or _rate_reached(window, policy)):
        return opened(counted, now_s, policy, reason=reason, jitter=jitter)
    return counted


def opened(
    breaker: Breaker, now_s: float, policy: BreakerPolicy, *, reason: str, jitter: float = 0.0
) -> Breaker:
    """The breaker, open from now. Every trip doubles the time, up to a cap; a deadline only moves later."""
    trips = _decayed_trips(breaker, now_s, policy) + 1
    doublings = min(trips - 1, 60)  # beyond any cap, and well within a float
    pause = min(policy.base_s * 2.0**doublings, policy.cap_s) * (1 + jitter)
    return Breaker(
        state=BreakerState.OPEN,
        epoch=breaker.epoch + 1,
        trips=trips,
        open_until=max(breaker.open_until, now_s + pause),
        reason=reason,
    )


def _report_trial(
    breaker: Breaker,
    attempt: str,
    verdict: Verdict,
    now_s: float,
    policy: BreakerPolicy,
    *,
    reason: str,
    jitter: float,
) -> Breaker:
    if attempt != breaker.trial:
        return breaker
    if verdict is Verdict.SUCCESS:
        return Breaker(epoch=breaker.epoch + 1, trips=breaker.trips, healthy_since=now_s)
    if verdict is Verdict.FAILURE:
        return opened(breaker, now_s, policy, reason=reason, jitter=jitter)
    return replace(breaker, trial="", trial_until=0.0)


def _decayed_trips(breaker: Breaker, now_s: float, policy: BreakerPolicy) -> int:
    if breaker.state is not BreakerState.CLOSED:
        return breaker.trips
    return max(0, breaker.trips - int((now_s - breaker.healthy_since) // policy.decay_s))


def _counted(
    window: tuple[tuple[int, int, int], ...], now_s: float, policy: BreakerPolicy, *, failed: bool
) -> tuple[tuple[int, int, int], ...]:
    bucket = int(now_s // BUCKET_S)
    oldest = int((now_s - policy.window_s) // BUCKET_S) + 1
    kept = [entry for entry in window if entry[0] >= oldest]
    successes, failures = kept.pop()[1:] if kept and kept[-1][0] == bucket else (0, 0)
    kept.append((bucket, successes + (not failed), failures + failed))
    return tuple(kept)


def _rate_reached(window: tuple[tuple[int, int, int], ...], policy: BreakerPolicy) -> bool:
    failures = sum(entry[2] for entry in window)
    total = failures + sum(entry[1] for entry in window)
    return total >= policy.rate_minimum and failures >= policy.failure_rate * total
