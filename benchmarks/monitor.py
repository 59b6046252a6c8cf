"""What a monitor process costs over real sockets, and whether it polls a large fleet on time.

``python benchmarks/monitor.py [--json] [--workers N] [--seconds S]``. One process plays all workers, each at
a loopback address of its own; the registry is in a real Valkey; the monitor is the service as it is run. CPU
is the monitor's, everything on: looking at the fleet, readiness, rates, limits, writing loads. A tick is
missed when a worker is not polled within one and a half intervals.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from forebay.embedded import EmbeddedServer
from workers.connection import connect
from workers.spec import WorkerSpec
from workers.store import FleetStore

PAGES = Path(__file__).parent.parent / "tests" / "data" / "pages"
LOADS, METRICS = "/v1/loads", "/metrics"
BUDGET_MS = {LOADS: 0.6, METRICS: 1.5}
READY_S = 90.0


@dataclass(frozen=True, slots=True)
class Case:
    """A fleet whose workers all answer on one page, and how often each is polled."""

    name: str
    page: str
    workers: int
    interval_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times are of the monitor's process; ``load_average`` is the machine's, at the end."""

    polls: int
    polls_per_worker_s: float
    cpu_ms_per_poll: float
    cores: float
    median_gap_s: float
    worst_gap_s: float
    missed: int
    load_average: float


# -- the workers ------------------------------------------------------------------------------------------


def answers(page: str) -> dict[bytes, bytes]:
    """Whole answers by path."""
    models = b'{"data":[{"id":"m","owned_by":"%s","max_model_len":4096}]}'
    if page == LOADS:
        # Idle ones: a queue that never moves would have its limit cut, and written, at every poll.
        body = (PAGES / "sglang_loads.json").read_bytes().replace(b'_waiting_reqs":32', b'_waiting_reqs":0')
        found = {b"/v1/models": models % b"sglang", LOADS.encode(): body}
    else:
        body = (PAGES / "vllm_metrics.prom").read_bytes()
        found = {b"/v1/models": models % b"vllm", METRICS.encode(): body}
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return {path: head % len(body) + body for path, body in found.items()}


NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


class Worker(asyncio.Protocol):
    """One connection; requests have no bodies and are not pipelined."""

    def __init__(self, page: str, known: dict[bytes, bytes], polls: dict[str, list[float]]) -> None:
        self._page = page.encode()
        self._known = known
        self._polls = polls
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._host = transport.get_extra_info("sockname")[0]

    def data_received(self, data: bytes) -> None:
        self._head += data
        if not self._head.endswith(b"\r\n\r\n"):
            return
        path = self._head.split(b" ", 2)[1].partition(b"?")[0]
        self._head = b""
        if path == self._page:
            self._polls[self._host].append(time.monotonic())
        self._transport.write(self._known.get(path, NOT_FOUND))


def play(page: str, pipe: Connection) -> None:
    """All workers, until told to end: sends the port, then, when asked, the times of all polls."""
    asyncio.run(_play(page, pipe))


async def _play(page: str, pipe: Connection) -> None:
    polls: dict[str, list[float]] = defaultdict(list)
    known = answers(page)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Worker(page, known, polls), "0.0.0.0", 0, backlog=4096)
    pipe.send(server.sockets[0].getsockname()[1])
    while await loop.run_in_executor(None, pipe.recv) != "end":
        pipe.send({host: list(times) for host, times in polls.items()})
    server.close()


def host_of(number: int) -> str:
    """A loopback address of its own for each worker."""
    return f"127.0.{1 + number // 250}.{1 + number % 250}"


# -- the measurement --------------------------------------------------------------------------------------


