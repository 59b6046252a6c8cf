"""The one HTTP client of the monitor: how it is made, and one GET whose every ending is a value.

What an answer means belongs to the readers (``probe``, ``gauges``, ``readiness``, ``detect``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from functools import lru_cache
from typing import Any

import httpx
from pyreqwest.client import ClientBuilder
from pyreqwest.compatibility.httpx import HttpxTransport
from pyreqwest.exceptions import PyreqwestError

CONNECT_TIMEOUT_S = 1.0
LONGEST_REQUEST_S = 5.0
"""Above every deadline. pyreqwest keeps the connection of a request that was given up until the answer comes,
or until this time: without it a worker that hangs would cost one more socket with every poll."""
MOST_BYTES = 16 * 1024**2
"""Of an answer: a page of metrics has some hundred kilobytes, a list of models a few."""
POOL_IDLE_S = 3.0
"""Engines close idle connections after 5 s; reusing one at that moment is a race."""


class _LeanClient(httpx.AsyncClient):
    """A client without cookies, redirects and authentication flows, which the monitor has no use for.

    They take half of a poll's CPU time: 330 us a request with them, 180 us without.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        super().__init__(
            transport=transport,
            timeout=None,  # every request runs under a deadline, see ``get``
            follow_redirects=False,
            trust_env=False,
        )
        self._carrier = transport

    async def send(self, request: httpx.Request, *, stream: bool = False, **_flow: Any) -> httpx.Response:
        """One request, one response, read to its end unless ``stream``."""
        response = await self._carrier.handle_async_request(request)
        response.request = request
        if not stream:
            try:
                await response.aread()
            finally:
                await response.aclose()
        return response


def make_client() -> httpx.AsyncClient:
    """The client that the whole service shares.

    Its transport is pyreqwest's: httpx's own pool takes time quadratic in its connections. Redirects are
    never followed (a worker's key must not travel), environment proxies are ignored, and the time-out is
    the caller's deadline.
    """
    builder = (
        ClientBuilder()
        .follow_redirects(enable=False)
        .no_proxy()
        .connect_timeout(timedelta(seconds=CONNECT_TIMEOUT_S))
        .timeout(timedelta(seconds=LONGEST_REQUEST_S))
        .pool_idle_timeout(timedelta(seconds=POOL_IDLE_S))
        .pool_max_idle_per_host(2)
    )
    return _LeanClient(HttpxTransport(builder.build()))


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. ``headers`` are looked up in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes = field(repr=False)


class Silence(StrEnum):
    """Why no complete answer came."""

    REFUSED = "refused"
    """No connection: refused, unreachable, no such name, TLS trouble."""
    BROKEN = "broken"
    """The connection broke before the answer was complete."""
    LATE = "late"
    """Nothing complete within the deadline."""


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """What came instead of an answer; ``reason`` is for people and never holds a header or a key."""

    silence: Silence
    reason: str


@dataclass(frozen=True, slots=True)
class Target:
    """Where to ask, and as whom. ``key`` is sent to this URL only and is never shown."""

    url: str
    key: str | None = field(default=None, repr=False)

    def headers(self) -> dict[str, str]:
        """The headers of every request to this worker."""
        # A page of a few kilobytes from next door is cheaper to read than to unpack.
        headers = {"accept-encoding": "identity"}
        if self.key is not None:
            headers["authorization"] = f"Bearer {self.key}"
        return headers


async def get(
    client: httpx.AsyncClient,
    target: Target,
    path: str,
    *,
    deadline: float,
    accept: str = "application/json",
) -> Answer | NoAnswer:
    """GET ``path`` of a worker. ``deadline`` is on the running loop's clock and covers the body.

    Of a body above ``MOST_BYTES`` nothing is kept.
    """
    headers = target.headers()
    headers["accept"] = accept
    try:
        request = httpx.Request("GET", _parsed(target.url + path), headers=headers)
        async with asyncio.timeout_at(deadline):
            response = await client.send(request, stream=True)
            body = await _body(response)
    except TimeoutError:
        return NoAnswer(Silence.LATE, "no answer in time")
    except (httpx.HTTPError, httpx.InvalidURL, PyreqwestError) as error:
        return NoAnswer(_silence(error), _reason(error))
    if body is None:
        return NoAnswer(Silence.BROKEN, f"an answer above {MOST_BYTES} bytes")
    return Answer(response.status_code, response.headers, body)


async def _body(response: httpx.Response) -> bytes | None:
    """All of it, or None when it is more than is read; the connection is let go of either way."""
    content = bytearray()
    try:
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > MOST_BYTES:
                return None
    finally:
        await response.aclose()
    return bytes(content)


@lru_cache(maxsize=16384)
def _parsed(url: str) -> httpx.URL:
    """Parsed once: the same few pages of a worker are asked for all the time."""
    return httpx.URL(url)


def _silence(error: Exception) -> Silence:
    match error:
        case httpx.ConnectError() | httpx.ConnectTimeout() | httpx.InvalidURL() | httpx.UnsupportedProtocol():
            return Silence.REFUSED
        case httpx.TimeoutException():
            return Silence.LATE
        case _:
            return Silence.BROKEN


def _reason(error: Exception) -> str:
    # An error's text may repeat a URL or a header's value; its class says enough.
    return f"no answer: {type(error).__name__}"
