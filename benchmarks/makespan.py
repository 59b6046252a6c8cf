"""How near to the possible a batch ends on a mixed fleet.

    python benchmarks/makespan.py --published [--seeds 1 2 3 4 5] [--log FILE] [--json]
    python benchmarks/makespan.py --published --quick
    python benchmarks/makespan.py [--requests 500 2000] [--seeds 1 2 3] [--policies batch ...]
        [--scenario calm killed 503 killed+503] [--hedge on off] [--dispatchers 1 2 3] [--log FILE] [--json]

Four fluid simulated engines of speed 1, 1, 2, 4 with 8, 8, 16, 32 slots; lognormal answer lengths, foretold
by `max_tokens` or not. Whole product: Redis, monitor, dispatcher, durable results. Printed is the time from
submitting to the finished files over the lower bound (total work over total capacity, or the longest answer
alone on the fastest engine). Other policies run through the same dispatcher, with its limits and late
binding. `--hedge` says whether second attempts are made. In a scenario other than calm something goes wrong a
third of the bound in, and the bound is that of the capacity which remains (`trouble`); then *lost* counts the
requests without an answer, *doubled* those with two.

`--published` is the table that the project publishes: `batch` with and without second attempts, the others
without. A seed takes some nine minutes of a machine that does nothing else; `--quick` takes two, and its
figures mean nothing. Each run is told on standard error when it ends, the table is printed in the end. A run
that fails is told too, and counted in the table. With `--log` runs are kept in a file, one a line, and those
that it holds already are not made again.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

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


PUBLISHED = (
    ("batch", True),
    ("batch", False),
    *((policy, False) for policy in POLICIES if policy != "batch"),
)
"""Policies of the published table, and whether second attempts are made."""
_QUICK = (40, 80)
"""Requests, in place of hundreds and thousands."""
_LONGEST_RUN_S = 900.0


@dataclass(frozen=True, slots=True)
class Case:
    """What one run is about."""

    requests: int
    foretold: bool
    seed: int
    scenario: str
    hedge: bool
    policy: str
    dispatchers: int = 1

    @property
    def group(self) -> tuple[object, ...]:
        """All but the seed, as the table has it."""
        known = "foretold" if self.foretold else "unknown"
        hedge = "on" if self.hedge else "off"
        return self.requests, known, self.scenario, hedge, self.policy, self.dispatchers


async def measure(case: Case) -> dict[str, object]:
    """One run on a fleet of its own, so that nothing is known of it at the start."""
    env = {"FOREBAY_HEDGE": str(case.hedge)}
    if POLICIES[case.policy]:
        env["FOREBAY_SCHEDULER"] = json.dumps(POLICIES[case.policy])
    wanted = lengths(case.requests, case.seed)
    trouble, after_s = SCENARIOS[case.scenario], lower_bound_s(wanted, MIXED) / 3
    with tempfile.TemporaryDirectory() as folder:
        batch = Path(folder, "batch.jsonl")
        write_batch(batch, wanted, foretold=case.foretold, seed=case.seed)
        async with (
            rig(MIXED, dispatchers=case.dispatchers, env=env) as made,
            happening(made, trouble, after_s),
        ):
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
    """Policies take turns within each seed, the other way round in every second one: a noisy minute, or what
    one run leaves behind, hits all alike.
    """
    variants = list(itertools.product(arguments.policies, (hedge == "on" for hedge in arguments.hedge)))
    if arguments.published:
        variants = list(PUBLISHED)
    return [
        Case(count, known == "foretold", seed, scenario, hedge, policy, dispatchers)
        for count, known, (turn, seed), scenario, dispatchers in itertools.product(
            arguments.requests,
            arguments.lengths,
            enumerate(arguments.seeds),
            arguments.scenario,
            arguments.dispatchers,
        )
        for policy, hedge in (variants if turn % 2 == 0 else reversed(variants))
    ]


async def measure_safely(case: Case) -> dict[str, object]:
    """What is told of one run, or why there is nothing to tell."""
    try:
        async with asyncio.timeout(_LONGEST_RUN_S):
            return await measure(case)
    except Exception as error:  # noqa: BLE001 - hours of other runs shall not be lost
        return asdict(case) | {"error": f"{type(error).__name__}: {error}"}


async def measure_all(wanted: Sequence[Case], log: Path | None) -> list[dict[str, object]]:
    """Each case once, save those that the log holds; what is told of it is printed as soon as it is known."""
    told = _read(log)
    for number, case in enumerate(wanted, 1):
        if case not in told:
            told[case] = await measure_safely(case)
            _keep(log, told[case])
        print(f"{number} of {len(wanted)}: {json.dumps(told[case])}", file=sys.stderr, flush=True)
    return [told[case] for case in wanted]


def _read(log: Path | None) -> dict[Case, dict[str, object]]:
    """The runs that a log holds and that did not fail, by case."""
    if log is None or not log.exists():
        return {}
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return {_case(row): row for row in rows if "error" not in row}


def _keep(log: Path | None, row: dict[str, object]) -> None:
    if log is not None:
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _case(row: dict[str, Any]) -> Case:
    return Case(**{field.name: row[field.name] for field in fields(Case)})


def table(rows: Sequence[dict[str, object]]) -> str:
    """The median and range of the ratio over the seeds, and the lines lost and doubled in all of them."""
    groups: dict[tuple[object, ...], list[dict[str, object]]] = {}
    for row in rows:
        groups.setdefault(_case(row).group, []).append(row)
    heads = ("requests", "lengths", "scenario", "second attempts", "policy", "dispatchers")
    lines = [
        _line(*heads, "time over the bound", "range", "runs", "failed", "lost", "doubled"),
        "|---" * 12 + "|",
        *(_line(*group, *_summed_up(of_it)) for group, of_it in groups.items()),
    ]
    return "\n".join(lines)


def _summed_up(rows: Sequence[dict[str, object]]) -> list[object]:
    whole = [row for row in rows if "error" not in row]
    ratios = [float(str(row["ratio"])) for row in whole]
    median = f"{statistics.median(ratios):.2f}" if ratios else "none"
    extent = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "none"
    lost, doubled = (sum(int(str(row[name])) for row in whole) for name in ("lost", "doubled"))
    return [median, extent, len(rows), len(rows) - len(whole), lost, doubled]


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
    parser.add_argument("--dispatchers", type=int, nargs="+", default=[1])
    parser.add_argument("--published", action="store_true", help="the policies of the published table")
    parser.add_argument("--quick", action="store_true", help="few requests, one seed: whether it runs at all")
    parser.add_argument("--log", type=Path, help="keep runs here, and do not repeat those it holds")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.requests, arguments.seeds = _QUICK, [1]
    rows = asyncio.run(measure_all(cases(arguments), arguments.log))
    print(json.dumps(rows, indent=2) if arguments.json else table(rows))


if __name__ == "__main__":
    main()
