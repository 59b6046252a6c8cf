"""What benchmarks of whole batches share: a Valkey, simulated engines, a monitor, dispatchers, one batch.

Every piece is a process of its own, on loopback, and is ended when the block ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from dispatcher.batches.ledger import Entry, Ledger
from dispatcher.batches.storage import OUTPUT, Storage
from forebay.embedded import EmbeddedServer
from forebay.simulator.process import EngineProcess, start_engine
from forebay.simulator.settings import EngineSettings
from forebay.submission import Options, prepare, publish
from workers.connection import AsyncRedis, connect, connect_sync
from workers.fleet import WorkerState
from workers.spec import WorkerSpec
from workers.store import FleetStore

MODEL = "bench-model"
MEDIAN = 128.0
SIGMA = 0.8
"""Of the answers' lognormal lengths, in tokens."""
_RQ_WORKERS = "rq:workers"
_POLL_S = 0.02
_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Engine:
    """One simulated engine: tokens per second of one sequence, and how many run at once."""

    tokens_per_s: float
    slots: int
    runtime: str = "vllm"
    instant: bool = False
    """Answers at once: what is measured then is everything but the engine."""

    @property
    def capacity(self) -> float:
        """Tokens per second with all slots taken."""
        return self.tokens_per_s * self.slots

    def settings(self) -> EngineSettings:
        """A fluid engine: its batch slows nobody, prompts cost nothing, answers are as long as asked."""
        return EngineSettings.model_validate(
            {
                "runtime": self.runtime,
                "model": MODEL,
                "tokens_per_s": self.tokens_per_s,
                "prefill_tokens_per_s": 0,
                "slots": self.slots,
                "slowdown": 0.0,
                "instant": self.instant,
                "answer_tokens_median": MEDIAN,
                "answer_tokens_sigma": SIGMA,
            }
        )


MIXED = (Engine(100, 8), Engine(100, 8, "sglang"), Engine(200, 16), Engine(400, 32, "sglang"))
"""Speed 1, 1, 2, 4 and 8, 8, 16, 32 slots; two vLLM, two SGLang."""


def lengths(count: int, seed: int, *, most: int = 2048) -> list[int]:
    """Lognormal answer lengths in tokens."""
    rng = random.Random(seed)
    return [max(1, min(most, round(MEDIAN * rng.lognormvariate(0, SIGMA)))) for _ in range(count)]


def lower_bound_s(tokens: Sequence[int], engines: Sequence[Engine]) -> float:
    """Total work over total capacity, or the longest alone on the fastest, whichever is more."""
    fastest = max(engine.tokens_per_s for engine in engines)
    return max(sum(tokens) / sum(engine.capacity for engine in engines), max(tokens) / fastest)


def write_batch(
    path: Path, tokens: Sequence[int], *, foretold: bool, seed: int = 0, ceiling: int = 2048
) -> None:
    """A chat request for each length.

    Foretold: `max_tokens` tells it, and the engine writes just so many. Else all ask for the same ceiling,
    and the engine draws the length from its own lognormal, the same for the same question of the same `seed`.
    """
    with path.open("w", encoding="utf-8") as file:
        for number, length in enumerate(tokens):
            body: dict[str, object] = {
                "model": MODEL,
                "messages": [{"role": "user", "content": f"question {number} of {seed}"}],
            }
            body |= {"max_tokens": length, "ignore_eos": True} if foretold else {"max_tokens": ceiling}
            line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")


@dataclass(slots=True)
class Outcome:
    """How one batch went. CPU is of all dispatchers, in seconds, if none of them ended meanwhile."""

    elapsed_s: float
    completed: int
    failed: int
    doubled: int
    by_worker: dict[str, int] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    """Of each answer, as its engine counted."""
    sent_again: int = 0
    """Attempts beyond the first of each answered line."""
    cpu_s: float = 0.0
    rss_mib: float = 0.0
    redis_cpu_s: float = 0.0
    """Of the server, for whoever asked it."""


