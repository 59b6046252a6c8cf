"""How the exporter is served: one small HTTP server inside the service's own loop.

What it answers belongs to ``exporter``.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING

import structlog
import uvicorn

from workers.errors import SettingsError

if TYPE_CHECKING:
    from monitor.exporter import Exporter

log = structlog.get_logger()


class _QuietServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to whoever runs the process."""
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises SettingsError when the address cannot be had."""
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port} for metrics: {error.strerror}") from error
    log.info("metrics", host=host, port=listener.getsockname()[1])
    return listener


async def serve(exporter: Exporter, listener: socket.socket) -> None:
    """Serve until cancelled."""
    config = uvicorn.Config(exporter, log_config=None, access_log=False, lifespan="off")
    await _QuietServer(config).serve(sockets=[listener])
