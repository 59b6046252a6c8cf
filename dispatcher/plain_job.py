"""RQ's job as Forebay handles it: what a record names is never run, and dead executions are no obstacle.

Putting jobs on queues is `queues`' subject, taking and ending them `claims`'.
"""

from __future__ import annotations

from typing import Any

from rq.executions import Execution, ExecutionRegistry
from rq.job import Job


class PlainJob(Job):
    """An RQ job whose callbacks and webhooks are never imported, called or sent."""

    @property
    def success_callback(self) -> None:
        return None

    @property
    def failure_callback(self) -> None:
        return None

    @property
    def stopped_callback(self) -> None:
        return None

    def send_webhooks(self, status: Any, *, exc_string: str | None = None) -> None:
        return None

    @property
    def execution_registry(self) -> ExecutionRegistry:
        return _Executions(self.id, connection=self.connection)


class _Executions(ExecutionRegistry):
    """The executions of a job, those of dead dispatchers among them.

    RQ names an execution for a minute longer than it keeps its record. Its own registry raises for one whose
    record is gone, and every job that a dead dispatcher held could then be neither finished nor deleted.
    """

    def get_executions(self, start: int = 0, end: int = -1) -> list[Execution]:
        return [self._execution(execution_id) for execution_id in self.get_execution_ids(start, end)]

    def _execution(self, execution_id: str) -> Execution:
        try:
            return Execution.fetch(id=execution_id, job_id=self.job_id, connection=self.connection)
        except ValueError:
            return Execution(id=execution_id, job_id=self.job_id, connection=self.connection)
