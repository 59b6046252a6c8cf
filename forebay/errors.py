"""The front door's own errors, grouped by what a person can do. The shared ones are in ``workers.errors``.

::

    GiveUp                          a person has to change something
    +-- UnknownBatch                no batch of that id is known
    +-- UnknownJob                  no inline request of that id is known
    +-- NotRecorded                 no decision is recorded for a request of that name
    +-- RefusedInput                the input file holds lines that are no requests, or none at all
    +-- NotEnded                    that batch still runs
    +-- RetryRefused                there are no failed lines of that batch to send again
    +-- RunRefused                  `forebay run` would overwrite, mix up or share somebody's files
    ForebayError
    +-- CannotWork                  the surroundings are missing or broke: nothing is wrong with the request
        +-- NoServer                no Valkey or Redis to start
        +-- ChildDied               a service that was started here ended
        +-- NoWorkerReady           no worker became ready in time
        +-- QueueFull               as many requests wait in the queue as are allowed to
        +-- TooOld                  the Redis or Valkey lacks what is needed
        +-- BatchLost               the batch's files were lost or altered under it
        +-- WaitedTooLong           the time that the caller gave is over
"""

from __future__ import annotations

from dispatcher.batches.intake import Intake
from dispatcher.batches.record import BatchRecord
from workers.errors import ForebayError, GiveUp


class UnknownBatch(GiveUp):
    """No batch of that id is known."""


class UnknownJob(GiveUp):
    """No inline request of that id is known on that queue."""


class NotRecorded(GiveUp):
    """No decision is recorded for a request of that name: unknown, sampled out, or too old."""


class RefusedInput(GiveUp):
    """The file cannot become a batch. ``intake`` lists the bad lines, as far as they are listed."""

    def __init__(self, name: str, intake: Intake) -> None:
        reason = intake.problem.message if intake.problem else "refused"
        super().__init__(f"{name}: {reason}")
        self.intake = intake


class NotEnded(GiveUp):
    """What was asked for is possible only once the batch has ended."""


class RetryRefused(GiveUp):
    """A batch cannot be retried: it has not ended, none of its lines failed, or its files are gone."""


class RunRefused(GiveUp):
    """A run would overwrite, mix up or share somebody's files; the message says what to do."""


class CannotWork(ForebayError):
    """The surroundings are missing or broke."""


class NoServer(CannotWork):
    """There is no Valkey or Redis that could be started here."""


class ChildDied(CannotWork):
    """A process that was started here ended by itself. ``last_lines`` are the end of its log."""

    def __init__(self, name: str, status: int, last_lines: str) -> None:
        said = f"; its last words:\n{last_lines}" if last_lines else " and said nothing"
        super().__init__(f"the {name} ended with status {status}{said}")
        self.name = name
        self.status = status
        self.last_lines = last_lines


class NoWorkerReady(CannotWork):
    """No worker became ready in time; the message names each with its reason."""


class QueueFull(CannotWork):
    """As many requests wait in the queue as are allowed to; the message says how many, and what to do."""


class TooOld(CannotWork):
    """The Redis or Valkey server lacks commands that are needed."""


class BatchLost(CannotWork):
    """The batch failed after it was taken in: its files were lost or altered under it."""

    def __init__(self, record: BatchRecord) -> None:
        reasons = [item.message for item in record.errors.data] if record.errors else []
        super().__init__(f"{record.id} failed: {'; '.join(reasons) or 'its files were lost or altered'}")


class WaitedTooLong(CannotWork):
    """The batch had not ended when the caller's time was over; it goes on."""
