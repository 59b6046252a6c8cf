"""HTTP/1.1 to workers over asyncio: one POST, one whole reply, one connection for each of those at a time.

Only what an inference call needs, so that it costs little, and with the one property that no fast client
at hand has: an exchange that is cancelled closes its connection at once, which is how an engine learns to
stop generating. No redirects, cookies, proxies, compression or retries. What an answer means is
``outcome``'s business; headers, allowed paths and time-outs are ``send``'s.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from dispatcher.reply import FailureKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

HEAD_LIMIT = 65_536
"""Largest head of a reply, in bytes."""


class WireError(Exception):
    """There is no complete reply; ``kind`` says why, the text names the error."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Target(NamedTuple):
    """Where a URL leads."""

    host: str
    port: int
    tls: bool
    start: bytes
    """The head's first lines: request line and host."""


class Answer(NamedTuple):
    """A complete reply; ``headers`` in lower case, only those that were asked for."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


class Wire:
    """Connections to all workers; those at rest are kept for ``idle_s`` seconds and used again, newest first.

    ``idle_s`` must stay below what servers grant (uvicorn: 5 s), or a request meets a connection that is
    just being closed. There are as many connections as exchanges in flight. ``keep_headers``: names, in
    lower case.
    """

    def __init__(
        self,
        *,
        connect_timeout_s: float = 5.0,
        idle_s: float = 3.0,
        max_body_bytes: int = 64 * 1024 * 1024,
        keep_headers: Iterable[bytes] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._idle_s = idle_s
        self.max_body_bytes = max_body_bytes
        self.keep_headers = frozenset(keep_headers)
        self._tls = tls
        self._idle: dict[tuple[str, int, bool], deque[_Connection]] = {}
        self._open: set[_Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    async def post(self, url: str, headers: Sequence[tuple[str, str]], body: bytes) -> Answer:
        """Send and wait for the whole reply. Content-Length and Host are added.

        Raises WireError. Cancelling it closes the connection.
        """
        target = target_of(url)
        message = target.start + _head(headers, len(body)) + body
        connection = self._take(target) or await self._connect(target)
        try:
            return await connection.exchange(message)
        except BaseException:
            connection.abort()
            raise
        finally:
            self._put_back(target, connection)

    async def aclose(self) -> None:
        """Close every connection, also of exchanges in flight, which fail."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in list(self._open):
            connection.abort()
        self._open.clear()
        self._idle.clear()

    async def _connect(self, target: Target) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self), target.host, target.port, ssl=self._context(target)
                )
        except TimeoutError as error:
            raise WireError(FailureKind.CONNECT_TIMEOUT, "no connection in time") from error
        except (OSError, ValueError) as error:  # ValueError: a name that cannot be one
            raise WireError(FailureKind.CONNECT, type(error).__name__) from error
        self._open.add(connection)
        return connection

    def _context(self, target: Target) -> ssl.SSLContext | None:
        if target.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls if target.tls else None

    def _take(self, target: Target) -> _Connection | None:
        resting = self._idle.get(target[:3])
        oldest = asyncio.get_running_loop().time() - self._idle_s
        while resting:
            connection = resting.pop()
            if connection.usable and connection.rests_since > oldest:
                return connection
            self._drop(connection)
        return None

    def _put_back(self, target: Target, connection: _Connection) -> None:
        if not connection.usable:
            self._drop(connection)
            return
        loop = asyncio.get_running_loop()
        connection.rests_since = loop.time()
        self._idle.setdefault(target[:3], deque()).append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(self._idle_s, self._close_rested)

    def _close_rested(self) -> None:
        loop = asyncio.get_running_loop()
        oldest = loop.time() - self._idle_s
        for place, resting in list(self._idle.items()):
            while resting and not (resting[0].usable and resting[0].rests_since > oldest):
                self._drop(resting.popleft())
            if not resting:
                del self._idle[place]
        self._sweep = loop.call_later(self._idle_s / 4, self._close_rested) if self._idle else None

    def _drop(self, connection: _Connection) -> None:
        connection.abort()
        self._open.discard(connection)


