"""The adaptive limit: how many leases a worker may have next, from what it says and what we hold. Pure.

Reading the load belongs to the monitor, holding leases to the limit to ``store``; halving on a 429 happens
there too, at once, and shows here only as a lower limit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

INITIAL_LIMIT = 4
"""Low, because what is sent to an engine with fewer slots stands in its queue, where nobody else can take it.
An engine with 256 is known within four seconds all the same."""
DEFAULT_LIMIT = 16
"""First limit of a worker of which nothing is known yet; of one that never tells, answers may raise it."""
PRESS = 0.9
"""Leases press against the limit from this share of it on."""
PATIENCE = 2
"""So many samples in a row must show too long a queue: a burst waits for a moment in any engine."""
BLIND_STEP_S = 10.0
"""A limit that no load speaks for may grow by 1 when it has stood for so long."""


class Share(StrEnum):
    """How much of an engine is ours.

    all: the whole of it. spare: what other clients leave below a fraction of it; batch work yields to them.
    """

    ALL = "all"
    SPARE = "spare"


@dataclass(frozen=True, slots=True)
class LimitPolicy:
    """``spare_fraction`` and ``kv_ceiling`` are 0.0 to 1.0.

    ``growth``: how many times larger the limit gets in one step while the worker was never full. What it
    overshoots waits in the engine; at 1.5 that is far less than with doubling, see ``benchmarks/limits.py``.
    """

    share: Share = Share.ALL
    spare_fraction: float = 0.8
    kv_ceiling: float = 0.9
    initial: int = INITIAL_LIMIT
    growth: float = 1.5


@dataclass(frozen=True, slots=True)
class LimitInputs:
    """One worker as the decision sees it. None: unknown.

    ``limit`` None: the worker has none yet. ``leases`` must have been counted before the load was sampled, so
    that the load can have seen their requests. ``others`` is how many requests of other clients it has,
    beyond our leases. ``slots`` is how many requests it runs at once, as the engine or a person told, else as
    learned from watching it full. ``told``: ``slots`` was told, not learned. ``been_full``: it was seen full
    once in this incarnation. ``over``: samples in a row, this one included, whose queue was too long.
    ``settled``: the load was sampled after the limit last changed, so that it shows what that change led to.
    ``unchanged_s``: how long the limit has stood, counted only while the worker did not say what it runs.
    """

    limit: int | None
    leases: int
    running: int | None
    waiting: int | None
    kv_usage: float | None
    others: int = 0
    slots: int | None = None
    told: bool = False
    been_full: bool = False
    over: int = 0
    settled: bool = True
    unchanged_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LimitDecision:
    """The limit from now on, 1 or more, and why, for people.

    ``anew``: it is written even if it is the same, so that what answers show is counted from now on.
    """

    value: int
    reason: str
    anew: bool = False


def queue_target(running: int | None) -> int:
    """How many requests may wait in the engine so that a slot that falls free is never idle: 1 to 4."""
    return max(1, min(4, (running or 0) // 8))


def memory_full(kv_usage: float | None, policy: LimitPolicy) -> bool:
    """Whether the worker's memory is at our ceiling; unknown usage is not."""
    ceiling = policy.kv_ceiling
    if policy.share is Share.SPARE:
        ceiling = min(ceiling, policy.spare_fraction)
    return kv_usage is not None and kv_usage >= ceiling


def next_limit(inputs: LimitInputs, policy: LimitPolicy) -> LimitDecision:
    """The worker's next limit; the same value when nothing is to change. Never below 1.

    When the engine tells its slots, the limit never passes slots + ``queue_target(slots)``.
    """
    if inputs.limit is None:
        return _bounded(_start(inputs, policy), inputs, policy)
    return _bounded(_adapted(inputs.limit, inputs, policy), inputs, policy)


def _start(inputs: LimitInputs, policy: LimitPolicy) -> LimitDecision:
    if inputs.told and inputs.slots:
        return LimitDecision(inputs.slots, f"start: it runs {inputs.slots} at once")
    return LimitDecision(policy.initial, f"start: configured {policy.initial}")


