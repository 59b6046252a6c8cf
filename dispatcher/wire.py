"""HTTP to workers, carried by aiohttp: one POST, one whole reply. aiohttp is used here and nowhere else.

Of the fast clients it is the one whose cancelled exchange closes its connection at once, which is how an
engine learns to stop generating. What an answer means is `outcome`'s business; headers, allowed paths and
time-outs are `send`'s.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from dispatcher.reply import FailureKind


class WireError(Exception):
    """There is no complete reply; `kind` says why, the text names the error."""

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Answer(NamedTuple):
    """A complete reply; `headers` in lower case, only those that were asked for."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


ErrorTable: TypeAlias = tuple[tuple[type[Exception], FailureKind], ...]
"""Foreign errors and what they are to us; the first that fits counts."""

BEFORE_OR_AFTER = FailureKind.BROKEN
"""In such a table: before the reply began; once it has, the same error is a reply cut off."""

ERRORS: ErrorTable = (
    (aiohttp.ConnectionTimeoutError, FailureKind.CONNECT_TIMEOUT),
    (aiohttp.ServerTimeoutError, FailureKind.TIMEOUT),
    (aiohttp.ClientConnectorError, FailureKind.CONNECT),
    (aiohttp.ServerFingerprintMismatch, FailureKind.CONNECT),
    (aiohttp.ClientPayloadError, FailureKind.CUT_OFF),
    (aiohttp.ClientConnectionError, BEFORE_OR_AFTER),
    (aiohttp.InvalidURL, FailureKind.UNSENDABLE),
    (aiohttp.ClientError, FailureKind.PROTOCOL),
    (OSError, BEFORE_OR_AFTER),
    (UnicodeError, FailureKind.CONNECT),  # a name that no resolver would take
    (ValueError, FailureKind.UNSENDABLE),
)
_TRANSLATED = tuple(error for error, _ in ERRORS)


def kind_in(table: ErrorTable, error: Exception, *, begun: bool) -> FailureKind:
    """What an error is to us: want of connections, else by a table. `begun`: the reply's head had come.

    Raises LookupError for one that is not in it: that would be a mistake of ours, and must not pass for a
    worker's.
    """
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return FailureKind.EXHAUSTED
    for foreign, kind in table:
        if isinstance(error, foreign):
            return FailureKind.CUT_OFF if begun and kind is BEFORE_OR_AFTER else kind
    raise LookupError(f"{type(error).__name__} is no error of the network") from error


class Wire:
    """Connections to all workers. Make it inside a running loop.

    Those at rest are kept for `idle_s` seconds, which must stay below what servers grant (uvicorn: 5 s), or a
    request meets a connection that is just being closed. There are as many connections as exchanges in
    flight. `keep_headers`: names, in lower case. No redirects, cookies, proxies, compression or retries.
    """

    def __init__(
        self,
        *,
        connect_timeout_s: float = 5.0,
        idle_s: float = 3.0,
        max_body_bytes: int = 64 * 1024 * 1024,
        keep_headers: Iterable[bytes] = (),
    ) -> None:
        self._max_body_bytes = max_body_bytes
        self._keep_headers = frozenset(keep_headers)
        self._reading: dict[asyncio.Future[None], tuple[ResponseHandler, aiohttp.StreamReader]] = {}
        """What was read last from each open connection, by the future of its loss."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=idle_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            skip_auto_headers=("Accept-Encoding", "User-Agent"),
        )

    async def post(self, url: str, headers: Sequence[tuple[str, str]], body: bytes) -> Answer:
        """Send and wait for the whole reply. Content-Length and Host are added.

        Raises WireError. Cancelling it closes the connection.
        """
        target = _parsed(url)
        if not all(value.isascii() and value.isprintable() for _, value in headers):
            raise WireError(FailureKind.UNSENDABLE, "a header holds what headers cannot")
        begun = False
        try:
            async with self._session.post(
                target, headers=headers, data=body, allow_redirects=False
            ) as response:
                begun = True
                content = await self._read(response)
        except _TRANSLATED as error:
            raise WireError(kind_in(ERRORS, error, begun=begun), type(error).__name__) from error
        except RuntimeError as error:  # what aiohttp says of an exchange whose session we closed
            if not self._session.closed:
                raise
            kind = FailureKind.CUT_OFF if begun else FailureKind.BROKEN
            raise WireError(kind, "closed by us") from error
        kept = {
            name.lower(): value for name, value in response.raw_headers if name.lower() in self._keep_headers
        }
        return Answer(response.status, kept, content)

    async def aclose(self) -> None:
        """Close every connection, also of exchanges in flight, which fail."""
        await self._session.close()

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        self._watch(response)
        content = bytearray()
        async for chunk in response.content.iter_any():
            content += chunk
            if len(content) > self._max_body_bytes:
                raise WireError(FailureKind.TOO_LARGE, f"reply above {self._max_body_bytes} bytes")
        return bytes(content)

    def _watch(self, response: aiohttp.ClientResponse) -> None:
        """See to it that reading ends with the connection.

        When what follows a reply's head is no HTTP, aiohttp 3.14 closes the connection and tells nobody who
        reads the body: its parser in C has let go of the body by then.
        """
        protocol = None if response.connection is None else response.connection.protocol
        if protocol is None:  # all of the body is here
            return
        lost = protocol.closed
        if lost is None:
            _end_reading(protocol, response.content)
            return
        if lost not in self._reading:
            lost.add_done_callback(self._lost)
        self._reading[lost] = protocol, response.content

    def _lost(self, lost: asyncio.Future[None]) -> None:
        if not lost.cancelled():
            lost.exception()  # else asyncio complains that nobody asked for it
        _end_reading(*self._reading.pop(lost))


def _end_reading(protocol: ResponseHandler, content: aiohttp.StreamReader) -> None:
    if (
        isinstance(protocol.exception(), HttpProcessingError)
        and not content.is_eof()
        and content.exception() is None
    ):
        content.set_exception(aiohttp.ClientPayloadError("the reply goes on in no way that HTTP knows"))


@lru_cache(maxsize=4096)
def _parsed(url: str) -> URL:
    """A worker's URL, parsed once; raises WireError when it leads nowhere."""
    try:
        parsed = URL(url)
    except ValueError as error:
        raise WireError(FailureKind.UNSENDABLE, "not the URL of a server") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or not url.isprintable() or " " in url:
        raise WireError(FailureKind.UNSENDABLE, "not the URL of a server")
    return parsed
