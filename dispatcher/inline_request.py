"""What an inline request may be: what a line of a file may. Values in, a line or the reason against it out.

Whoever queues one asks here first, and the dispatcher once more: anybody may have written what comes from a
queue. How it is run is `inline`'s subject. Pure.
"""

from __future__ import annotations

import json
from typing import Any

from dispatcher.batches.parse import BadLine, Line, parse_line
from workers.errors import ForebayError

LONGEST_REQUEST = 16 * 1024**2
"""Bytes of a request, as of a line of a file."""


class InlineRequestError(ForebayError):
    """The request cannot be sent as it stands, or got no answer; the message says why."""


def read_request(body: Any, url: Any) -> Line:
    """Hold a request to the rules of a line of a file. Raises InlineRequestError, which says why not."""
    try:
        # The standard library refuses NaN and Infinity; msgspec would make null of them, another request.
        written = json.dumps(
            {"custom_id": "inline", "method": "POST", "url": url, "body": body},
            allow_nan=False,
            ensure_ascii=False,
            separators=(",", ":"),
        ).encode()
    except (ValueError, TypeError) as error:
        raise InlineRequestError(f"the request cannot be sent as JSON: {error}") from error
    except RecursionError as error:
        raise InlineRequestError("the request is nested too deep") from error
    if len(written) > LONGEST_REQUEST:
        raise InlineRequestError(f"the request is longer than {LONGEST_REQUEST} bytes")
    line = parse_line(1, written)
    if isinstance(line, Line):
        return line
    raise InlineRequestError(line.message if isinstance(line, BadLine) else "the request is empty")
