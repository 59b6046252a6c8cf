"""The one door to a worker's inference endpoints: a body goes out, a ``Reply`` or a ``Failure`` comes back.

Every error that the network, the wire or httpx can raise is translated here, once. What follows from it
belongs to ``outcome``; where to send, to the scheduler. Nothing here logs or keeps a body or a key.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from typing import TYPE_CHECKING

import httpx

from dispatcher.batches.parse import ALLOWED_URLS
from dispatcher.reply import Failure, FailureKind, Reply
from dispatcher.wire import BEFORE_OR_AFTER, Answer, ErrorTable, Wire, WireError, kind_in

if TYPE_CHECKING:
    from collections.abc import Sequence

_KEPT = (b"content-type", b"retry-after")

# httpx' errors, and what the socket raises below its transports.
ERRORS: ErrorTable = (
    (httpx.ConnectTimeout, FailureKind.CONNECT_TIMEOUT),
    (httpx.PoolTimeout, FailureKind.CONNECT_TIMEOUT),
    (httpx.TimeoutException, FailureKind.TIMEOUT),
    (httpx.ConnectError, FailureKind.CONNECT),
    (httpx.ProxyError, FailureKind.CONNECT),
    (httpx.NetworkError, BEFORE_OR_AFTER),
    (httpx.RemoteProtocolError, BEFORE_OR_AFTER),
    (httpx.LocalProtocolError, FailureKind.UNSENDABLE),
    (httpx.UnsupportedProtocol, FailureKind.UNSENDABLE),
    (httpx.InvalidURL, FailureKind.UNSENDABLE),
    (httpx.HTTPError, FailureKind.PROTOCOL),
    (httpx.StreamError, FailureKind.PROTOCOL),
    (httpx.CookieConflict, FailureKind.PROTOCOL),
    (TimeoutError, FailureKind.TIMEOUT),
    (ConnectionRefusedError, FailureKind.CONNECT),
    (socket.gaierror, FailureKind.CONNECT),
    (ssl.SSLError, FailureKind.CONNECT),
    (OSError, BEFORE_OR_AFTER),
)
_TRANSLATED = tuple(error for error, _ in ERRORS)


def kind_of(error: Exception, *, begun: bool) -> FailureKind:
    """What an error of ``ERRORS`` is to us. ``begun``: the reply's head had come.

    Raises LookupError for any other error: that would be a mistake of ours, and must not pass for a worker's.
    """
    return kind_in(ERRORS, error, begun=begun)


def make_transport(
    *, connect_timeout_s: float = 5.0, idle_s: float = 3.0, max_body_bytes: int = 64 * 1024 * 1024
) -> Wire:
    """What carries requests in service. Keep-alive ends before the engines' own 5 s, so the two never
    race.
    """
    return Wire(
        connect_timeout_s=connect_timeout_s, idle_s=idle_s, max_body_bytes=max_body_bytes, keep_headers=_KEPT
    )


class ThroughHttpx:
    """Any httpx transport in the wire's place: its own client's pool, redirects and retries do not come
    with it.
    """

    def __init__(
        self, transport: httpx.AsyncBaseTransport, *, max_body_bytes: int = 64 * 1024 * 1024
    ) -> None:
        self._transport = transport
        self._max_body_bytes = max_body_bytes

    async def post(self, url: str, headers: Sequence[tuple[str, str]], body: bytes) -> Answer:
        response: httpx.Response | None = None
        try:
            request = httpx.Request("POST", url, headers=headers, content=body)
            response = await self._transport.handle_async_request(request)
            content = await self._read(response)
        except _TRANSLATED as error:
            kind = kind_of(error, begun=response is not None)
            raise WireError(kind, type(error).__name__) from error
        finally:
            if response is not None:
                await response.aclose()
        kept = {name.lower(): value for name, value in response.headers.raw if name.lower() in _KEPT}
        return Answer(response.status_code, kept, content)

    async def _read(self, response: httpx.Response) -> bytes:
        content = bytearray()
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > self._max_body_bytes:
                raise WireError(FailureKind.TOO_LARGE, f"reply above {self._max_body_bytes} bytes")
        return bytes(content)

    async def aclose(self) -> None:
        await self._transport.aclose()


class Sender:
    """Sends requests to workers.

    ``transport``: the wire, or any httpx transport (tests hand in ``httpx.MockTransport``). It is used as
    it is: no redirect is followed, no cookie kept, no proxy taken from the environment, nothing tried
    twice.
    """

    def __init__(self, transport: Wire | httpx.AsyncBaseTransport) -> None:
        self._through = transport if isinstance(transport, Wire) else ThroughHttpx(transport)

    async def send(
        self,
        worker_url: str,
        path: str,
        body: bytes,
        *,
        api_key: str | None,
        timeout_s: float,
        request_id: str,
    ) -> Reply | Failure:
        """One attempt on one worker. ``timeout_s`` bounds it all, from connecting to the last byte.

        When the time is over, or the task is cancelled, the connection is closed, so that the engine
        stops. Raises ValueError for a path outside ``ALLOWED_URLS``.
        """
        if path not in ALLOWED_URLS:
            raise ValueError(f"{path!r} is not an inference endpoint")
        headers = [
            ("Content-Type", "application/json"),
            ("Accept", "application/json"),
            ("User-Agent", "forebay"),
            ("X-Request-Id", request_id),
        ]
        if api_key is not None:
            headers.append(("Authorization", f"Bearer {api_key}"))
        began = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._through.post(worker_url + path, headers, body)
        except WireError as error:
            return Failure(error.kind, time.perf_counter() - began, str(error))
        except TimeoutError:
            return Failure(
                FailureKind.TIMEOUT, time.perf_counter() - began, f"no reply within {timeout_s:g} s"
            )
        return Reply(
            answer.status,
            answer.body,
            time.perf_counter() - began,
            content_type=_text(answer.headers.get(b"content-type")),
            retry_after=_text(answer.headers.get(b"retry-after")),
        )

    async def aclose(self) -> None:
        """Close all connections; attempts in flight fail."""
        await self._through.aclose()


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")
