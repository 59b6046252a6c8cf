"""One inline request: a job that carries its own body and whose RQ result is the answer.

`read_request` says what may be sent: whoever queues a request asks it first, and the dispatcher once more,
since anybody may have written what comes from a queue.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec

from dispatcher.attempts import Answered, Attempts, Request
from dispatcher.batches.nesting import nested_too_deep
from dispatcher.batches.parse import BadLine, Line, parse_line
from dispatcher.placement import Placement
from dispatcher.scheduler.question import Need
from workers.errors import ForebayError

LONGEST_REQUEST = 16 * 1024**2
"""Bytes of a request, as of a line of a file."""
_MOST_SECONDS = 366 * 86_400.0
_DEFAULT_COMPLETION = 256
"""Tokens that an answer without a ceiling is expected to have."""


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


class InlineRunner:
    """Runs inline requests."""

    def __init__(
        self,
        placement: Placement,
        attempts: Attempts,
        *,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._placement = placement
        self._attempts = attempts
        self._deadline_s = deadline_s
        self._clock = clock

    async def run(
        self,
        job_id: str,
        urgency: int,
        job_timeout_s: float | None,
        body: Any,
        *,
        url: str = "/v1/chat/completions",
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """The answer as `{"status_code", "body", "forebay"}`. Raises InlineRequestError, Closing.

        It may take `timeout_s`, and no longer than `job_timeout_s`; None of both: what is usual.
        """
        time_s = _checked(timeout_s, job_timeout_s or self._deadline_s)
        time_s = min(time_s, job_timeout_s or time_s)
        answer = await self._attempts.run(self._request(job_id, urgency, body, url, time_s))
        course = answer.course
        detail = {
            "worker": course.worker,
            "attempts": course.attempts,
            "queued_s": course.queued_s,
            "latency_s": course.latency_s,
        }
        if isinstance(answer, Answered):
            return {
                "status_code": answer.reply.status,
                "body": _decoded(answer.reply.body),
                "forebay": detail,
            }
        raise InlineRequestError(f"{answer.code}: {answer.message}")

    def _request(self, job_id: str, urgency: int, body: Any, url: str, time_s: float) -> Request:
        line = read_request(body, url)
        prompt_tokens = -(-line.prompt_chars // 4)
        need = Need(
            model=line.model,
            prompt_tokens=prompt_tokens,
            asked_tokens=line.asked_tokens,
            cost_tokens=prompt_tokens + (line.asked_tokens or _DEFAULT_COMPLETION),
        )
        return Request(
            id=job_id,
            path=line.url,
            body=line.body,
            need=need,
            urgency=urgency,
            deadline_s=self._clock() + time_s,
            late_code="request_timeout",
        )


def _checked(timeout_s: Any, default_s: float) -> float:
    if timeout_s is None:
        return default_s
    if type(timeout_s) in (int, float) and 0 < timeout_s < math.inf:
        return float(min(timeout_s, _MOST_SECONDS))
    raise InlineRequestError("timeout_s must be a number of seconds above 0")


def _decoded(body: bytes) -> Any:
    """The body as JSON; as text when an error's body is none, or none that everybody could read."""
    if not nested_too_deep(body):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(body)
    return body.decode(errors="replace")
