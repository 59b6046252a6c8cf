"""What a rolling restart of all dispatchers costs a batch.

    python benchmarks/rolling.py [--requests 3000] [--dispatchers 3] [--rounds 2] [--surge] [--json]

The fleet of the other benchmarks (speed 1, 1, 2, 4 with 8, 8, 16, 32 slots), lognormal answer lengths
foretold by `max_tokens`. In each round the same batch is run without and with a restart, so that a noisy
minute hits both: from a tenth of the lower bound on, one dispatcher after the other gets SIGTERM, and its
successor is started when it has ended, or with `--surge` before it is asked to. Printed is the time from
submitting to the finished files over the lower bound, how long dispatchers took to end (those that ended
before the batch did: give it more requests if some did not), and the lines that were lost, doubled, or sent
more than once, of which there should be none.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench_fleet import MIXED, Rig, lengths, lower_bound_s, rig, write_batch

_POLL_S = 0.02
_ENV = {"FOREBAY_HEDGE": "false"}
"""Second attempts would be taken for lines that a restart sent again."""


async def restart(made: Rig, ended_s: list[float], *, after_s: float, surge: bool) -> None:
    """Replace all dispatchers, one after the other; notes how long each took to end, in seconds."""
    await asyncio.sleep(after_s)
    for name in [name for name in made.services if name.startswith("dispatcher")]:
        if surge:
            await _start(made, f"{name}-next")
        began = time.monotonic()
        made.services[name].terminate()
        while made.services[name].poll() is None:  # noqa: ASYNC110 - a process that cannot signal us
            await asyncio.sleep(_POLL_S)
        ended_s.append(time.monotonic() - began)
        if not surge:
            await _start(made, f"{name}-next")


async def _start(made: Rig, name: str) -> None:
    """Start a dispatcher, and wait until it takes jobs."""
    made.start(name, "dispatcher", _ENV | {"FOREBAY_NAME": name})
    while not await made.client.exists(f"rq:worker:{name}"):  # noqa: ASYNC110 - another process
        await asyncio.sleep(_POLL_S)


async def measure(
    tokens: Sequence[int], *, dispatchers: int, rolling: bool, surge: bool
) -> dict[str, object]:
    """One run on a fleet of its own."""
    bound_s = lower_bound_s(tokens, MIXED)
    ended_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        batch = Path(folder, "batch.jsonl")
        write_batch(batch, tokens, foretold=True)
        async with rig(MIXED, dispatchers=dispatchers, env=_ENV) as made, asyncio.TaskGroup() as group:
            if rolling:
                replacing = group.create_task(restart(made, ended_s, after_s=bound_s / 10, surge=surge))
            outcome = await made.run(batch)
            if rolling:
                replacing.cancel()  # what is not replaced by now cost the batch nothing
    return {
        "restart": "rolling" if rolling else "none",
        "elapsed_s": round(outcome.elapsed_s, 2),
        "ratio": round(outcome.elapsed_s / bound_s, 3),
        "ended_s": [round(seconds, 2) for seconds in ended_s],
        "lost": len(tokens) - (len(outcome.tokens) - outcome.doubled),
        "doubled": outcome.doubled,
        "sent_again": outcome.sent_again,
    }


async def measure_all(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Every round, without and with."""
    told = []
    for seed in range(1, arguments.rounds + 1):
        tokens = lengths(arguments.requests, seed)
        for rolling in (False, True):
            row = await measure(
                tokens, dispatchers=arguments.dispatchers, rolling=rolling, surge=arguments.surge
            )
            told.append({"seed": seed} | row)
            if not arguments.json:
                print(told[-1], flush=True)
    return told


def table(told: Sequence[dict[str, object]]) -> str:
    """The median of the ratio without and with, and all that should be none."""
    heads = (
        "restart",
        "time over the bound",
        "dispatchers replaced",
        "longest end of one (s)",
        "lost",
        "doubled",
        "sent again",
    )
    lines = [_line(*heads), "|---" * len(heads) + "|"]
    for kind in ("none", "rolling"):
        rows = [row for row in told if row["restart"] == kind]
        ratio = statistics.median(float(str(row["ratio"])) for row in rows)
        ended = [seconds for row in rows for seconds in _list(row["ended_s"])]
        counts = (sum(int(str(row[name])) for row in rows) for name in ("lost", "doubled", "sent_again"))
        longest = f"{max(ended):.2f}" if ended else "-"
        lines.append(_line(kind, f"{ratio:.3f}", len(ended), longest, *counts))
    return "\n".join(lines)


def _list(value: object) -> list[float]:
    assert isinstance(value, list)
    return value


def _line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a rolling restart costs a batch.")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--dispatchers", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--surge", action="store_true", help="start the next before ending the last")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    told = asyncio.run(measure_all(arguments))
    print(json.dumps(told, indent=2) if arguments.json else table(told))


if __name__ == "__main__":
    main()
