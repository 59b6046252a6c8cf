"""CPU time of what the monitor does per poll: judging /v1/loads, reading a metrics page.

``python benchmarks/monitor_parsing.py [--json] [--repeat N]``. Pages are those that real engines gave. Times
are CPU seconds of this process; compare them within one run only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from monitor.gauges.mappings import DEFAULTS
from monitor.gauges.page import PageReader
from monitor.gauges.reduce import to_load
from monitor.probe import Verdict, judge
from workers.spec import Runtime

PAGES = Path(__file__).parent.parent / "tests" / "data" / "pages"
BUDGET_US = {"native": 600.0, "page": 1500.0}


def cpu_us(work: Callable[[], object], repeat: int) -> float:
    """Median CPU time of one call, in microseconds, over five rounds."""
    rounds = []
    for _ in range(5):
        begun = time.process_time()
        for _ in range(repeat):
            work()
        rounds.append((time.process_time() - begun) / repeat * 1e6)
    return statistics.median(rounds)


def read_page(runtime: Runtime, text: str) -> Callable[[], object]:
    reader = PageReader(DEFAULTS[runtime])
    return lambda: to_load(reader.read(text), ("tiny-llama",), sampled_s=1.0, received_s=1.0)


def parse_whole(text: str) -> Callable[[], object]:
    return lambda: list(text_string_to_metric_families(text))


def measure(repeat: int) -> dict[str, dict[str, float | None]]:
    """Microseconds and budget by what is done."""
    body = (PAGES / "sglang_loads.json").read_bytes()
    assert judge(200, {}, body).verdict is Verdict.AVAILABLE
    rows: dict[str, dict[str, float | None]] = {
        "judge /v1/loads, one rank": {
            "us": cpu_us(lambda: judge(200, {}, body), repeat * 10),
            "budget_us": BUDGET_US["native"],
        }
    }
    for runtime in (Runtime.VLLM, Runtime.SGLANG):
        text = (PAGES / f"{runtime}_metrics.prom").read_text(encoding="utf-8")
        lines = text.count("\n")
        rows[f"read {runtime} page, {lines} lines"] = {
            "us": cpu_us(read_page(runtime, text), repeat),
            "budget_us": BUDGET_US["page"],
        }
        rows[f"  the same, parsed whole, {runtime}"] = {
            "us": cpu_us(parse_whole(text), max(1, repeat // 20)),
            "budget_us": None,
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeat", type=int, default=200, help="calls per round")
    options = parser.parse_args()
    rows = measure(options.repeat)
    if options.json:
        print(json.dumps(rows))
        return
    for name, row in rows.items():
        budget = f"of {row['budget_us']:.0f}" if row["budget_us"] is not None else ""
        print(f"{name:<44}{row['us']:>10.1f} us {budget}")


if __name__ == "__main__":
    main()
