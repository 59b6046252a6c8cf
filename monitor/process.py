"""A whole monitor process: store, HTTP client, service and exporter wired together, until a signal.

Flags belong to ``command``.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from monitor.configured import ConfiguredWorkers
from monitor.exporter import Exporter, PollTimes, own_registry
from monitor.http import make_client
from monitor.server import bind, serve
from monitor.service import MonitorService
from workers.connection import connect, public_url
from workers.open_files import allow_open_files
from workers.settings import config_file
from workers.store import FleetStore

if TYPE_CHECKING:
    import httpx

    from monitor.settings import MonitorSettings
    from workers.spec import WorkerSpec

log = structlog.get_logger()


async def run(settings: MonitorSettings, given: Sequence[WorkerSpec] = ()) -> None:
    """Run a monitor until SIGINT or SIGTERM; ``given`` are registered, as those of ``forebay.toml`` are.

    Raises SettingsError for an impossible address, or a configuration file that is wrong at the start.
    """
    workers = ConfiguredWorkers(config_file(), given)
    allow_open_files()
    connection = connect(settings.redis_url)
    log.info("monitor starts", name=settings.name, redis=public_url(settings.redis_url))
    try:
        async with make_client() as client:
            store = FleetStore(connection, policy=settings.breaker)
            await _until_signal(store, client, settings, workers)
    finally:
        await connection.aclose()
    log.info("monitor stops", name=settings.name)


async def _until_signal(
    store: FleetStore, client: httpx.AsyncClient, settings: MonitorSettings, workers: ConfiguredWorkers
) -> None:
    work = asyncio.create_task(_serve(store, client, settings, workers))
    loop = asyncio.get_running_loop()
    stopped = False

    def stop() -> None:
        nonlocal stopped
        stopped = True
        work.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        await work
    except asyncio.CancelledError:
        if not stopped:
            raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _serve(
    store: FleetStore, client: httpx.AsyncClient, settings: MonitorSettings, workers: ConfiguredWorkers
) -> None:
    registry = own_registry()
    service = MonitorService(store, client, settings, on_poll=PollTimes(registry).observe)
    # A store remembers the list of workers from one look to the next: whoever looks has its own.
    looking = FleetStore(store.client)
    dead_after_s = settings.dead_after_polls * settings.poll_interval_s
    exporter = Exporter(looking, registry, ready=lambda: service.fleet.is_fresh, dead_after_s=dead_after_s)
    async with contextlib.AsyncExitStack() as stack:
        listener = None
        if settings.metrics_port is not None:
            listener = stack.enter_context(bind(settings.metrics_host, settings.metrics_port))
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        if listener is not None:
            tasks.create_task(serve(exporter, listener))
        tasks.create_task(workers.keep(store))
        tasks.create_task(service.run())
