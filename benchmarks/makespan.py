"""How near to the possible a batch ends on a mixed fleet.

    python benchmarks/makespan.py [--requests 500 2000] [--seeds 1 2 3] [--policies batch ...]
        [--scenario calm killed 503 killed+503] [--hedge on off] [--json]

Four fluid simulated engines of speed 1, 1, 2, 4 with 8, 8, 16, 32 slots; lognormal answer lengths, foretold
by `max_tokens` or not. Whole product: Redis, monitor, dispatcher, durable results. Printed is the time from
submitting to the finished files over the lower bound (total work over total capacity, or the longest answer
alone on the fastest engine). Other policies run through the same dispatcher, with its limits and late
binding. `--hedge` says whether second attempts are made. In a scenario other than calm something goes wrong a
third of the bound in, and the bound is that of the capacity which remains (`trouble`); then *lost* counts the
requests without an answer, *doubled* those with two.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from bench_fleet import MIXED, Outcome, lengths, lower_bound_s, rig, write_batch
from trouble import SCENARIOS, happening, remaining_bound_s

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


@dataclass(frozen=True, slots=True)
class Case:
    """What one run is about."""

    requests: int
    foretold: bool
    seed: int
    scenario: str
    hedge: bool
    policy: str

    @property
    def group(self) -> tuple[object, ...]:
        """All but the seed, as the table has it."""
        known = "foretold" if self.foretold else "unknown"
        return self.requests, known, self.scenario, "on" if self.hedge else "off", self.policy


async def measure(case: Case) -> dict[str, object]:
    """One run on a fleet of its own, so that nothing is known of it at the start."""
    env = {"FOREBAY_HEDGE": str(case.hedge)}
    if POLICIES[case.policy]:
        env["FOREBAY_SCHEDULER"] = json.dumps(POLICIES[case.policy])
    wanted = lengths(case.requests, case.seed)
    trouble, after_s = SCENARIOS[case.scenario], lower_bound_s(wanted, MIXED) / 3
    with tempfile.TemporaryDirectory() as folder:
        batch = Path(folder, "batch.jsonl")
        write_batch(batch, wanted, foretold=case.foretold)
        async with rig(MIXED, env=env) as made, happening(made, trouble, after_s):
            outcome = await made.run(batch)
    return row(case, outcome, remaining_bound_s(outcome.tokens, MIXED, trouble, after_s))


def row(case: Case, outcome: Outcome, bound_s: float) -> dict[str, object]:
    """What is told of one run."""
    return asdict(case) | {
        "elapsed_s": round(outcome.elapsed_s, 2),
        "bound_s": round(bound_s, 2),
        "ratio": round(outcome.elapsed_s / bound_s, 3),
        "completed": outcome.completed,
        "lost": case.requests - (len(outcome.tokens) - outcome.doubled),
        "doubled": outcome.doubled,
        "shares": sorted(outcome.by_worker.values()),
        "cpu_ms_per_request": round(outcome.cpu_s / case.requests * 1000, 2),
    }


def cases(arguments: argparse.Namespace) -> list[Case]:
    """Alternating policies within each seed, so that a noisy minute hits all alike."""
    return [
        Case(count, known == "foretold", seed, scenario, hedge == "on", policy)
        for count, known, seed, scenario, hedge, policy in itertools.product(
            arguments.requests,
            arguments.lengths,
            arguments.seeds,
            arguments.scenario,
            arguments.hedge,
            arguments.policies,
        )
    ]


async def measure_all(arguments: argparse.Namespace) -> dict[Case, dict[str, object]]:
    """Each case once; what is told of it is printed as soon as it is known."""
    told = {}
    for case in cases(arguments):
        told[case] = await measure(case)
        if not arguments.json:
            print(told[case], flush=True)
    return told


def table(told: dict[Case, dict[str, object]]) -> str:
    """The median and range of the ratio over the seeds, and the lines lost and doubled in all of them."""
    groups: dict[tuple[object, ...], list[dict[str, object]]] = {}
    for case, row in told.items():
        groups.setdefault(case.group, []).append(row)
    heads = ("requests", "lengths", "scenario", "second attempts", "policy")
    lines = [_line(*heads, "time over the bound", "range", "lost", "doubled"), "|---" * 9 + "|"]
    for group, rows in groups.items():
        ratios = [float(str(row["ratio"])) for row in rows]
        lost, doubled = (sum(int(str(row[name])) for row in rows) for name in ("lost", "doubled"))
        extent = f"{min(ratios):.2f} to {max(ratios):.2f}"
        lines.append(_line(*group, f"{statistics.median(ratios):.2f}", extent, lost, doubled))
    return "\n".join(lines)


def _line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure makespan over the lower bound.")
    parser.add_argument("--requests", type=int, nargs="+", default=[500, 2000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument(
        "--lengths", nargs="+", choices=["foretold", "unknown"], default=["foretold", "unknown"]
    )
    parser.add_argument("--scenario", nargs="+", choices=list(SCENARIOS), default=["calm"])
    parser.add_argument("--hedge", nargs="+", choices=["on", "off"], default=["on"])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    told = asyncio.run(measure_all(arguments))
    print(json.dumps(list(told.values()), indent=2) if arguments.json else table(told))


if __name__ == "__main__":
    main()
