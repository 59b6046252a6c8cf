"""One inline request: queued as a job of its own, its answer read from the job's result.

RQ itself is behind ``dispatcher.queues``; what is sent to a worker, and how, is the dispatcher's subject.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from dispatcher import queues
from forebay.errors import UnknownJob, WaitedTooLong
from workers.connection import SyncRedis, translated

_POLL_S = 0.1


class Answer(msgspec.Struct, frozen=True):
    """What became of an inline request.

    ``status_code`` and ``body`` are the worker's answer; both are None when there is none, and then ``error``
    says why. ``forebay`` tells which worker answered, in how many attempts and how long.
    """

    status_code: int | None = None
    body: Any = None
    forebay: dict[str, Any] | None = None
    error: Any = None

    @property
    def ok(self) -> bool:
        """Whether the worker answered with a status of success."""
        return self.status_code is not None and 200 <= self.status_code < 300


class Inline:
    """Inline requests on one Redis. Methods raise StoreUnavailable when it does not answer."""

    def __init__(self, connection: SyncRedis) -> None:
        """Use the connection; it is closed by its owner."""
        self._connection = connection

    def enqueue(self, queue: str, body: dict[str, Any], *, url: str, timeout_s: float | None) -> str:
        """Queue a request; returns its job's id."""
        return queues.enqueue_request(self._connection, queue, body, url=url, timeout_s=timeout_s)

    def answer(self, queue: str, job_id: str, *, timeout_s: float | None = None) -> Answer:
        """Wait for an answer. Raises WaitedTooLong, UnknownJob."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (answer := self._look(queue, job_id)) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitedTooLong(f"request {job_id} has no answer after {timeout_s:g} s")
            time.sleep(_POLL_S)
        return answer

    def _look(self, queue: str, job_id: str) -> Answer | None:
        """The answer, or None while there is none."""
        with translated():
            job = queues.queue(self._connection, queue).fetch_job(job_id)
            if job is None:
                raise UnknownJob(
                    f"no request {job_id} is known on queue {queue}; results are kept for an hour"
                )
            result = job.latest_result()
        if result is None or (not job.is_finished and not job.is_failed and not job.is_stopped):
            return None
        if result.return_value is not None:
            return msgspec.convert(result.return_value, Answer)
        return Answer(error={"code": "failed", "message": _last_line(result.exc_string)})


def _last_line(text: str | None) -> str:
    return (text or "the request failed").strip().splitlines()[-1]