async def measure(case: Case, seconds: float) -> Outcome:
    """Start everything, let it settle, count."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    players = context.Process(target=play, args=(case.page, theirs), daemon=True)
    players.start()
    port = ours.recv()
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        server = EmbeddedServer(Path(folder) / "valkey.log")
        try:
            return await _measure(case, seconds, server.url, port, ours, Path(folder) / "monitor.log")
        finally:
            ours.send("end")
            server.close()
            players.join()


def start(environment: Mapping[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """The monitor, as it is run."""
    return subprocess.Popen([sys.executable, "-m", "monitor"], env=environment, stdout=log, stderr=log)


async def _measure(case: Case, seconds: float, url: str, port: int, pipe: Connection, log: Path) -> Outcome:
    client = connect(url)
    store = FleetStore(client)
    for number in range(case.workers):
        await store.register(WorkerSpec(url=f"http://{host_of(number)}:{port}"))
    settings = {"REDIS_URL": url, "POLL_INTERVAL_S": str(case.interval_s), "LOG_LEVEL": "warning"}
    environment = os.environ | {f"FOREBAY_{name}": value for name, value in settings.items()}
    with log.open("wb") as file:
        monitor = start(environment, file)
    try:
        await _until_all_read(store, monitor, log)
        process = psutil.Process(monitor.pid)
        before, begun_s = process.cpu_times(), time.monotonic()
        await asyncio.sleep(seconds)
        after, ended_s = process.cpu_times(), time.monotonic()
        pipe.send("polls")
        cpu_s = after.user + after.system - before.user - before.system
        return _sum_up(case, pipe.recv(), begun_s, ended_s, cpu_s)
    finally:
        monitor.terminate()
        monitor.wait()
        await client.aclose()


async def _until_all_read(store: FleetStore, monitor: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + READY_S
    while any(worker.load is None for worker in (await store.view()).workers):
        if monitor.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the monitor does not read the fleet; see {log}")
        await asyncio.sleep(0.2)
    await _until_settled(store)


async def _until_settled(store: FleetStore) -> None:
    """First looks, memos and limits on their way are no steady state."""
    versions: list[int] = []
    seen = [worker.limit_version for worker in (await store.view()).workers]
    while versions != seen:
        await asyncio.sleep(3.0)
        versions, seen = seen, [worker.limit_version for worker in (await store.view()).workers]


def _sum_up(
    case: Case, polls: dict[str, list[float]], begun_s: float, ended_s: float, cpu_s: float
) -> Outcome:
    within = {host: [at for at in times if begun_s <= at < ended_s] for host, times in polls.items()}
    gaps = [
        later - earlier
        for times in within.values()
        for earlier, later in zip([begun_s, *times], [*times, ended_s], strict=True)
    ]
    whole = [gap for times in within.values() for gap in map(float.__sub__, times[1:], times)]
    count = sum(map(len, within.values()))
    return Outcome(
        polls=count,
        polls_per_worker_s=count / case.workers / (ended_s - begun_s),
        cpu_ms_per_poll=cpu_s / count * 1e3,
        cores=cpu_s / (ended_s - begun_s),
        median_gap_s=statistics.median(whole),
        worst_gap_s=max(gaps),
        missed=sum(gap > 1.5 * case.interval_s for gap in gaps) + case.workers - len(within),
        load_average=os.getloadavg()[0],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--workers", type=int, default=1000, help="of the large fleet")
    parser.add_argument("--seconds", type=float, default=20.0, help="that are measured of each case")
    options = parser.parse_args()
    cases = [
        Case("native, 200 workers", LOADS, 200, 1.0),
        Case("672-line metrics page, 200 workers", METRICS, 200, 1.0),
        Case(f"native, {options.workers} workers", LOADS, options.workers, 1.0),
    ]
    found = {case.name: asyncio.run(measure(case, options.seconds)) for case in cases}
    if options.json:
        print(json.dumps({name: asdict(outcome) for name, outcome in found.items()}))
        return
    titles = (
        "polls",
        "per worker and s",
        "CPU ms per poll",
        "cores",
        "median gap",
        "worst gap",
        "missed",
        "load",
    )
    print(f"{'':<36}" + "".join(f"{title:>18}" for title in titles))
    for case in cases:
        row = found[case.name]
        cpu = f"{row.cpu_ms_per_poll:.2f} of {BUDGET_MS[case.page]}"
        gaps = f"{row.median_gap_s:.3f} s", f"{row.worst_gap_s:.3f} s", f"{row.missed}"
        rates = f"{row.polls}", f"{row.polls_per_worker_s:.3f}", cpu, f"{row.cores:.2f}"
        cells = (*rates, *gaps, f"{row.load_average:.1f}")
        print(f"{case.name:<36}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
