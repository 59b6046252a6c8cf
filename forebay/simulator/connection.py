"""HTTP/1.1 on one accepted connection: bytes to ``Request``, ``Reply`` to bytes.

Belongs here: parsing (httptools), keep-alive, pipelining, noticing that the client went, and the two things
that an ASGI server will not do for an application: resetting a connection before or in the middle of an
answer. That, and the cost of a task for each request, is why this is a protocol of our own and not an
application on uvicorn; headers and keep-alive follow uvicorn, which both runtimes are served by. Does not
belong here: what is answered.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from urllib.parse import unquote

import httptools

from forebay.simulator.reply import Reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.simulator.stats import RequestRecord

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close sends RST instead of FIN
_BAD_REQUEST = Reply(400, b"Invalid HTTP request received.", b"text/plain; charset=utf-8")


@dataclass(frozen=True, slots=True)
class Request:
    """One complete request; header names are in lower case, the path is decoded."""

    method: str
    path: str
    query: str
    headers: dict[bytes, bytes]
    body: bytes
    keep_alive: bool


class Exchange:
    """One request and the answer it is owed: exactly one of ``answer`` and ``reset`` may be called, once.

    ``on_gone`` is called when the client leaves first; after that the answer is dropped silently.
    """

    __slots__ = ("_connection", "cut", "on_gone", "open", "record", "request")

    def __init__(self, connection: Connection, request: Request) -> None:
        self._connection = connection
        self.request = request
        self.open = True
        self.cut = False
        """Send only half of the body of the answer, then reset the connection."""
        self.on_gone: Callable[[], None] | None = None
        self.record: RequestRecord | None = None

    def answer(self, reply: Reply) -> None:
        if self.open:
            self.open = False
            self._connection.send(self, reply)

    def reset(self) -> None:
        if self.open:
            self.open = False
            self._connection.reset()

    def gone(self) -> None:
        """The client left."""
        if self.open:
            self.open = False
            if self.on_gone is not None:
                self.on_gone()


class Connection(asyncio.Protocol):
    """One connection; ``handle`` is called with each request, one after the other."""

    def __init__(
        self,
        handle: Callable[[Exchange], None],
        *,
        keep_alive_s: float,
        opened: Callable[[Connection], None],
        closed: Callable[[Connection], None],
    ) -> None:
        self._handle = handle
        self._keep_alive_s = keep_alive_s
        self._opened = opened
        self._closed = closed
        self._loop = asyncio.get_running_loop()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._current: Exchange | None = None
        self._next: deque[Request] = deque()
        self._start_message()

    @property
    def idle(self) -> bool:
        return self._current is None

    def close(self) -> None:
        """Close in order: whatever was written is still delivered."""
        self._transport.close()

    def reset(self) -> None:
        """Drop the connection so that the client sees a reset; what was written just now is lost with it."""
        if not self._transport.is_closing():
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._transport.abort()

    def reset_soon(self) -> None:
        """Reset once this turn of the loop is over: uvloop sends what was written only then."""
        self._loop.call_soon(self.reset)

    def send(self, exchange: Exchange, reply: Reply) -> None:
        """Write the answer of the exchange at hand, and go on to the next."""
        request = exchange.request
        head = reply.head(time.time(), close=not request.keep_alive)
        payload = b"" if request.method == "HEAD" else reply.payload()
        if exchange.cut:
            self._transport.write(head + payload[: len(payload) // 2])
            self.reset_soon()
            return
        self._transport.write(head + payload)
        self._current = None
        if not request.keep_alive:
            self._transport.close()
        elif self._next:
            self._begin(self._next.popleft())
        else:
            self._idle_timer = self._loop.call_later(self._keep_alive_s, self.close)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpRequestParser(self)
        self._opened(self)

    def data_received(self, data: bytes) -> None:
        self._stop_idle_timer()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._transport.write(_BAD_REQUEST.head(time.time(), close=True) + _BAD_REQUEST.body)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._stop_idle_timer()
        self._next.clear()
        self._closed(self)
        if self._current is not None:
            self._current.gone()

    # httptools

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._headers.get(b"expect", b"").lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        url = httptools.parse_url(self._url)
        request = Request(
            method=self._parser.get_method().decode("ascii"),
            path=unquote(url.path.decode("latin-1")),
            query=(url.query or b"").decode("latin-1"),
            headers=self._headers,
            body=b"".join(self._body),
            keep_alive=self._parser.should_keep_alive(),
        )
        self._start_message()
        if self._current is None:
            self._begin(request)
        else:
            self._next.append(request)

    def _start_message(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []

    def _begin(self, request: Request) -> None:
        self._current = Exchange(self, request)
        self._handle(self._current)

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
