"""What a fleet costs its Redis: looks at it by size, and leases.

    python benchmarks/look.py [--sizes 10 100 1000] [--json]

Every dispatcher looks at the whole fleet ten times a second while it has work (`view_interval_s`), a monitor
once in each poll interval. Between two polls nothing is new, so each round writes all loads once and then
looks ten times. *server* and *client* are CPU time, of Redis and of the process that looks. A request takes
one lease and gives it back; dispatchers do both for several requests at once, here eight, each with four
candidates. *cores*: the part of a core that a second of looks takes, of Redis and of the dispatcher.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from forebay.embedded import EmbeddedServer
from workers.breaker import Verdict
from workers.connection import connect
from workers.fleet import WorkerState
from workers.leases import Ask, End, Grant, lease_id
from workers.load import Load, LoadSource
from workers.spec import Runtime, WorkerSpec
from workers.store import FleetStore

ROUNDS = 5
LOOKS = 10
"""Looks in a round, and looks a second of a dispatcher that has work."""
TOGETHER = 8
CANDIDATES = 4


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one size of fleet; times are for one look, and for one request's lease from start to end."""

    workers: int
    look_server_ms: float
    look_client_ms: float
    lease_server_us: float
    lease_client_us: float

    @property
    def cores(self) -> tuple[float, float]:
        """Parts of a core that ten looks a second take, of Redis and of the dispatcher."""
        return LOOKS * self.look_server_ms / 1e3, LOOKS * self.look_client_ms / 1e3


class Meter:
    """Redis' and our own CPU time of what is awaited."""

    def __init__(self, store: FleetStore) -> None:
        self._store = store

    async def measure(self, work: Callable[[], Awaitable[object]], times: int) -> tuple[float, float]:
        """CPU seconds of the server and of this process, for each of so many times."""
        before, begun = await self._server_s(), time.process_time()
        for _ in range(times):
            await work()
        ours = time.process_time() - begun
        return (await self._server_s() - before) / times, ours / times

    async def _server_s(self) -> float:
        used = await self._store.client.info("cpu")
        return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


async def measure(workers: int) -> Figures:
    """One fleet in a Valkey of its own."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(Path(folder) / "valkey.log")
        try:
            client = connect(server.url)
            figures = await _measure(FleetStore(client), workers)
            await client.aclose()
        finally:
            server.close()
    return figures


async def _measure(store: FleetStore, workers: int) -> Figures:
    lives = [(spec.id, (await store.register(spec)).incarnation) for spec in map(_spec, range(workers))]
    for worker, life in lives:
        await store.write_state(
            worker,
            life,
            WorkerState.READY,
            reason="answers /v1/models",
            models=["llama"],
            runtime=Runtime.SGLANG,
        )
    meter = Meter(store)
    looks, leases = [], []
    for turn in range(ROUNDS):
        now_s = await store.now()
        loads = [(worker, life, _load(now_s + turn)) for worker, life in lives]
        for start in range(0, workers, 100):
            await store.write_loads(loads[start : start + 100])
        looks.append(await meter.measure(store.view, LOOKS))
        leases.append(await meter.measure(_leasing(store, [worker for worker, _ in lives]), 50))
    return Figures(
        workers,
        1e3 * statistics.median(server for server, _ in looks),
        1e3 * statistics.median(ours for _, ours in looks),
        1e6 / TOGETHER * statistics.median(server for server, _ in leases),
        1e6 / TOGETHER * statistics.median(ours for _, ours in leases),
    )


def _spec(number: int) -> WorkerSpec:
    return WorkerSpec(url=f"http://10.{number // 62_500}.{number // 250 % 250}.{number % 250 + 1}:8000")


def _load(now_s: float) -> Load:
    """As much as an engine with `/v1/loads` says."""
    stamps = {"sampled_at": now_s, "received_at": now_s}
    counts = {
        "running": 12,
        "waiting": 0,
        "used_tokens": 40_000,
        "capacity_tokens": 100_000,
        "max_running": 64,
    }
    rates = {"kv_usage_max": 0.4, "gen_throughput": 900.0, "drain_rate": 3.0, "token_rate": 900.0}
    return Load.model_validate({"source": LoadSource.NATIVE, **stamps, **counts, **rates})


def _leasing(store: FleetStore, workers: list[str]) -> Callable[[], Awaitable[object]]:
    serial = 0

    async def lease_and_settle() -> None:
        nonlocal serial
        asks = []
        for _ in range(TOGETHER):
            serial += 1
            asks.append(Ask(lease_id("bench", serial, 300), tuple(_some(workers, serial))))
        grants = [grant for grant in await store.acquire(asks) if isinstance(grant, Grant)]
        assert len(grants) == TOGETHER
        await store.settle(
            [
                End(ask.lease, grant.worker_id, grant.epoch, Verdict.SUCCESS, "ok")
                for ask, grant in zip(asks, grants, strict=True)
            ]
        )

    return lease_and_settle


def _some(workers: list[str], serial: int) -> list[str]:
    return list(dict.fromkeys(workers[(serial * 7 + step) % len(workers)] for step in range(CANDIDATES)))


def main() -> None:
    parser = argparse.ArgumentParser(description="What looks at a fleet and leases cost.")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 100, 1_000])
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [asyncio.run(measure(size)) for size in arguments.sizes]
    print(json.dumps([asdict(row) for row in rows], indent=2) if arguments.json else _table(rows))


def _table(rows: list[Figures]) -> str:
    head = (
        f"{'workers':>8}{'look: server':>15}{'client':>12}{'cores: Redis':>15}{'dispatcher':>12}"
        f"{'lease: server':>16}{'client':>10}"
    )
    lines = [
        f"{row.workers:>8,}{row.look_server_ms:>12.2f} ms{row.look_client_ms:>9.2f} ms{row.cores[0]:>15.3f}"
        f"{row.cores[1]:>12.3f}{row.lease_server_us:>13.0f} us{row.lease_client_us:>7.0f} us"
        for row in rows
    ]
    return "\n".join([head, *lines])


if __name__ == "__main__":
    main()
