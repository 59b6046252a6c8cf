"""How fleets and lengths are written on a command line, and read.

speed=100,slots=8       2xspeed=400,slots=32,prefill=8000       lognormal:median=128,sigma=0.8,count=2000
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from forebay.policy.engine import EngineSpec
from forebay.policy.workload import Lengths
from workers.errors import SettingsError

MOST_WORKERS = 10_000
MOST_REQUESTS = 1_000_000
_TIMES = re.compile(r"(\d+)x(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Drawing:
    """How many answers to draw, from which lengths, with which seed."""

    lengths: Lengths
    count: int
    seed: int


def read_engines(text: str) -> list[EngineSpec]:
    """Read `[Nx]speed=S,slots=K[,prefill=P]`: N engines alike. Raises SettingsError naming what is wrong."""
    times, rest = 1, text
    if (found := _TIMES.fullmatch(text)) is not None:
        times, rest = int(found[1]), found[2]
    given = _pairs("fleet", text, rest, required={"speed", "slots"}, optional={"prefill"})
    if not 1 <= times <= MOST_WORKERS:
        raise SettingsError(f"fleet {text!r}: 1 to {MOST_WORKERS:,} engines, not {times:,}")
    engine = EngineSpec(
        speed=_number("fleet", text, "speed", given["speed"], above=0.0),
        slots=_whole("fleet", text, "slots", given["slots"]),
        prefill=_number("fleet", text, "prefill", given.get("prefill", "0")),
    )
    return [engine] * times


def read_lengths(text: str) -> Drawing:
    """Read `lognormal:median=M,sigma=S[,count=N][,seed=N][,most=N]`. Raises SettingsError."""
    kind, colon, rest = text.partition(":")
    if kind != "lognormal" or not colon:
        raise SettingsError(f"lengths {text!r}: write lognormal:median=128,sigma=0.8,count=2000")
    given = _pairs("lengths", text, rest, required={"median", "sigma"}, optional={"count", "seed", "most"})
    lengths = Lengths(
        median=_number("lengths", text, "median", given["median"], above=0.0),
        sigma=_number("lengths", text, "sigma", given["sigma"]),
        most=_whole("lengths", text, "most", given.get("most", str(Lengths().most))),
    )
    count = _whole("lengths", text, "count", given.get("count", "1000"))
    if count > MOST_REQUESTS:
        raise SettingsError(f"lengths {text!r}: count is {MOST_REQUESTS:,} at most")
    return Drawing(lengths, count, _whole("lengths", text, "seed", given.get("seed", "1")))


def _pairs(what: str, text: str, rest: str, *, required: set[str], optional: set[str]) -> Mapping[str, str]:
    pairs = [part.partition("=") for part in rest.split(",")]
    given = {name.strip(): value.strip() for name, _, value in pairs}
    known = ", ".join(sorted(required | optional))
    if unknown := given.keys() - required - optional:
        raise SettingsError(f"{what} {text!r}: unknown {', '.join(sorted(unknown))!s}; there are {known}")
    if missing := required - given.keys():
        raise SettingsError(f"{what} {text!r}: {' and '.join(sorted(missing))} missing")
    if len(given) != len(pairs):
        raise SettingsError(f"{what} {text!r}: something is said twice")
    return given


def _number(what: str, text: str, name: str, value: str, *, above: float | None = None) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0 or (above is not None and number <= above):
        least = "above 0" if above is not None else "0 or more"
        raise SettingsError(f"{what} {text!r}: {name} is a number {least}, not {value!r}")
    return number


def _whole(what: str, text: str, name: str, value: str) -> int:
    if not value.isdecimal() or not value.isascii() or int(value) < 1:
        raise SettingsError(f"{what} {text!r}: {name} is a whole number above 0, not {value!r}")
    return int(value)
