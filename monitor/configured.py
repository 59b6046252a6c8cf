"""The workers that ``forebay.toml`` lists: registered at the monitor's start and when the file changes.

What a person registers by command belongs to the front door, what is found out about a worker to ``service``.
Several monitors may read the same file: registering twice changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
from pydantic import ValidationError

from workers.connection import heed_cancellation
from workers.errors import SettingsError, StoreUnavailable, UnknownWorker
from workers.fleet import WorkerState
from workers.settings import explain, read_config
from workers.spec import WorkerSpec

if TYPE_CHECKING:
    from workers.store import FleetStore

log = structlog.get_logger()

LOOK_INTERVAL_S = 1.0
"""From one look at the file to the next: a ``stat``."""
DRAIN_S = 300.0
"""How long a worker that was taken out of the file may go on with what it runs."""

_Stamp = tuple[int, int, int]


def read_workers(path: Path) -> dict[str, WorkerSpec]:
    """The ``[[worker]]`` tables by worker id. Raises SettingsError for a file that is wrong."""
    tables = read_config(path).get("worker", [])
    if not isinstance(tables, list):
        raise SettingsError(f"{path}: write [[worker]], with two brackets, for each worker")
    found: dict[str, WorkerSpec] = {}
    for number, table in enumerate(tables, 1):
        try:
            spec = WorkerSpec.model_validate(table)
        except ValidationError as error:
            raise SettingsError(f"{path}: worker {number}: {explain(error)}") from error
        if spec.id in found:
            raise SettingsError(f"{path}: worker {number}: {spec.id} is listed twice")
        found[spec.id] = spec
    return found


class ConfiguredWorkers:
    """What the file listed when it was last good, and what of it Redis has been told."""

    def __init__(self, path: Path, given: Sequence[WorkerSpec] = ()) -> None:
        """``given``: workers named by flag, which are only added. Raises SettingsError for a bad file."""
        self._path = path
        self._origin = str(path.absolute())
        self._given = tuple(given)
        self._given_untold = self._given
        self._stamp = _stamp(path)
        self._wanted: Mapping[str, WorkerSpec] = read_workers(path)
        self._told: Mapping[str, WorkerSpec] | None = None
        self._generation = 0
        """The fleet's, when Redis was told; a lower one says that Redis has lost what it was told."""

    async def keep(self, store: FleetStore) -> None:
        """Keep Redis told until cancelled; outages of Redis, bad files and mistakes are waited out."""
        failing = False
        while True:
            heed_cancellation()
            try:
                self.look()
                await self.tell(store)
                failing = False
            except StoreUnavailable as error:
                log.debug("workers not registered: redis does not answer", error=str(error))
            except Exception:
                # It must not end the watch over those that are registered, nor fill the log.
                if not failing:
                    log.exception("workers not registered")
                failing = True
            await asyncio.sleep(LOOK_INTERVAL_S)

    def look(self) -> None:
        """Read the file if it changed. A bad one, or one that is gone, is refused: the old list stands."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        if stamp is None:
            log.warning("configuration file is gone: the workers it listed stay", file=self._origin)
            return
        try:
            self._wanted = read_workers(self._path)
        except SettingsError as error:
            log.warning("configuration file refused: the old list of workers stands", error=str(error))

    async def tell(self, store: FleetStore) -> None:
        """Register what is new or changed, drain what was taken out. Raises StoreUnavailable."""
        generation = await store.generation()
        if self._told is not None and generation < self._generation:
            await self._notice_loss(store)
        # Noted with every look: others may bring a new Redis as far as ours was when we told it.
        self._generation = generation
        if self._told is self._wanted:
            return
        wanted, told = self._wanted, self._told
        for spec in self._given_untold:
            await self._register(store, spec, origin="")
        for worker, spec in wanted.items():
            # One that a person drained stays so until its own entry changes.
            if told is None or told.get(worker) != spec:
                await self._register(store, spec, origin=self._origin)
        await self._drain_all_but(wanted, store)
        self._generation = await store.generation()
        self._told, self._given_untold = wanted, ()

    async def _notice_loss(self, store: FleetStore) -> None:
        """Redis was emptied, or its last changes were lost: what is not there any more is told again."""
        there = {worker.id for worker in (await store.view()).workers}
        told = self._told or {}
        self._told = {worker: spec for worker, spec in told.items() if worker in there}
        self._given_untold = tuple(spec for spec in self._given if spec.id not in there)
        log.warning("redis has lost data; the workers that it lost are registered again")

    async def _register(self, store: FleetStore, spec: WorkerSpec, *, origin: str) -> None:
        registered = await store.register(spec, origin=origin)
        if registered.outcome != "kept":
            log.info("worker registered", worker=spec.id, outcome=registered.outcome, file=origin or None)

    async def _drain_all_but(self, wanted: Mapping[str, WorkerSpec], store: FleetStore) -> None:
        if self._stamp is None:
            return  # without a file nobody took anything out of it
        for worker in (await store.view()).workers:
            taken_out = worker.origin == self._origin and worker.id not in wanted
            if not taken_out or worker.state is WorkerState.DRAINING:
                continue
            try:
                await store.drain(worker.id, deadline_s=DRAIN_S)
            except UnknownWorker:
                continue  # somebody removed it meanwhile
            log.info("worker drains: it was taken out of the file", worker=worker.id, file=self._origin)


def _stamp(path: Path) -> _Stamp | None:
    """What changes when the file does, also when it is replaced by renaming; None: there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
