"""A job that a dispatcher holds: RQ's own objects, and what the job asks for. Records only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rq import Queue
from rq.executions import Execution

from dispatcher.plain_job import PlainJob
from workers.errors import ForebayError


class NotOurJobError(ForebayError):
    """A job names a function that a dispatcher does not run, or its data or arguments cannot be read."""


@dataclass(slots=True, eq=False)
class Claimed:
    """A job that this dispatcher holds. `function` is the dotted path that it names."""

    job: PlainJob
    queue: Queue
    execution: Execution
    function: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    waited_s: float = 0.0
    """How long it has been queued, by the clocks of who queued it and of this machine."""

    @property
    def id(self) -> str:
        return str(self.job.id)

    @property
    def timeout_s(self) -> float | None:
        """The `job_timeout` that it was queued with; None when that is RQ's default, which nobody chose."""
        given = self.job.timeout
        if given is None or given == Queue.DEFAULT_TIMEOUT or given <= 0:
            return None
        return float(given)