class Rig:
    """The running pieces."""

    def __init__(self, folder: Path, server: EmbeddedServer, client: AsyncRedis) -> None:
        self.folder = folder
        self.url = server.url
        self.server = psutil.Process(server.child.pid)
        self.client = client
        self.store = FleetStore(client)
        self.ledger = Ledger(client)
        self.storage = Storage(str(folder / "storage"))
        self.engines: list[EngineProcess] = []
        self.services: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, module: str, env: dict[str, str]) -> None:
        """Start a service; its log is `<name>.log`."""
        log = (self.folder / f"{name}.log").open("wb")
        settings = {"FOREBAY_REDIS_URL": self.url, "FOREBAY_STORAGE": self.storage.url}
        self.services[name] = subprocess.Popen(
            [sys.executable, "-m", module], env=os.environ | settings | env, stdout=log, stderr=log
        )

    async def until_ready(self, workers: int, dispatchers: int) -> None:
        """Wait until so many workers are ready and so many dispatchers take jobs."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            view = await self.store.view()
            ready = sum(worker.state is WorkerState.READY for worker in view.workers)
            if ready >= workers and await self.client.scard(_RQ_WORKERS) >= dispatchers:
                return
            await asyncio.sleep(_POLL_S)
        raise TimeoutError("the workers or dispatchers do not get ready")

    async def run(self, batch: Path) -> Outcome:
        """Submit a file and wait for its end."""
        record = prepare(
            self.storage, batch.open("rb"), name=batch.name, options=Options(), now_s=time.time()
        )
        dispatchers = [psutil.Process(p.pid) for name, p in self.services.items() if "dispatcher" in name]
        cpu_before, redis_before = _cpu_s(dispatchers), _cpu_s([self.server])
        began = time.monotonic()
        await publish(self.ledger, connect_sync(self.url), self.storage.files(record.id))
        entry = await self._until_ended(record.id)
        elapsed_s = time.monotonic() - began
        outcome = self._read(record.id, entry, elapsed_s)
        living = [one for one in dispatchers if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        outcome.cpu_s = _cpu_s(living) - cpu_before
        outcome.redis_cpu_s = _cpu_s([self.server]) - redis_before
        outcome.rss_mib = max((one.memory_info().rss for one in living), default=0) / 2**20
        return outcome

    async def _until_ended(self, batch_id: str) -> Entry:
        deadline = time.monotonic() + _DEADLINE_S
        while time.monotonic() < deadline:
            entry = await self.ledger.entry(batch_id)
            if entry is not None and entry.status in ("completed", "failed", "expired", "cancelled"):
                return entry
            await asyncio.sleep(_POLL_S)
        raise TimeoutError(f"{batch_id} does not end")

    def _read(self, batch_id: str, entry: Entry, elapsed_s: float) -> Outcome:
        by_worker: dict[str, int] = {}
        seen: set[str] = set()
        tokens: list[int] = []
        sent_again = 0
        output = Path(self.storage.url, "batches", batch_id, OUTPUT)
        for raw in output.read_bytes().splitlines() if output.exists() else ():
            line = json.loads(raw)
            tokens.append(line["response"]["body"]["usage"]["completion_tokens"])
            seen.add(line["custom_id"])
            worker = line["forebay"]["worker"]
            sent_again += line["forebay"]["attempts"] - 1
            by_worker[worker] = by_worker.get(worker, 0) + 1
        doubled = len(tokens) - len(seen)
        return Outcome(
            elapsed_s, entry.completed, entry.failed, doubled, by_worker, tokens, sent_again=sent_again
        )


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in processes)


@contextlib.asynccontextmanager
async def rig(
    engines: Sequence[Engine], *, dispatchers: int = 1, env: dict[str, str] | None = None
) -> AsyncIterator[Rig]:
    """Everything, ready; all of it ends with the block."""
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as name:
        folder = Path(name)
        server = EmbeddedServer(folder / "valkey.log")
        client = connect(server.url)
        made = Rig(folder, server, client)
        try:
            made.engines = [start_engine(engine.settings()) for engine in engines]
            for engine in made.engines:
                await made.store.register(WorkerSpec(url=engine.url))
            made.start("monitor", "monitor", env or {})
            for number in range(dispatchers):
                made.start(f"dispatcher-{number}", "dispatcher", env or {})
            await made.until_ready(len(engines), dispatchers)
            yield made
        finally:
            for process in made.services.values():
                process.terminate()
            for process in made.services.values():
                process.wait()
            for engine in made.engines:
                engine.kill()
            await client.aclose()
            server.close()