def _adapted(limit: int, inputs: LimitInputs, policy: LimitPolicy) -> LimitDecision:
    running, waiting = inputs.running, inputs.waiting
    if running is None or waiting is None:
        return _blind(limit, inputs, policy)
    if waiting and inputs.others and policy.share is Share.SPARE:
        return _yielded(limit, waiting, inputs)
    target = queue_target(running)
    if waiting > target:
        return _shrunk(limit, running, waiting, target, inputs)
    if memory_full(inputs.kv_usage, policy):
        goal = max(1, running)
        if goal < limit:
            return LimitDecision(goal, f"shrink: memory {inputs.kv_usage:.0%} used, {running} running")
        return LimitDecision(limit, f"hold: memory {inputs.kv_usage:.0%} used")
    if waiting:
        return LimitDecision(limit, f"hold: {waiting} waiting, {target} wanted")
    if inputs.leases < PRESS * limit:
        return LimitDecision(limit, "hold: leases do not press")
    return _grown(limit, running, inputs, policy)


def _blind(limit: int, inputs: LimitInputs, policy: LimitPolicy) -> LimitDecision:
    # A refusal or a healing cut it, and no load will ever show that there is room again: find out gently.
    usual = inputs.slots or DEFAULT_LIMIT
    full = bool(inputs.waiting) or memory_full(inputs.kv_usage, policy)
    rested = inputs.unchanged_s >= BLIND_STEP_S and inputs.leases >= PRESS * limit
    if limit < usual and rested and not full:
        return LimitDecision(limit + 1, f"grow by 1, up to {usual}: it does not say what runs and waits")
    return LimitDecision(limit, "hold: it does not say what runs and waits")


def _grown(limit: int, running: int, inputs: LimitInputs, policy: LimitPolicy) -> LimitDecision:
    if not inputs.settled:
        return LimitDecision(limit, "hold: its load is older than this limit")
    if not inputs.been_full and running >= PRESS * inputs.leases:
        value = max(limit + 1, int(policy.growth * limit))
        return LimitDecision(value, f"grow: {inputs.leases} leases, none waiting; never full yet")
    # At the slots that it was seen full with, a large step would only fill its queue.
    step = 1 if inputs.slots is not None and limit >= inputs.slots else max(1, limit // 8)
    # All our leases run and none waits: there is at least so much room, whatever the limit was cut to.
    proven = min(inputs.leases, running)
    return LimitDecision(max(limit, proven) + step, f"grow by {step}: {inputs.leases} leases, none waiting")


def _shrunk(limit: int, running: int, waiting: int, target: int, inputs: LimitInputs) -> LimitDecision:
    if inputs.over < PATIENCE:
        return LimitDecision(limit, f"hold: {waiting} waiting, not for long")
    goal = max(1, running + target)
    if goal < limit:
        return LimitDecision(goal, f"shrink: {waiting} waiting, {running} running")
    if inputs.leases > limit:
        return LimitDecision(limit, f"hold: {waiting} waiting, {inputs.leases} leases run out to {limit}")
    step = max(1, limit // 8)
    return LimitDecision(max(1, limit - step), f"shrink by {step}: {waiting} waiting beside ours")


def _yielded(limit: int, waiting: int, inputs: LimitInputs) -> LimitDecision:
    # Interactive requests must never stand in a queue that batch work keeps filled.
    value = max(1, min(limit, inputs.leases) - waiting)
    return LimitDecision(value, f"yield: {waiting} waiting, {inputs.others} of other clients")


def _bounded(decision: LimitDecision, inputs: LimitInputs, policy: LimitPolicy) -> LimitDecision:
    slots = inputs.slots
    if slots is None:
        return LimitDecision(max(1, decision.value), decision.reason)
    if policy.share is Share.SPARE:
        room = _spare_room(slots, inputs.others, policy)
        if decision.value > room:
            return LimitDecision(room, f"spare: {inputs.others} of other clients, {slots} slots")
    ceiling = slots + queue_target(slots)
    if inputs.told and decision.value > ceiling:
        return LimitDecision(ceiling, f"ceiling: it runs {slots} at once")
    return LimitDecision(max(1, decision.value), decision.reason)


def _spare_room(slots: int, others: int, policy: LimitPolicy) -> int:
    # Requests that come independently, n of them on average, vary by the square root of n; ours cannot be
    # called back when they come, so two such spreads stay free for them.
    spread = math.ceil(2 * math.sqrt(others))
    return max(1, min(int(policy.spare_fraction * slots), slots - spread) - others)
