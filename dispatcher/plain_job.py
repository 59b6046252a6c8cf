"""RQ's job as Forebay handles it: what a record names is never run, and dead executions are no obstacle.

Putting jobs on queues is `queues`' subject, taking and ending them `claims`'.
"""

from __future__ import annotations

from typing import Any

from rq import Queue
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job

from dispatcher import jobs


class PlainJob(Job):
    """An RQ job whose callbacks and webhooks are never imported, called or sent.

    A shard's job may be taken up again after any number of deaths: the ledger counts those, and gives up the
    line that kills, never the shard. What fails without a death is charged as ever.
    """

    failed = False
    """Whether its run ended with an error: it did not die."""

    def retry(self, queue: Queue, pipeline: Any) -> None:
        left = self.retries_left
        if not self.failed and left is not None and self._carries_a_shard():
            self.retries_left = left + 1  # of which RQ takes one
        super().retry(queue, pipeline)

    def _carries_a_shard(self) -> bool:
        try:
            return bool(self.func_name == jobs.RUN_SHARD)
        except Exception:  # noqa: BLE001 - whatever a stranger wrote there, it is no job of ours
            return False

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

    RQ names an execution for a minute longer than it keeps its record, and a heartbeat that comes late makes
    a new record of its own stamp alone. RQ's own registry raises for one whose record is gone or says too
    little, and every job that a dead dispatcher held could then be neither finished nor deleted.
    """

    def get_executions(self, start: int = 0, end: int = -1) -> list[Execution]:
        return [self._execution(execution_id) for execution_id in self.get_execution_ids(start, end)]

    def _execution(self, execution_id: str) -> Execution:
        try:
            return Execution.fetch(id=execution_id, job_id=self.job_id, connection=self.connection)
        except (ValueError, KeyError):
            return Execution(id=execution_id, job_id=self.job_id, connection=self.connection)
