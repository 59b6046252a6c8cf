"""What happens to an installation, to whom, when and for how long: settled beforehand by one seed.

Belongs here: the kinds of fault and the rules that keep an installation able to work: somebody of each role
is always sound, and everything ends. Does not belong here: making them happen (``actor``). Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum, auto
from random import Random

Range = tuple[float, float]
"""Least and most, in seconds."""


class Role(StrEnum):
    """Whom a fault befalls."""

    DISPATCHER = auto()
    MONITOR = auto()
    ENGINE = auto()
    FLEET = auto()
    REDIS = auto()
    BATCH = auto()
    CLIENT = auto()


class Kind(StrEnum):
    """A kind of fault; the word before the underscore is the role that it befalls.

    kill: SIGKILL, and a new process ``for_s`` later. stop: SIGSTOP, and SIGCONT ``for_s`` later. roll:
    SIGTERM, and a new process at once. restart: SIGTERM, and a new process ``for_s`` later. lose: a kill
    after which the last ``lost_s`` seconds of what was written are gone. The others are an engine's, or all
    engines' at once, for ``for_s``.
    """

    DISPATCHER_KILL = auto()
    DISPATCHER_STOP = auto()
    DISPATCHER_ROLL = auto()
    MONITOR_KILL = auto()
    MONITOR_STOP = auto()
    ENGINE_KILL = auto()
    ENGINE_STOP = auto()
    ENGINE_HANG = auto()
    ENGINE_CUT = auto()
    ENGINE_RESET = auto()
    ENGINE_503 = auto()
    ENGINE_429 = auto()
    FLEET_503 = auto()
    FLEET_429 = auto()
    REDIS_STOP = auto()
    REDIS_RESTART = auto()
    REDIS_KILL = auto()
    REDIS_LOSE = auto()
    BATCH_CANCEL = auto()
    CLIENT_KILL = auto()

    @property
    def role(self) -> Role:
        return Role(self.value.partition("_")[0])


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: ``at_s`` seconds after the start it befalls number ``whom`` of its role, for ``for_s``."""

    at_s: float
    kind: Kind
    whom: int
    for_s: float
    lost_s: float = 0.0
    """How much of what Redis wrote last is lost, at most."""

    @property
    def end_s(self) -> float:
        return self.at_s + self.for_s

    def __str__(self) -> str:
        lost = f", {self.lost_s:.1f} s lost" if self.lost_s else ""
        return f"{self.kind} {self.whom} for {self.for_s:.1f} s{lost}"


@dataclass(frozen=True, slots=True)
class Scale:
    """How dense and how long faults are."""

    gap_s: Range
    """From one fault to the next."""
    down_s: Range
    """How long a killed process is away."""
    storm_s: Range
    """How long an engine refuses, hangs or breaks answers off."""
    stop_s: Range
    """How long a process stands still."""
    redis_s: Range
    """How long Redis is away."""
    redis_rest_s: float
    """Quiet for Redis after that."""
    cancel_rest_s: float
    """From one cancelled batch to the next, so that some are left to end."""
    settle_s: float
    """What a new process is given before the next fault may befall it."""


LONG = Scale(
    gap_s=(0.5, 4.0),
    down_s=(0.5, 8.0),
    storm_s=(2.0, 12.0),
    stop_s=(2.0, 30.0),
    redis_s=(0.2, 12.0),
    redis_rest_s=25.0,
    cancel_rest_s=120.0,
    settle_s=3.0,
)
SHORT = Scale(
    gap_s=(0.1, 0.6),
    down_s=(0.1, 1.0),
    storm_s=(0.5, 2.0),
    stop_s=(0.5, 3.0),
    redis_s=(0.1, 1.0),
    redis_rest_s=2.0,
    cancel_rest_s=5.0,
    settle_s=1.5,
)


@dataclass(frozen=True, slots=True)
class Numbers:
    """How many there are of each role, and how many of them are always left alone."""

    engines: int
    dispatchers: int
    monitors: int

    def of(self, role: Role) -> int:
        named = {Role.ENGINE: self.engines, Role.DISPATCHER: self.dispatchers, Role.MONITOR: self.monitors}
        return named.get(role, 1)

    def spared(self, role: Role) -> int:
        return {Role.ENGINE: min(2, self.engines), Role.DISPATCHER: 1, Role.MONITOR: 1}.get(role, 0)


_TURN = [*Kind, *(kind for kind in Kind if kind.role is Role.DISPATCHER)]
"""One turn: dispatchers, who hold what could be lost, suffer twice as often."""


def schedule(rng: Random, scale: Scale, numbers: Numbers, lasts_s: float) -> list[Fault]:
    """Faults from 0 to ``lasts_s``, by which all have ended, in the order in which they begin.

    Kinds come in turns, each turn in an order of its own, so that a long run has all of them.
    """
    faults: list[Fault] = []
    busy_until: dict[Role, dict[int, float]] = {role: {} for role in Role}
    waiting: list[Kind] = []
    at_s = rng.uniform(*scale.gap_s)
    while at_s < lasts_s:
        if len(waiting) < len(_TURN):
            waiting += rng.sample(_TURN, len(_TURN))
        fault = next(_possible(waiting, busy_until, numbers, rng, scale, at_s, lasts_s), None)
        if fault is not None:
            waiting.remove(fault.kind)
            busy_until[fault.kind.role][fault.whom] = fault.end_s + _rest_s(fault.kind, scale)
            faults.append(fault)
        at_s += rng.uniform(*scale.gap_s)
    return faults


def _possible(
    kinds: list[Kind],
    busy_until: Mapping[Role, Mapping[int, float]],
    numbers: Numbers,
    rng: Random,
    scale: Scale,
    at_s: float,
    lasts_s: float,
) -> Iterator[Fault]:
    """Faults of those kinds that may begin now, the first kind first."""
    for kind in kinds:
        role = kind.role
        free = [who for who in range(numbers.of(role)) if busy_until[role].get(who, 0.0) <= at_s]
        if len(free) <= numbers.spared(role):
            continue
        fault = Fault(at_s, kind, rng.choice(free), _lasts(kind, rng, scale), _lost(kind, rng))
        if fault.end_s <= lasts_s:
            yield fault


def _lasts(kind: Kind, rng: Random, scale: Scale) -> float:
    match kind:
        case Kind.DISPATCHER_ROLL | Kind.BATCH_CANCEL | Kind.CLIENT_KILL:
            return 0.0
        case Kind.DISPATCHER_STOP | Kind.MONITOR_STOP | Kind.ENGINE_STOP:
            # Every second one lasts as long as may be: what ends before a claim does is the smaller trouble.
            return scale.stop_s[1] if rng.random() < 0.5 else rng.uniform(*scale.stop_s)
        case Kind.REDIS_STOP | Kind.REDIS_KILL | Kind.REDIS_LOSE | Kind.REDIS_RESTART:
            return rng.uniform(*scale.redis_s)
        case Kind.DISPATCHER_KILL | Kind.MONITOR_KILL | Kind.ENGINE_KILL:
            return rng.uniform(*scale.down_s)
        case _:
            return rng.uniform(*scale.storm_s)


def _lost(kind: Kind, rng: Random) -> float:
    return rng.uniform(0.05, 1.0) if kind is Kind.REDIS_LOSE else 0.0


def _rest_s(kind: Kind, scale: Scale) -> float:
    named = {Role.REDIS: scale.redis_rest_s, Role.BATCH: scale.cancel_rest_s}
    return named.get(kind.role, scale.settle_s)
