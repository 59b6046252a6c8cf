"""A whole installation in processes of its own: a Valkey, engines, monitors, dispatchers, a storage.

Belongs here: what there is and how it is set, its start and its end. Does not belong here: what befalls it
(``actor``) and what it is given to do (``campaign``).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from forebay.desk import Desk
from forebay.settings import FrontSettings
from forebay.simulator.settings import EngineSettings
from tests.chaos.places import EnginePlace, Place, RedisPlace, ended_badly, has_ended
from tests.chaos.schedule import Numbers
from tests.chaos.workload import LONGEST, MODEL, SEED
from workers.spec import WorkerSpec

SERVICES: Mapping[str, str] = {
    "FOREBAY_LOG_LEVEL": "info",
    # Faults are denser than in any life: no line shall run out of attempts, or wait long for the next.
    "FOREBAY_RETRY__MAX_ATTEMPTS": "60",
    "FOREBAY_RETRY__CAP_S": "2",
    "FOREBAY_BREAKER__BASE_S": "0.5",
    "FOREBAY_BREAKER__CAP_S": "3",
    "FOREBAY_REQUEST_TIMEOUT_S": "8",
    "FOREBAY_CONNECT_TIMEOUT_S": "2",
    "FOREBAY_DRAIN_TIMEOUT_S": "5",
    # Longer than a lease lasts: those of a killed dispatcher look like work.
    "FOREBAY_STALL_AFTER_S": "25",
    "FOREBAY_READINESS_INTERVAL_S": "1",
    "FOREBAY_PART_LINES": "64",
}
_END_S = 30.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How large it is."""

    numbers: Numbers
    slots: int = 16
    tokens_per_s: float = 30.0
    """The slowest engine's; the fastest is three times as fast."""
    services: Mapping[str, str] = field(default_factory=dict)
    """Variables for the services, beside or instead of those that all runs have."""


class Installation:
    """Runs while it is entered; nothing of it is left behind, whatever happened to it."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        """``folder`` is for storage and logs, and stays."""
        self.logs = folder / "logs"
        self.storage_folder = folder / "storage"
        self._short = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
        self.redis = RedisPlace(self._short, self.logs)
        self._settings = settings
        numbers = settings.numbers
        self.engines = [
            EnginePlace(f"engine-{which}", _engine(settings, which), self.logs)
            for which in range(numbers.engines)
        ]
        self.monitors = [self._service("monitor", which) for which in range(numbers.monitors)]
        self.dispatchers = [self._service("dispatcher", which) for which in range(numbers.dispatchers)]
        self.clients: list[Place] = []
        self.desk = Desk(FrontSettings(redis_url=self.redis.url, storage=str(self.storage_folder)))

    def _service(self, module: str, which: int) -> Place:
        return Place(f"{module}-{which}", [sys.executable, "-m", module], self.logs, self._environment)

    @property
    def _environment(self) -> dict[str, str]:
        storage = str(self.storage_folder)
        where = {"FOREBAY_REDIS_URL": self.redis.url, "FOREBAY_STORAGE": storage}
        return {**SERVICES, **self._settings.services, **where}

    @property
    def services(self) -> list[Place]:
        return [*self.monitors, *self.dispatchers]

    async def __aenter__(self) -> Self:
        try:
            await self._begin()
        except BaseException:
            await self._end()
            raise
        return self

    async def _begin(self) -> None:
        await self.redis.begin()
        for service in self.services:
            service.start()
        for engine in self.engines:
            await engine.begin()
            await self.desk.fleet.register(WorkerSpec(url=engine.url))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def _end(self) -> None:
        await self.desk.close()
        for place in (*self.clients, *self.services, *self.engines, self.redis):
            place.end_all()
        shutil.rmtree(self._short, ignore_errors=True)

    def client(self, batch_id: str) -> Place:
        """Somebody who waits for a batch at the command line."""
        command = [sys.executable, "-m", "forebay", "wait", batch_id, "--quiet"]
        place = Place(f"wait-{batch_id[-6:]}", command, self.logs, self._environment)
        place.start()
        self.clients.append(place)
        return place

    async def end_services(self) -> list[str]:
        """Ask all services to end; returns those that did not, or not well."""
        children = [service.child for service in self.services]
        for child in children:
            child.terminate()
        complaints = []
        for child in children:
            if not await has_ended(child, _END_S):
                complaints.append(f"{child.name} does not end at SIGTERM")
            elif complaint := ended_badly(child):
                complaints.append(complaint)
        return complaints


def _engine(settings: Settings, which: int) -> EngineSettings:
    last = max(1, settings.numbers.engines - 1)
    return EngineSettings(
        runtime="sglang" if which % 2 else "vllm",
        model=MODEL,
        seed=SEED,
        name=f"engine-{which}",
        slots=settings.slots,
        slowdown=0.0,
        tokens_per_s=settings.tokens_per_s * (1 + 2 * which / last),
        prefill_tokens_per_s=0.0,
        max_model_len=LONGEST,
        log_requests=0,
    )
