"""A whole monitor process: store, HTTP client, service and exporter wired together, until a signal.

Flags belong to ``command``.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import structlog
from prometheus_client import CollectorRegistry

from monitor.exporter import Exporter, PollTimes
from monitor.http import make_client
from monitor.server import bind, serve
from monitor.service import MonitorService
from workers.connection import connect, public_url
from workers.store import FleetStore

if TYPE_CHECKING:
    import httpx

    from monitor.settings import MonitorSettings

log = structlog.get_logger()


async def run(settings: MonitorSettings) -> None:
    """Run a monitor until SIGINT or SIGTERM. Raises SettingsError for an impossible address."""
    connection = connect(settings.redis_url)
    log.info("monitor starts", name=settings.name, redis=public_url(settings.redis_url))
    try:
        async with make_client() as client:
            await _until_signal(FleetStore(connection), client, settings)
    finally:
        await connection.aclose()
    log.info("monitor stops", name=settings.name)


async def _until_signal(store: FleetStore, client: httpx.AsyncClient, settings: MonitorSettings) -> None:
    work = asyncio.create_task(_serve(store, client, settings))
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


async def _serve(store: FleetStore, client: httpx.AsyncClient, settings: MonitorSettings) -> None:
    registry = CollectorRegistry()
    service = MonitorService(store, client, settings, on_poll=PollTimes(registry).observe)
    # A store remembers the list of workers from one look to the next: whoever looks has its own.
    looking = FleetStore(store.client)
    dead_after_s = settings.dead_after_polls * settings.poll_interval_s
    exporter = Exporter(looking, registry, ready=lambda: service.fleet.is_fresh, dead_after_s=dead_after_s)
    if settings.metrics_port is None:
        await service.run()
        return
    with bind(settings.metrics_host, settings.metrics_port) as listener:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(serve(exporter, listener))
            tasks.create_task(service.run())
