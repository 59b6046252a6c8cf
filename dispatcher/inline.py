"""One inline request: a job that carries its own body and whose RQ result is the answer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import msgspec

from dispatcher.attempts import Answered, Attempts, Request
from dispatcher.batches.parse import BadLine, parse_line
from dispatcher.placement import Placement
from dispatcher.scheduler.question import Need
from workers.errors import ForebayError

_DEFAULT_COMPLETION = 256
"""Tokens that an answer without a ceiling is expected to have."""


class InlineRequestError(ForebayError):
    """The request cannot be sent as it stands, or got no answer; the message says why."""


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
        body: Any,
        *,
        url: str = "/v1/chat/completions",
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """The answer as `{"status_code", "body", "forebay"}`. Raises InlineRequestError, Closing.

        What comes from a queue is checked here: anybody may have written it.
        """
        answer = await self._attempts.run(self._request(job_id, urgency, body, url, timeout_s))
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

    def _request(self, job_id: str, urgency: int, body: Any, url: str, timeout_s: float | None) -> Request:
        # An inline request obeys the same rules as a line of a file, so it is read as one.
        try:
            raw = msgspec.json.encode({"custom_id": "inline", "method": "POST", "url": url, "body": body})
        except ValueError as error:
            raise InlineRequestError(f"the body cannot be sent as JSON: {error}") from error
        line = parse_line(1, raw)
        if line is None or isinstance(line, BadLine):
            raise InlineRequestError(line.message if line else "the request is empty")
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
            deadline_s=self._clock() + _checked(timeout_s, self._deadline_s),
            late_code="request_timeout",
        )


def _checked(timeout_s: Any, default_s: float) -> float:
    if timeout_s is None:
        return default_s
    if isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf:
        return float(timeout_s)
    raise InlineRequestError(f"timeout_s must be a number of seconds above 0, not {timeout_s!r}")


def _decoded(body: bytes) -> Any:
    """The body as JSON; as text when an error's body is none."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode(errors="replace")
