"""One HTTP answer as a value, and how its bytes look on the wire.

Belongs here: status, headers, body, in the order in which uvicorn sends them. Does not belong here: what an
engine answers (the dialects) or when (``engine``).
"""

from __future__ import annotations

import http
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache

import msgspec

JSON = b"application/json"

_ENCODER = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. ``content_type`` None sends no such header, as both runtimes do for an empty body."""

    status: int
    body: bytes = b""
    content_type: bytes | None = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()
    chunked: bool = False

    def head(self, wall_s: float, *, close: bool) -> bytes:
        """The status line and the headers, with the empty line. ``wall_s`` is Unix time for Date."""
        lines = [_status_line(self.status), b"date: ", _http_date(int(wall_s)), b"\r\nserver: uvicorn\r\n"]
        for name, value in self.headers:
            lines += (name, b": ", value, b"\r\n")
        if not self.chunked:
            lines += (b"content-length: ", str(len(self.body)).encode(), b"\r\n")
        if self.content_type is not None:
            lines += (b"content-type: ", self.content_type, b"\r\n")
        lines.append(b"vary: Origin\r\n")
        if self.chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        if close:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        return b"".join(lines)

    def payload(self) -> bytes:
        """What follows the head: the body, in one chunk when the answer is chunked."""
        if not self.chunked:
            return self.body
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(self.body), self.body) if self.body else b"0\r\n\r\n"


def json_reply(status: int, content: object, *headers: tuple[bytes, bytes]) -> Reply:
    """An answer whose body is ``content`` as compact JSON, keys in the order of the mapping."""
    return Reply(status, _ENCODER.encode(content), JSON, headers)


@lru_cache(maxsize=512)
def _status_line(status: int) -> bytes:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


@lru_cache(maxsize=2)
def _http_date(wall_s: int) -> bytes:
    return formatdate(wall_s, usegmt=True).encode()
