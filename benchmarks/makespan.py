"""How near to the possible a batch ends on a mixed fleet.

    python benchmarks/makespan.py [--requests 500 2000] [--seeds 1 2 3] [--policies batch ...] [--json]

Four fluid simulated engines of speed 1, 1, 2, 4 with 8, 8, 16, 32 slots; lognormal answer lengths, foretold
by `max_tokens` or not. Whole product: Redis, monitor, dispatcher, durable results. Printed is the time from
submitting to the finished files over the lower bound (total work over total capacity, or the longest answer
alone on the fastest engine). Other policies run through the same dispatcher, with its limits and late
binding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from pathlib import Path

from bench_fleet import MIXED, lengths, lower_bound_s, rig, write_batch

_ONE = {"weights": {"weight": 1}}
POLICIES: dict[str, dict[str, object]] = {
    "batch": {},
    "round-robin": {"strategies": {"rr": {**_ONE, "picker": "round-robin"}}, "default_strategy": "rr"},
    "random": {
        "strategies": {"any": {**_ONE, "picker": "softmax", "temperature": 1e6}},
        "default_strategy": "any",
    },
    "p2c": {
        "strategies": {"p2c": {"weights": {"inflight": 1}, "picker": "p2c"}},
        "default_strategy": "p2c",
    },
    "least-inflight": {
        "strategies": {"least": {"weights": {"inflight": 1}, "picker": "max-score"}},
        "default_strategy": "least",
    },
}


async def measure(count: int, seed: int, policy: str, *, foretold: bool) -> dict[str, object]:
    """One run on a fleet of its own, so that nothing is known of it at the start."""
    env = {"FOREBAY_SCHEDULER": json.dumps(POLICIES[policy])} if POLICIES[policy] else {}
    with tempfile.TemporaryDirectory() as folder:
        batch = Path(folder, "batch.jsonl")
        write_batch(batch, lengths(count, seed), foretold=foretold)
        async with rig(MIXED, env=env) as made:
            outcome = await made.run(batch)
    bound_s = lower_bound_s(outcome.tokens, MIXED)
    return {
        "requests": count,
        "seed": seed,
        "policy": policy,
        "foretold": foretold,
        "elapsed_s": round(outcome.elapsed_s, 2),
        "bound_s": round(bound_s, 2),
        "ratio": round(outcome.elapsed_s / bound_s, 3),
        "completed": outcome.completed,
        "doubled": outcome.doubled,
        "shares": sorted(outcome.by_worker.values()),
        "cpu_ms_per_request": round(outcome.cpu_s / count * 1000, 2),
    }


async def measure_all(arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Alternating policies within each seed, so that a noisy minute hits all alike."""
    rows = []
    for count in arguments.requests:
        for foretold in arguments.lengths:
            for seed in arguments.seeds:
                for policy in arguments.policies:
                    row = await measure(count, seed, policy, foretold=foretold == "foretold")
                    rows.append(row)
                    if not arguments.json:
                        print(row, flush=True)
    return rows


def table(rows: list[dict[str, object]]) -> str:
    """The median and range of the ratio over the seeds."""
    groups: dict[tuple[object, ...], list[float]] = {}
    for row in rows:
        key = (row["requests"], "foretold" if row["foretold"] else "unknown", row["policy"])
        groups.setdefault(key, []).append(float(str(row["ratio"])))
    lines = ["| requests | lengths | policy | time over the bound | range |", "|---|---|---|---|---|"]
    for (count, known, policy), ratios in groups.items():
        middle, low, high = statistics.median(ratios), min(ratios), max(ratios)
        lines.append(f"| {count} | {known} | {policy} | {middle:.2f} | {low:.2f} to {high:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure makespan over the lower bound.")
    parser.add_argument("--requests", type=int, nargs="+", default=[500, 2000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument(
        "--lengths", nargs="+", choices=["foretold", "unknown"], default=["foretold", "unknown"]
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = asyncio.run(measure_all(arguments))
    print(json.dumps(rows, indent=2) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
