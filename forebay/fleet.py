"""The fleet, for programs: ``Forebay.workers``. What a worker is belongs to the room of that name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from anyio.from_thread import BlockingPortal
from pydantic import ValidationError

from workers.errors import InvalidWorkerUrl, SettingsError, UnknownWorker
from workers.fleet import FleetView, WorkerView
from workers.settings import explain
from workers.spec import Runtime, WorkerSpec, normalise_url, worker_id
from workers.store import FleetStore, Memo, Registered

if TYPE_CHECKING:
    from monitor.sweep import Swept

DRAIN_S = 300.0
MONITOR_GONE_S = 3.0
"""A monitor that has been silent for longer is gone, if its heartbeat is the usual one."""
OPEN_S = 600.0
"""How long a breaker stays open that is opened by hand, unless somebody says."""
FORCED = "forced"
"""The reason of such a breaker."""


class Workers:
    """Add, look at and take away workers. Methods raise StoreUnavailable when Redis does not answer."""

    def __init__(self, portal: BlockingPortal, store: FleetStore) -> None:
        """Use ``Forebay.workers`` instead."""
        self._portal = portal
        self._store = store

    def add(
        self,
        url: str,
        *,
        runtime: str | None = None,
        models: tuple[str, ...] = (),
        weight: float = 1.0,
        api_key_env: str | None = None,
        api_key_file: str | None = None,
        max_running: int | None = None,
        replace: bool = False,
    ) -> Registered:
        """Register a worker; the same again changes nothing, unless ``replace`` asks for a new life.

        ``runtime`` None: detected. ``models`` empty: what it says itself. ``api_key_env`` names the variable,
        in the services' environment, that holds its key, or ``api_key_file`` the file, on their machines.
        ``max_running`` None: learned.
        Raises InvalidWorkerUrl, SettingsError.
        """
        given = worker_spec(
            url,
            runtime=runtime,
            models=models,
            weight=weight,
            api_key_env=api_key_env,
            api_key_file=api_key_file,
            max_running=max_running,
        )
        return self.register(given, replace=replace)

    def register(self, spec: WorkerSpec, *, replace: bool = False) -> Registered:
        """The same as ``add``, for a spec that was made before."""

        async def register() -> Registered:
            return await self._store.register(spec, replace=replace)

        return self._portal.call(register)

    def view(self) -> FleetView:
        """All workers at one moment, with the time of it."""
        return self._portal.call(self._store.view)

    def list(self) -> Sequence[WorkerView]:
        """All workers, by id."""
        return self.view().workers

    def monitors(self) -> Sequence[str]:
        """The monitors that watch the fleet now, by name."""
        return self._portal.call(self._store.live_monitors, MONITOR_GONE_S)

    def show(self, name: str) -> WorkerView:
        """One worker, by URL or id. Raises UnknownWorker."""
        wanted = named(name)
        for worker in self.view().workers:
            if worker.id == wanted:
                return worker
        raise _unknown(name)

    def memos(self) -> dict[str, Memo]:
        """The notes that stand, by worker id: it has no ``/v1/loads``."""
        return self._portal.call(self._store.memos, [worker.id for worker in self.view().workers])

    def drain(self, name: str, *, deadline_s: float = DRAIN_S) -> None:
        """Give a worker no new request; it goes when idle, or after ``deadline_s``. Raises UnknownWorker."""
        worker = named(name)

        async def drain() -> None:
            await self._store.drain(worker, deadline_s=deadline_s)

        self._portal.call(drain)

    def remove(self, name: str) -> None:
        """Forget a worker at once. Raises UnknownWorker."""
        if not self._portal.call(self._store.remove, named(name)):
            raise _unknown(name)

    def loads(self) -> Sequence[Swept]:
        """Ask all workers for their load now; unknown is None, with the reason.

        Asks as a monitor of this configuration would. Raises SettingsError.
        """
        from monitor.http import make_client  # noqa: PLC0415 - a fifth of a second, for this only
        from monitor.settings import MonitorSettings  # noqa: PLC0415 - the same
        from monitor.sweep import SweepOptions, sweep_fleet  # noqa: PLC0415 - the same

        try:
            settings = MonitorSettings()
        except ValidationError as error:
            raise explain(error) from error
        options = SweepOptions(
            budget_s=settings.poll_budget_s, memo_ttl_s=settings.memo_ttl_s, mappings=settings.mappings
        )

        async def sweep() -> Sequence[Swept]:
            async with make_client() as client:
                return await sweep_fleet(self._store, client, options)

        return self._portal.call(sweep)

    def open(self, name: str, *, seconds: float = OPEN_S) -> None:
        """Open its breaker for so long, or longer: no new requests; those it has are left to it.

        Then one request is let through, and closes it if it is answered. Raises UnknownWorker, SettingsError.
        """
        if seconds <= 0:
            raise SettingsError(
                "a breaker is opened for more than 0 seconds; to close it: forebay workers reset"
            )
        if not self._portal.call(partial(self._store.trip, named(name), None, FORCED, seconds=seconds)):
            raise _unknown(name)

    def reset(self, name: str) -> None:
        """Close its breaker and look for ``/v1/loads`` anew. Raises UnknownWorker."""
        worker = named(name)
        self._portal.call(self._store.reset_breaker, worker)
        self._portal.call(self._store.clear_memo, worker)


def worker_spec(
    url: str,
    *,
    runtime: str | None = None,
    models: tuple[str, ...] = (),
    weight: float = 1.0,
    api_key_env: str | None = None,
    api_key_file: str | None = None,
    max_running: int | None = None,
) -> WorkerSpec:
    """What a person says of a worker, checked. Raises InvalidWorkerUrl, SettingsError."""
    normalise_url(url)  # for its own error: pydantic would wrap it
    try:
        return WorkerSpec(
            url=url,
            runtime=Runtime(runtime) if runtime else None,
            models=models,
            weight=weight,
            api_key_env=api_key_env,
            api_key_file=api_key_file,
            max_running=max_running,
        )
    except ValidationError as error:
        raise explain(error) from error
    except ValueError as error:
        known = ", ".join(each.value for each in Runtime)
        raise SettingsError(f"{runtime!r} is no runtime; there are {known}") from error


def named(name: str) -> str:
    """A worker's id from its URL, in any spelling, or its id."""
    try:
        return worker_id(name if "://" in name else f"http://{name}")
    except InvalidWorkerUrl:
        return name


def _unknown(name: str) -> UnknownWorker:
    return UnknownWorker(f"no worker {name} is registered; see: forebay workers list")
