"""CPU time of one decision against the size of the fleet: python benchmarks/decision.py [--json].

Budget: 150 us for 100 workers, 1 ms for 1,000. Every decision takes a lease and every eighth gives one
back, so nothing can be reused from one to the next. ``whole`` fleets are fully known and fresh;
``partial`` ones have a third of their fields unknown and a tenth of their loads fading.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dispatcher.scheduler.decision import Chosen, decide
from dispatcher.scheduler.fleet import FleetModel
from dispatcher.scheduler.question import Need
from dispatcher.scheduler.strategies import SchedulerPolicy, Strategies
from workers.breaker import BreakerState
from workers.fleet import FleetView, WorkerState, WorkerView
from workers.load import Load, LoadSource

SIZES = (4, 100, 1_000)
DECISIONS = 400
ROUNDS = 7
NOW_S = 1_000_000.0


def worker(number: int, rng: Random, *, partial: bool) -> WorkerView:
    def told(value: float) -> float | None:
        return None if partial and rng.random() < 0.33 else value

    load = Load(
        source=LoadSource.METRICS,
        sampled_at=NOW_S - (5.0 if partial and rng.random() < 0.1 else 0.5),
        received_at=NOW_S - 0.4,
        running=rng.randrange(200),
        waiting=rng.randrange(4),
        kv_usage_max=told(rng.random() * 0.8),
        capacity_tokens=told(200_000),
        drain_rate=told(1 + rng.random()),
        capacity_rate=told(1_000 + 1_000 * rng.random()),
    )
    return WorkerView(
        id=f"host-{number}:8000",
        url=f"http://host-{number}:8000",
        runtime=None,
        state=WorkerState.READY,
        incarnation=1,
        models=frozenset({"llama"}),
        max_model_len=32_768,
        max_running=256,
        weight=1.0,
        api_key_env=None,
        version=None,
        load=load,
        limit=100_000,
        leases=rng.randrange(200),
        leases_since_sample=rng.randrange(4),
        tokens_since_sample=rng.randrange(2_000),
        breaker=BreakerState.CLOSED,
        breaker_open_until=0.0,
        deferred_until=0.0,
    )


def view(size: int, *, partial: bool) -> FleetView:
    rng = Random(size)
    workers = tuple(worker(number, rng, partial=partial) for number in range(size))
    return FleetView(now_s=NOW_S, generation=1, workers=workers)


def spend(fleet: FleetModel, strategies: Strategies, name: str, *, keyed: bool) -> float:
    """Seconds of CPU per decision."""
    rng = Random(1)
    needs = [
        Need("llama", 400, 512, 900, strategy=name, session_key=f"user-{number}" if keyed else None)
        for number in range(DECISIONS)
    ]
    began = time.process_time()
    for number, need in enumerate(needs):
        decision = decide(need, fleet, strategies.for_request(need), rng, NOW_S)
        assert isinstance(decision, Chosen)
        fleet.took(decision.pick, need.cost_tokens)
        if number % 8 == 0:
            fleet.gave_back(decision.pick, need.cost_tokens)
    return (time.process_time() - began) / DECISIONS


def measure() -> list[dict[str, object]]:
    strategies = Strategies(SchedulerPolicy())
    rows: list[dict[str, object]] = []
    for size in SIZES:
        for kind in ("whole", "partial"):
            seen = view(size, partial=kind == "partial")
            build = statistics.median(timed_build(seen) for _ in range(ROUNDS))
            for name, keyed in (("batch", False), ("chat", True)):
                cost = statistics.median(
                    spend(FleetModel(seen), strategies, name, keyed=keyed) for _ in range(ROUNDS)
                )
                rows.append(
                    {
                        "workers": size,
                        "loads": kind,
                        "strategy": name,
                        "session_key": keyed,
                        "decision_us": round(cost * 1e6, 1),
                        "model_of_view_us": round(build * 1e6, 1),
                    }
                )
    return rows


def timed_build(seen: FleetView) -> float:
    began = time.process_time()
    for _ in range(20):
        FleetModel(seen)
    return (time.process_time() - began) / 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    rows = measure()
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    columns = ("workers", "loads", "strategy", "key", "decision us", "model of view us")
    print("{:>8} {:>8} {:>9} {:>4} {:>12} {:>17}".format(*columns))
    for row in rows:
        key = "yes" if row["session_key"] else "no"
        print(
            f"{row['workers']:>8} {row['loads']:>8} {row['strategy']:>9} {key:>4}"
            f" {row['decision_us']:>12} {row['model_of_view_us']:>17}"
        )


if __name__ == "__main__":
    main()