class _Connection(asyncio.Protocol):
    """One connection: carries one exchange at a time, then rests or is gone.

    The methods named ``on_...`` are the parser's.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._begun = False
        self._expect_message()
        self.rests_since = 0.0

    @property
    def usable(self) -> bool:
        """Open, and with no exchange."""
        return self._transport is not None and self._waiter is None and not self._transport.is_closing()

    async def exchange(self, message: bytes) -> Answer:
        if self._transport is None or self._transport.is_closing():
            raise WireError(FailureKind.BROKEN, "closed while resting")
        self._waiter = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._begun = False
        self._expect_message()
        self._transport.write(message)
        try:
            return await self._waiter
        finally:
            self._waiter = None

    def abort(self) -> None:
        self._until_close = False  # the end we make is not the reply's
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's side -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:  # nobody asked
            self.abort()
            return
        self._begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(FailureKind.CUT_OFF if self._in_body else FailureKind.PROTOCOL, type(error).__name__)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._until_close:
            self.on_message_complete()
        name = type(exc).__name__ if exc else "closed by the worker"
        self._fail(FailureKind.CUT_OFF if self._begun else FailureKind.BROKEN, name)
        self._transport = None

    # -- the parser's side --------------------------------------------------------------------------------

    def _expect_message(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._chunks: list[bytes] = []
        self._body_bytes = 0
        self._sized = False
        self._in_body = False
        self._until_close = False

    def on_message_begin(self) -> None:
        if self._waiter is None or self._waiter.done():  # a second reply: nothing that follows can be trusted
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_LIMIT:
            self._fail(FailureKind.PROTOCOL, "head too large")
            return
        name = name.lower()
        if name in self._wire.keep_headers:
            self._headers[name] = value
        elif name in (b"content-length", b"transfer-encoding"):
            self._sized = True

    def on_headers_complete(self) -> None:
        self._in_body = True
        self._until_close = not self._sized

    def on_body(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._body_bytes += len(chunk)
        if self._body_bytes > self._wire.max_body_bytes:
            self._fail(FailureKind.TOO_LARGE, f"reply above {self._wire.max_body_bytes} bytes")

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200:  # informational: the reply is yet to come
            self._expect_message()
            return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(Answer(status, self._headers, b"".join(self._chunks)))
        if self._until_close or not self._parser.should_keep_alive():
            self.abort()
        self._until_close = False

    def _fail(self, kind: FailureKind, detail: str) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(WireError(kind, detail))
        self.abort()


@lru_cache(maxsize=4096)
def target_of(url: str) -> Target:
    """Where ``url`` leads; raises WireError when it leads nowhere."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise WireError(FailureKind.UNSENDABLE, "impossible port") from error
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or not url.isascii()
        or not url.isprintable()
    ):
        raise WireError(FailureKind.UNSENDABLE, "not the URL of a server")
    tls = parts.scheme == "https"
    netloc = parts.netloc.rpartition("@")[2]
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    start = f"POST {path} HTTP/1.1\r\nHost: {netloc}\r\n".encode()
    if b" " in start[5 : 5 + len(path)]:
        raise WireError(FailureKind.UNSENDABLE, "a space in the path")
    return Target(parts.hostname, port or (443 if tls else 80), tls, start)


def _head(headers: Sequence[tuple[str, str]], length: int) -> bytes:
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
    # What could end a header early would let a value add headers of its own.
    if (
        not lines.isascii()
        or lines.count("\n") != len(headers)
        or lines.count("\r") != len(headers)
        or "\0" in lines
    ):
        raise WireError(FailureKind.UNSENDABLE, "a header holds what headers cannot")
    return f"{lines}Content-Length: {length}\r\n\r\n".encode()
