"""Whose turn it is: takes the next job off a queue so that batches share it fairly.

The rule and its bookkeeping are one step, `lua/claim_job.lua`; here it is asked, and told what it does not
know of a batch. What becomes of the job is `claims`' subject. Synchronous, as RQ is.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers import keys
from workers.connection import SyncRedis, translated
from workers.errors import ForebayError
from workers.scripts import source

LOOK_S = 10.0
"""Longest time from one look through a whole queue to the next, in seconds.

Between them only what is put at its ends is noticed at once, which is where RQ puts jobs.
"""
_TERMS = ("share", "expires_at", "shard_costs", "cost_total", "shards")


class NoTextError(ForebayError):
    """A queue held an id that is no text, so no job's. By now it is in the intermediate queue."""

    def __init__(self, job_id: bytes) -> None:
        super().__init__(f"{job_id!r} is no text")
        self.job_id = job_id


def memory_keys(name: str) -> list[str]:
    """What is remembered of a queue, by its name; it may be deleted at any moment."""
    return [keys.QUEUE_MEMORY.of(name), keys.QUEUE_TURNS.of(name), keys.QUEUE_EXPRESS.of(name)]


class Turns:
    """Takes jobs off queues, each from the batch whose turn it is; jobs that are no shards go first."""

    def __init__(self, connection: SyncRedis, *, look_s: float = LOOK_S) -> None:
        self._connection = connection
        self._look_s = look_s
        self._step = connection.register_script(source("claim_job", "dispatcher"))

    def take(self, name: str, queue_key: str, intermediate_key: str) -> str | None:
        """Move the next job into the intermediate queue; its id, or None when there is none.

        `name` is the queue's, the others are RQ's keys of it. Raises StoreUnavailable, and NoTextError.
        """
        told: list[str] = []
        with translated():
            while answer := self._ask([queue_key, intermediate_key, *memory_keys(name)], told):
                job_id, *unknown = answer
                if job_id:
                    return _id(job_id)
                batch_ids = [batch_id.decode() for batch_id in unknown]
                told = [text for batch_id in batch_ids for text in (batch_id, self._terms(batch_id))]
        return None

    def _ask(self, key_names: Sequence[str], told: Sequence[str]) -> list[bytes]:
        answer: list[bytes] = self._step(keys=key_names, args=[self._look_s, *told])
        return answer

    def _terms(self, batch_id: str) -> str:
        """What a batch may have, as the step reads it; of one that is not known, what harms nobody."""
        found = self._connection.hmget(keys.BATCH.of(batch_id), _TERMS)
        share, expires_at, costs, cost_total, shards = [_text(value) for value in found]
        mean = int(cost_total or 0) / max(1, int(shards or 0))
        return f"share={share or 1} expires={expires_at or 0} costs={costs or f'0:{mean:.0f}'}"


def _id(job_id: bytes) -> str:
    try:
        return job_id.decode()
    except UnicodeDecodeError as error:
        raise NoTextError(job_id) from error


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
