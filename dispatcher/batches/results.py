"""One line of a result file: how an answer or its absence is written, and what an answer says of its usage.

The Batch contract of an output line lives here. Collecting lines durably is `parts`, making the two files
`finalise`. Pure: bytes in, bytes out.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from dispatcher.batches.nesting import nested_too_deep

INVALID_LINE = "invalid_line"
"""The code of a line that was refused at intake and is no request."""

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_LINE_ENDS = bytes.maketrans(b"\n\r", b"  ")


@dataclass(frozen=True, slots=True)
class Detail:
    """What Forebay adds to a line: which worker answered (None: no worker was asked), and how it went.

    `attempts` counts requests that were sent; times are in seconds.
    """

    worker: str | None
    attempts: int
    queued_s: float
    latency_s: float | None


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens that an engine counted; None when it did not say."""

    prompt_tokens: int | None
    completion_tokens: int | None


_UNKNOWN_USAGE = Usage(None, None)


def record_id(batch_id: str, line: int) -> str:
    """Name the result of a line: the same however often it is run, and unlike that of any other line."""
    return "batch_req_" + blake2b(f"{batch_id}/{line}".encode(), digest_size=12).hexdigest()


def result_line(
    custom_id: str, *, record_id: str, request_id: str, status_code: int, body: bytes, detail: Detail | None
) -> bytes:
    """Write an HTTP answer, of any status, as one line without its line feed.

    `body` is kept byte for byte; only line ends between its tokens become spaces. A body that is not JSON
    becomes a JSON string of its text, an empty one null, so the line is valid JSON whatever an engine said;
    so does one that is nested so deep that not everybody could read the line.
    """
    head = b'{"id":%b,"custom_id":%b,"response":{"status_code":%d,"request_id":%b,"body":' % (
        _encode(record_id),
        _encode(custom_id),
        status_code,
        _encode(request_id),
    )
    return b'%b%b},"error":null%b}' % (head, _embedded(body), _extra(detail))


def error_line(
    custom_id: str | None, code: str, message: str, detail: Detail | None, *, record_id: str
) -> bytes:
    """Write what is not an HTTP answer as one line without its line feed.

    `custom_id` is None only for a refused line that had none to show.
    """
    error = _encode({"code": code, "message": message})
    return b'{"id":%b,"custom_id":%b,"response":null,"error":%b%b}' % (
        _encode(record_id),
        _encode(custom_id),
        error,
        _extra(detail),
    )


def error_code(record: bytes) -> str | None:
    """The code of the error in a line of a result file, without an HTTP answer; None: it has an answer."""
    error = _decode_error(record).error
    return error.code if error is not None else None


def read_usage(body: bytes) -> Usage:
    """Read `usage` from an engine's answer, in the words of any of its APIs; what cannot be read is None."""
    try:
        usage = _decode_usage(body).usage
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _UNKNOWN_USAGE
    if not isinstance(usage, dict):
        return _UNKNOWN_USAGE
    return Usage(
        _tokens(usage, "prompt_tokens", "input_tokens"), _tokens(usage, "completion_tokens", "output_tokens")
    )


class _Error(msgspec.Struct):
    code: str


class _Failed(msgspec.Struct):
    error: _Error | None


_decode_error = msgspec.json.Decoder(_Failed).decode


class _Answer(msgspec.Struct):
    usage: Any = None


_decode_usage = msgspec.json.Decoder(_Answer).decode


def _tokens(usage: dict[str, Any], *names: str) -> int | None:
    for name in names:
        count = usage.get(name)
        if isinstance(count, int | float) and not isinstance(count, bool) and 0 <= count < 2**53:
            return int(count)
    return None


def _embedded(body: bytes) -> bytes:
    if not body or body.isspace():
        return b"null"
    try:
        readable = not nested_too_deep(body)
        if readable:
            _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        readable = False
    if not readable:
        return _encode(body.decode(errors="replace"))
    # A string cannot hold a raw line end, so these stand between tokens, where a space means the same.
    return body.translate(_LINE_ENDS) if b"\n" in body or b"\r" in body else body


def _extra(detail: Detail | None) -> bytes:
    return b',"forebay":' + _encode(detail) if detail is not None else b""
