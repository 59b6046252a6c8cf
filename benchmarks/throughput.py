"""What dispatchers cost, themselves and in Redis: CPU, memory, commands, with engines that answer at once.

    python benchmarks/throughput.py [--requests 20000] [--dispatchers 1 2 3] [--body-bytes 2000] [--json]

Four instant simulated engines with 64 slots each; everything on: leases, decisions, sending, durable
results, metrics. Each row is a fleet of its own. On two cores the engines, Redis and the monitor take their
part of the machine, so requests a second say less than CPU a request. Commands are those of the dispatchers,
a script being one, counted in a run of their own; the CPU of Redis is spent for the monitor too. The bytes
are what Redis needs for a line of the batch while it waits for a dispatcher. Checked is that each line came
back once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from pathlib import Path

from bench_fleet import MODEL, Engine, rig
from redis_cost import counted, over_tcp, queued_bytes

BUDGETS = {"cpu_us_per_request": 600, "commands_per_request": 3, "bytes_per_queued": 64}
"""The most that is allowed, with bodies of 2,000 bytes."""
FLEET = tuple(Engine(0, 64, runtime, instant=True) for runtime in ("vllm", "sglang", "vllm", "sglang"))


def write_batch(path: Path, count: int, body_bytes: int) -> None:
    """Short answers to prompts of about so many bytes."""
    prompt = "the water of the forebay feeds every turbine " * (body_bytes // 45 + 1)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            content = f"{number} {prompt[: max(1, body_bytes - 150)]}"
            body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 16}
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


async def measure(count: int, dispatchers: int, body_bytes: int) -> dict[str, float]:
    """One run."""
    with tempfile.TemporaryDirectory() as folder:
        batch = Path(folder, "batch.jsonl")
        write_batch(batch, count, body_bytes)
        async with rig(FLEET, dispatchers=dispatchers) as made:
            outcome = await made.run(batch)
        queued = await queued_bytes(batch)
        commands = await count_commands(batch, dispatchers)
    assert (outcome.completed, outcome.failed, outcome.doubled) == (count, 0, 0), outcome
    return {
        "requests": count,
        "dispatchers": dispatchers,
        "elapsed_s": round(outcome.elapsed_s, 2),
        "per_second": round(count / outcome.elapsed_s),
        "cpu_us_per_request": round(outcome.cpu_s / count * 1e6),
        "rss_mib": round(outcome.rss_mib),
        "commands_per_request": round(commands / count, 2),
        "redis_cpu_us_per_request": round(outcome.redis_cpu_s / count * 1e6),
        "bytes_per_queued": round(queued / count, 1),
    }


async def count_commands(batch: Path, dispatchers: int) -> int:
    """How many commands dispatchers send to Redis for a batch, from its submission to its end."""
    async with rig(FLEET, dispatchers=0) as made:
        url = await over_tcp(made.client)
        for number in range(dispatchers):
            made.start(f"dispatcher-{number}", "dispatcher", {"FOREBAY_REDIS_URL": url})
        await made.until_ready(len(FLEET), dispatchers)
        with counted(made.url) as commands:
            await made.run(batch)
    return commands.total()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what dispatchers cost.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--dispatchers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--body-bytes", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [
        asyncio.run(measure(arguments.requests, dispatchers, arguments.body_bytes))
        for dispatchers in arguments.dispatchers
    ]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    print("| " + " | ".join(f"<= {BUDGETS[name]}" if name in BUDGETS else "" for name in rows[0]) + " |")


if __name__ == "__main__":
    main()
