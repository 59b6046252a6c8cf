"""How fast a batch file is taken in, and in how much memory.

    python benchmarks/planning.py [--lines N ...] [--line-bytes N] [--json]

Each size runs in a process of its own, so that peak memory is that run's alone. The file is made first, with
a fixed seed: chat requests of lognormal length that share system prompts, every tenth with text beyond ASCII.
Budget: 100 MB/s or 50,000 lines/s, and 200 MiB of resident memory for a million lines.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dispatcher.batches.intake import Limits, take_in
from dispatcher.batches.storage import Storage


def main() -> None:
    arguments = _arguments()
    if arguments.measure:
        print(json.dumps(measure(Path(arguments.measure))))
        return
    rows = [_run(lines, arguments.line_bytes) for lines in arguments.lines]
    print(json.dumps(rows, indent=2) if arguments.json else _table(rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure taking in a batch file.")
    parser.add_argument("--lines", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--line-bytes", type=int, default=1000, help="mean bytes of a line")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", metavar="FILE", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(lines: int, line_bytes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "in.jsonl")
        write_input(path, lines, line_bytes)
        command = [sys.executable, __file__, "--measure", str(path)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def write_input(path: Path, lines: int, line_bytes: int) -> None:
    rng = random.Random(7)
    systems = [f"You are helper {index}. " + "Be brief and kind. " * 8 for index in range(20)]
    words = "the water of the forebay feeds every turbine what it can take " * 2000
    spare = max(1, line_bytes - 420)
    with path.open("w", encoding="utf-8") as file:
        for number in range(lines):
            length = min(int(rng.lognormvariate(0, 0.8) * spare * 0.73), 100_000)
            text = words[:length] if number % 10 else "é" + words[: length // 2] + "例"
            messages = [
                {"role": "system", "content": rng.choice(systems)},
                {"role": "user", "content": text},
            ]
            body = {"model": f"m{number % 3}", "messages": messages, "max_tokens": rng.randrange(16, 2048)}
            request = {
                "custom_id": f"request-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            }
            file.write(json.dumps(request, ensure_ascii=number % 20 == 0) + "\n")


def measure(path: Path) -> dict[str, float]:
    """Take the file in and report; runs in a process of its own."""
    before_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    files = Storage(str(path.parent / "storage")).files("batch_measured")
    cpu, wall = time.process_time(), time.perf_counter()
    with path.open("rb") as source:
        intake = take_in(
            source, files, bad_lines="fail", limits=Limits(), slots=64, mean_completion_tokens={}
        )
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    assert intake.plan is not None, intake.problem
    size = path.stat().st_size
    return {
        "lines": intake.accepted,
        "megabytes": round(size / 1e6, 1),
        "seconds": round(wall, 2),
        "cpu_seconds": round(cpu, 2),
        "lines_per_s": round(intake.accepted / wall),
        "megabytes_per_s": round(size / 1e6 / wall, 1),
        "rss_before_mib": round(before_mib, 1),
        "rss_peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "shards": intake.plan.shard_count,
    }


def _table(rows: list[dict[str, float]]) -> str:
    header = list(rows[0])
    lines = [header, *([f"{row[key]:,}" for key in header] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )


if __name__ == "__main__":
    main()
