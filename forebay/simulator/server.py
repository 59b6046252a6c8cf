"""A simulated engine on a socket: opening, refusing, reopening and closing the listener, and the life of a
process.

Belongs here: the listener and the set of open connections. ``SimulatedEngine`` is for tests in one process,
``serve`` for a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any, Self

from forebay.simulator.connection import Connection
from forebay.simulator.control import engine_state
from forebay.simulator.engine import Engine
from forebay.simulator.faults import ShutdownFault

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from forebay.simulator.faults import Fault
    from forebay.simulator.load import LoadSnapshot
    from forebay.simulator.settings import EngineSettings
    from forebay.simulator.stats import Stats

_BACKLOG = 4096  # a dispatcher opens hundreds of connections at once


class SimulatedEngine:
    """An engine that serves while the context is open.

    ::

        async with SimulatedEngine(EngineSettings(runtime="sglang")) as engine:
            await client.post(f"{engine.url}/v1/chat/completions", ...)

    Leaving the context resets what is still open, after ``shutdown_timeout_s`` of shutdown mode.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self._port = settings.port
        self._server: asyncio.Server | None = None
        self._reopening: asyncio.Task[None] | None = None
        self._connections: set[Connection] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()

    async def __aenter__(self) -> Self:
        self._engine = Engine(self.settings, self)
        await self._open()
        for (
            fault
        ) in self.settings.faults:  # only now: a fault may close the listener, whose port must be known
            self._engine.set_fault(fault)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._drain()
        self._engine.stop()
        reopening = self._reopening
        if self._server is not None:
            await accept_no_more(self._server)
        self._close_listener()
        if reopening is not None:
            await asyncio.wait([reopening])
        for connection in list(self._connections):
            connection.reset()
        await self._none_open.wait()

    @property
    def url(self) -> str:
        """Where it listens, without a slash at the end."""
        return f"http://{self.settings.host}:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    @property
    def listening(self) -> bool:
        """Whether connecting is possible: false while a fault refuses, until the listener is open again."""
        return self._server is not None

    @property
    def stats(self) -> Stats:
        return self._engine.stats

    def control(self, fault: Fault) -> int:
        """Set a fault; returns its number."""
        return self._engine.set_fault(fault)

    def clear(self, number: int | None = None) -> int:
        """Clear one fault or all (None); returns how many there were."""
        return self._engine.clear_faults(number)

    def load(self) -> LoadSnapshot:
        """The load as it is, whatever faults make the pages say."""
        return self._engine.true_load()

    def state(self) -> dict[str, Any]:
        """The same as ``GET /_control/state``."""
        return engine_state(self._engine)

    # The engine's listener.

    def refuse(self, *, drop_open: bool) -> None:
        self._close_listener()
        if drop_open:
            for connection in self._connections:
                connection.reset_soon()  # the client that set the fault still gets its answer

    def accept(self) -> None:
        self._reopening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self._connection, self.settings.host, self._port, backlog=_BACKLOG
        )
        self._port = self._server.sockets[0].getsockname()[1]

    def _close_listener(self) -> None:
        if self._reopening is not None:
            self._reopening.cancel()
            self._reopening = None
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _drain(self) -> None:
        if self.settings.shutdown_timeout_s > 0.0:
            self._engine.set_fault(ShutdownFault())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._engine.until_idle(), self.settings.shutdown_timeout_s)

    def _connection(self) -> Connection:
        return Connection(
            self._engine.handle,
            keep_alive_s=self.settings.keep_alive_s,
            opened=self._opened,
            closed=self._closed,
        )

    def _opened(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._none_open.clear()
        self.stats.connections += 1
        self.stats.connections_total += 1

    def _closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self.stats.connections -= 1
        if not self._connections:
            self._none_open.set()


async def accept_no_more(server: asyncio.Server) -> None:
    """Let connections that are being accepted be made, and accept no others, so that the server may close.

    One that is half accepted when its server closes is lost by asyncio, and stays open.
    """
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener.fileno())
    for _ in range(3):  # the acceptance, its task, the protocol
        await asyncio.sleep(0)


async def serve(settings: EngineSettings, *, started: Callable[[str], None] | None = None) -> None:
    """Run an engine until cancelled, or until SIGTERM or SIGINT; ``started`` gets its URL once it listens.

    Raises OSError when the address cannot be listened on.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with SimulatedEngine(settings) as engine:
            if started is not None:
                started(engine.url)
            await stop.wait()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
