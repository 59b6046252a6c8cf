"""The command line: what a person may ask for.

python -m benchmarks.peers                       the default scenario, everybody, three seeds
python -m benchmarks.peers --list                what that would run, and what of it is measured already
python -m benchmarks.peers --systems 'smg/*' forebay/all --windows 128 --scenario killed 429
python -m benchmarks.peers --page-only           docs/benchmarks.md from what is measured
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.environments import CACHE, CHECKOUT
from benchmarks.peers.scenarios import DEFAULT, SCENARIOS
from benchmarks.peers.systems import SYSTEMS, WINDOWS, Wish, matching

RUNS = CACHE / "runs.jsonl"
PAGE = CHECKOUT / "docs" / "benchmarks.md"


def window(text: str) -> int | None:
    """A number above 0, or ``unlimited``: None."""
    if text == "unlimited":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a window is a number above 0, or unlimited")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """All flags."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.peers",
        description="Run the same batch over the same simulated engines through Forebay and its peers. Runs "
        "that the file holds already are not repeated.",
    )
    add = made.add_argument
    add("--scenario", nargs="+", choices=[*SCENARIOS, "every"], default=[DEFAULT])
    add("--requests", type=int, default=2000)
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    add("--lengths", nargs="+", choices=["unknown", "foretold"], default=["unknown"])
    add("--systems", nargs="+", default=["*"], metavar="NAME", help=f"or a pattern: {', '.join(SYSTEMS)}")
    add("--windows", nargs="+", type=window, default=list(WINDOWS), help="numbers, or unlimited")
    add("--retries", nargs="+", choices=["off", "on"], default=["off"], help="whether clients retry")
    add("--json", type=Path, default=RUNS, help="the file of runs")
    add("--page", type=Path, nargs="?", const=PAGE, help="write the tables there when done")
    add("--page-only", action="store_true", help="measure nothing, write docs/benchmarks.md")
    add("--list", action="store_true", help="measure nothing, say what would be")
    return made


def wish(told: argparse.Namespace) -> Wish:
    """What is asked for. Raises ValueError for a system that there is not."""
    scenarios: Sequence[str] = list(SCENARIOS) if "every" in told.scenario else told.scenario
    return Wish(
        scenarios=scenarios,
        requests=told.requests,
        seeds=told.seeds,
        lengths=told.lengths,
        systems=matching(told.systems),
        windows=told.windows,
        retries=[each == "on" for each in told.retries],
    )
