"""One inline request: a job that carries its own body and whose RQ result is the answer.

What such a request may be stands in `inline_request`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import msgspec

from dispatcher.attempts import Answered, Attempts, Request
from dispatcher.batches.nesting import nested_too_deep
from dispatcher.claimed import Claimed
from dispatcher.inline_request import InlineRequestError, read_request
from dispatcher.placement import Placement
from dispatcher.scheduler.question import Need

_MOST_SECONDS = 366 * 86_400.0
_DEFAULT_COMPLETION = 256
"""Tokens that an answer without a ceiling is expected to have."""


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
        job: Claimed,
        urgency: int,
        body: Any,
        *,
        url: str = "/v1/chat/completions",
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """The answer as `{"status_code", "body", "forebay"}`. Raises InlineRequestError, Closing.

        It may take `timeout_s` from when it was queued, and the job's own time-out from now; None of both:
        what is usual, from now.
        """
        answer = await self._attempts.run(
            self._request(job.id, urgency, body, url, self._time_s(job, timeout_s))
        )
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

    def _time_s(self, job: Claimed, timeout_s: Any) -> float:
        times_s = []
        if timeout_s is not None:
            times_s.append(_checked(timeout_s) - job.waited_s)
        if job.timeout_s is not None:
            times_s.append(job.timeout_s)
        return min(times_s, default=self._deadline_s)

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


def _checked(timeout_s: Any) -> float:
    if type(timeout_s) in (int, float) and 0 < timeout_s < math.inf:
        return float(min(timeout_s, _MOST_SECONDS))
    raise InlineRequestError("timeout_s must be a number of seconds above 0")


def _decoded(body: bytes) -> Any:
    """The body as JSON; as text when an error's body is none, or none that everybody could read."""
    if not nested_too_deep(body):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(body)
    return body.decode(errors="replace")
