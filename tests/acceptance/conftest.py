"""A whole installation for a test: simulated engines, a monitor, dispatchers, a storage, on a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dispatcher.batches.ledger import Entry, Ledger
from dispatcher.batches.record import BatchStatus
from dispatcher.batches.storage import Storage
from forebay.desk import Desk
from forebay.settings import FrontSettings
from forebay.simulator.server import SimulatedEngine
from forebay.simulator.settings import EngineSettings
from forebay.submission import Options, prepare, publish
from tests.expired import let_claims_run_out
from workers.connection import AsyncRedis, connect_sync
from workers.fleet import WorkerState, WorkerView
from workers.spec import WorkerSpec, worker_id
from workers.store import FleetStore

ROOT = Path(__file__).parents[2]
PATIENCE_S = 45.0
MODEL = "sim-model"


def row(name: str, *, tokens: int = 4, model: str = MODEL, text: str | None = None) -> str:
    """One line of a batch that asks for exactly so many tokens."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text or f"say {name}"}],
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
    return json.dumps(line, ensure_ascii=False)


def rows(count: int, **how: Any) -> list[str]:
    return [row(f"c{number}", **how) for number in range(count)]


class Results:
    """The two files of a batch that has ended."""

    def __init__(self, folder: Path) -> None:
        self.output = _read(folder / "output.jsonl")
        self.errors = _read(folder / "errors.jsonl")

    @property
    def names(self) -> list[str]:
        return [line["custom_id"] for line in self.output]

    @property
    def all_names(self) -> list[str]:
        return sorted(line["custom_id"] for line in self.output + self.errors)

    @property
    def codes(self) -> set[str | None]:
        return {(line["error"] or {}).get("code") for line in self.errors}


def _read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines()]


class Rig:
    """Everything that one test runs. Processes and engines end with it."""

    def __init__(self, redis_url: str, folder: Path, client: AsyncRedis) -> None:
        self.redis_url = redis_url
        self.folder = folder
        self.store = FleetStore(client)
        self.ledger = Ledger(client)
        self.storage = Storage(str(folder / "storage"))
        self.rq_redis = connect_sync(redis_url)
        self.engines: list[SimulatedEngine] = []
        self._stack = contextlib.AsyncExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []

    # -- what runs --------------------------------------------------------------------------------------

    async def engine(self, runtime: str = "vllm", **settings: Any) -> SimulatedEngine:
        """An engine in this process, registered."""
        given = {"tokens_per_s": 2000.0, "slowdown": 0.0} | settings
        engine = SimulatedEngine(EngineSettings(runtime=runtime, **given))
        await self._stack.enter_async_context(engine)
        self.engines.append(engine)
        await self.store.register(WorkerSpec(url=engine.url))
        return engine

    async def ready_engine(self, runtime: str = "vllm", **settings: Any) -> SimulatedEngine:
        """An engine that is ready without a monitor, for tests that need none."""
        engine = await self.engine(runtime, **settings)
        worker = await self.worker(engine.url)
        await self.store.write_state(worker.id, worker.incarnation, WorkerState.READY, models=[MODEL])
        return engine

    def monitor(self, **settings: Any) -> subprocess.Popen[bytes]:
        return self._start("monitor", **settings)

    def dispatcher(
        self, name: str, *, module: str = "dispatcher", **settings: Any
    ) -> subprocess.Popen[bytes]:
        """A setting that is None is left as it is by default; `module` is what is run."""
        # Without second attempts of running requests, tests can count what engines were sent.
        given = {"name": name, "view_interval_s": 0.05, "part_age_s": 0.1, "hedge": "false"} | settings
        return self._start(module, **given)

    def _start(self, module: str, **settings: Any) -> subprocess.Popen[bytes]:
        mine = {"REDIS_URL": self.redis_url, "STORAGE": self.storage.url, **settings}
        given = {f"FOREBAY_{name.upper()}": str(value) for name, value in mine.items() if value is not None}
        log = (self.folder / f"{module}-{len(self._processes)}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [sys.executable, "-m", module], cwd=ROOT, env=os.environ | given, stdout=log, stderr=log
            )
        self._processes.append(process)
        return process

    async def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        await self._stack.aclose()
        self.rq_redis.close()

    # -- what is waited for -----------------------------------------------------------------------------

    async def until(self, holds: Callable[[], Awaitable[Any] | Any], what: str) -> Any:
        """Look until it holds: other processes have no event for us."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            found = holds()
            if isinstance(found, Awaitable):
                found = await found
            if found:
                return found
            assert time.monotonic() < deadline_s, f"in vain: {what}\n{self._last_words()}"
            await asyncio.sleep(0.02)

    def _last_words(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}" for log in logs)

    async def worker(self, url: str) -> WorkerView:
        view = await self.store.view()
        return next(worker for worker in view.workers if worker.id == worker_id(url))

    async def ready(self) -> None:
        """All registered workers are ready."""

        async def all_ready() -> bool:
            view = await self.store.view()
            return all(worker.state is WorkerState.READY for worker in view.workers)

        await self.until(all_ready, "all workers are ready")

    async def gone(self, process: subprocess.Popen[bytes]) -> int:
        """The exit status of a process that ends by itself."""
        await self.until(lambda: process.poll() is not None, "the process ends")
        return process.returncode

    # -- batches ----------------------------------------------------------------------------------------

    async def submit(self, lines: list[str], *, slots: int = 64, **options: Any) -> str:
        """Prepare and publish; returns the batch's id."""
        source = io.BytesIO("".join(f"{line}\n" for line in lines).encode())
        now_s = await self.store.now()
        record = prepare(
            self.storage, source, name="in", options=Options(**options), now_s=now_s, slots=slots
        )
        files = self.storage.files(record.id)
        await publish(self.ledger, self.rq_redis, files)
        return record.id

    async def cancel(self, batch_id: str) -> None:
        """What `forebay cancel` does."""
        desk = Desk(FrontSettings(redis_url=self.redis_url, storage=self.storage.url))
        await desk.cancel(batch_id)
        await desk.close()

    async def entry(self, batch_id: str) -> Entry:
        entry = await self.ledger.entry(batch_id)
        assert entry is not None
        return entry

    async def some_done(self, batch_id: str, count: int) -> None:
        """So many lines are durable, and not all of them."""

        async def reached() -> bool:
            entry = await self.entry(batch_id)
            return entry.completed + entry.failed >= count

        await self.until(reached, f"{count} lines are done")
        assert (await self.entry(batch_id)).status == BatchStatus.IN_PROGRESS

    async def ended(self, batch_id: str) -> tuple[str, Results]:
        """The final status and the files."""

        async def final() -> bool:
            return BatchStatus((await self.entry(batch_id)).status).final

        await self.until(final, "the batch ends")
        status = (await self.entry(batch_id)).status
        return status, Results(Path(self.storage.url) / "batches" / batch_id)

    def let_claims_run_out(self, owner: str) -> None:
        """What time and anybody's maintenance do to the jobs of a dead dispatcher."""
        let_claims_run_out(self.rq_redis, owner)

    @property
    def sent(self) -> list[str]:
        """Every request that an engine of this process took in, by its prompt."""
        return [record.prompt for engine in self.engines for record in engine.stats.log]


@pytest.fixture
async def rig(redis_url: str, tmp_path: Path, valkey: AsyncRedis) -> AsyncIterator[Rig]:
    rig = Rig(redis_url, tmp_path, valkey)
    yield rig
    await rig.close()
