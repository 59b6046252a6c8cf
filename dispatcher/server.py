"""How a dispatcher tells of itself over HTTP: `/metrics`, `/healthz`, `/readyz`.

Served by threads beside the event loop, so that a loop that hangs is told and not shared. What the metrics
say belongs to `exporter`.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from workers.errors import SettingsError, StoreUnavailable

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

T = TypeVar("T")

PATIENCE_S = 2.0
"""How long a page waits for the event loop, in seconds."""


class LoopDoor:
    """Questions to an event loop from other threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, patience_s: float = PATIENCE_S) -> None:
        self._loop = loop
        self._patience_s = patience_s

    def ask(self, question: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """What it answers; None when it does not in time, is being taken down, or has no Redis to ask."""
        if self._loop.is_closed():
            return None
        answer = asyncio.run_coroutine_threadsafe(question(), self._loop)
        try:
            return answer.result(self._patience_s)
        except (TimeoutError, StoreUnavailable, CancelledError):
            answer.cancel()
            return None

    def answers(self) -> bool:
        """Whether the loop turns."""
        return self.ask(_yes) is True


async def _yes() -> bool:
    return True


@contextlib.contextmanager
def serving(
    registry: CollectorRegistry,
    port: int | None,
    host: str,
    *,
    alive: Callable[[], bool],
    ready: Callable[[], bool],
) -> Iterator[int | None]:
    """Serve the pages and give the port, 0 being any free one; None: do not.

    Raises SettingsError when the address cannot be had.
    """
    if port is None:
        yield None
        return
    server = _bound(host, port)
    server.set_app(_pages(registry, alive, ready))
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _pages(
    registry: CollectorRegistry, alive: Callable[[], bool], ready: Callable[[], bool]
) -> WSGIApplication:
    metrics: WSGIApplication = make_wsgi_app(registry)

    def page(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        match environ.get("PATH_INFO"):
            case "/metrics":
                return metrics(environ, start_response)
            case "/healthz":
                return _said(start_response, "ok") if alive() else _refused(start_response, "the loop hangs")
            case "/readyz" if ready():
                return _said(start_response, "ready")
            case "/readyz":
                return _refused(start_response, "takes no jobs now")
            case _:
                return _said(start_response, "not found", "404 Not Found")

    return page


def _said(start_response: StartResponse, text: str, status: str = "200 OK") -> list[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8")])
    return [f"{text}\n".encode()]


def _refused(start_response: StartResponse, text: str) -> list[bytes]:
    return _said(start_response, text, "503 Service Unavailable")


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], family: int) -> None:
        self.address_family = family
        super().__init__(address, _Quiet)


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
        """Probes and scrapes are no news."""


def _bound(host: str, port: int) -> _Server:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        return _Server((str(address[0]), int(address[1])), family)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port} for metrics: {error.strerror}") from error
