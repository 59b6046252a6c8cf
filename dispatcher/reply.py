"""What came back from a worker: an HTTP reply, or the failure to get one. Records only.

Getting one belongs to ``send``; what follows from it, to ``outcome``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class Reply:
    """A complete HTTP answer, whatever its status."""

    status: int
    body: bytes
    """As it came; complete, not checked."""
    elapsed_s: float
    content_type: str | None = None
    retry_after: str | None = None
    """The header's text, not parsed."""


class FailureKind(StrEnum):
    """Why there is no reply.

    connect: refused, no route, unknown name, TLS. connect_timeout: no connection in time. broken: the
    connection was lost before a reply began. cut_off: it was lost in the middle of the reply. protocol:
    what came was not HTTP. timeout: the time given to the request ran out. too_large: the reply is bigger
    than we keep. unsendable: nothing can be written to this worker (an impossible URL, or key), so it
    was not asked. recalled: we closed the connection, because the worker stands still or is gone. exhausted:
    this process, or its machine, may open no more connections.
    """

    CONNECT = "connect"
    CONNECT_TIMEOUT = "connect_timeout"
    BROKEN = "broken"
    CUT_OFF = "cut_off"
    PROTOCOL = "protocol"
    TIMEOUT = "timeout"
    TOO_LARGE = "too_large"
    UNSENDABLE = "unsendable"
    RECALLED = "recalled"
    EXHAUSTED = "exhausted"


@dataclass(frozen=True, slots=True)
class Failure:
    """There is no complete reply."""

    kind: FailureKind
    elapsed_s: float
    detail: str = ""
    """For people and logs: names the error, never contents of a request or a key."""
