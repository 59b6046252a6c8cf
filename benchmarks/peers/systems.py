"""Who is compared: every way of running the batch, by name, and the runs that a person asks for.

Belongs here: names, windows, retries, the order of the runs. Pure. Does not belong here: how anything is
started (``routers``, ``runs``).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

WINDOWS: Final = (64, 128, 256, None)
"""Requests that a router's client has in flight. None: all of the file."""
RETRIES: Final = 4
"""Further tries of a client that retries: five in all, as many as Forebay makes."""


class Kind(StrEnum):
    """What drives the batch: `forebay run`; the plain client through a router; that client alone."""

    FOREBAY = "forebay"
    ROUTER = "router"
    CENTRAL = "central"


@dataclass(frozen=True, slots=True)
class System:
    """One of those compared. ``package`` None: needs nothing installed. ``setting``: its policy or order.

    ``runtime``: what its fleet has to run, when not a mix of both; see ``page`` for why.
    """

    kind: Kind
    setting: str
    package: str | None = None
    runtime: str | None = None

    @property
    def name(self) -> str:
        """As people ask for it."""
        return f"{self.package or self.kind}/{self.setting}"

    @property
    def windowed(self) -> bool:
        """Whether a client must guess how many requests to have in flight."""
        return self.kind is Kind.ROUTER


def _routers(package: str, settings: Iterable[str], runtime: str | None = None) -> list[System]:
    return [System(Kind.ROUTER, setting, package, runtime) for setting in settings]


SYSTEMS: Final = {
    system.name: system
    for system in (
        System(Kind.FOREBAY, "all"),
        System(Kind.FOREBAY, "spare"),
        *_routers("smg", ("power_of_two", "least_requests", "least_load", "round_robin", "cache_aware")),
        *_routers("vllm-router", ("cache_aware", "power_of_two"), "vllm"),
        *_routers("sglang-router", ("cache_aware", "power_of_two"), "sglang"),
        *_routers("litellm", ("least-busy", "simple-shuffle")),
        System(Kind.CENTRAL, "first-come"),
        System(Kind.CENTRAL, "longest-first"),
        System(Kind.CENTRAL, "nobody"),
    )
}
_ONLY_INTERACTIVE: Final = ("forebay/spare", "central/nobody")
"""Leaving room for others, and no batch at all: told of only beside interactive traffic."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run. ``window`` None: all of the file, or none to guess. ``retries``: whether the client retries;
    Forebay always does.
    """

    scenario: str
    requests: int
    foretold: bool
    seed: int
    system: str
    window: int | None = None
    retries: bool = False

    @property
    def key(self) -> str:
        """Tells a run from all others, in words."""
        lengths = "foretold" if self.foretold else "unknown"
        parts = [self.scenario, str(self.requests), lengths, f"seed {self.seed}", self.system]
        if SYSTEMS[self.system].windowed:
            parts.append("unlimited" if self.window is None else f"window {self.window}")
        return ", ".join(parts + (["retries"] if self.retries else []))


def matching(patterns: Sequence[str]) -> list[str]:
    """The systems that a pattern like ``smg/*`` names. Raises ValueError for a pattern that names none."""
    for pattern in patterns:
        if not fnmatch.filter(SYSTEMS, pattern):
            raise ValueError(f"{pattern} names no system; there are {', '.join(SYSTEMS)}")
    return [name for name in SYSTEMS if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a person asks for; see ``arguments``."""

    scenarios: Sequence[str]
    requests: int
    seeds: Sequence[int]
    lengths: Sequence[str]
    systems: Sequence[str]
    windows: Sequence[int | None]
    retries: Sequence[bool]


def cases(wish: Wish) -> list[Case]:
    """All runs, seed by seed, every second seed in reverse: what grows warm or busy hits all alike."""
    ordered = []
    for turn, seed in enumerate(wish.seeds):
        round_ = [
            Case(scenario, wish.requests, lengths == "foretold", seed, system, window, retries)
            for scenario in wish.scenarios
            for lengths in wish.lengths
            for system in wish.systems
            if scenario == "interactive" or system not in _ONLY_INTERACTIVE
            for window in _windows(system, wish.windows)
            for retries in _retries(system, wish.retries)
        ]
        ordered += round_ if turn % 2 == 0 else round_[::-1]
    return ordered


def _windows(system: str, windows: Sequence[int | None]) -> Sequence[int | None]:
    return windows if SYSTEMS[system].windowed else (None,)


def _retries(system: str, retries: Sequence[bool]) -> Sequence[bool]:
    """Forebay retries by itself, and whoever sends nothing need not."""
    drives_a_client = SYSTEMS[system].kind is not Kind.FOREBAY and system != "central/nobody"
    return retries if drives_a_client else (False,)
