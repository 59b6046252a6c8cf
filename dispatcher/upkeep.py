"""RQ's queue with limits of our own on its upkeep: how soon what a dead dispatcher left comes back.

Who does the upkeep, and when, is `claims`' subject. RQ's own limits are for processes that may take minutes
to notice anything; a dispatcher beats every few seconds.
"""

from __future__ import annotations

from datetime import timedelta

from rq import Queue
from rq.intermediate_queue import IntermediateQueue
from rq.utils import now

UNREGISTERED_S = 9.0
"""How long a popped job may stay unregistered, in seconds since upkeep first saw it so: a living dispatcher
needs a few milliseconds. Upkeep comes at most 15 s apart, so such a job waits 30 s at the longest."""
_SEEN_S = 45
"""How long it is remembered that a job was seen so, in seconds: its next pop is another one."""
LOCK_S = 20
"""After so long the lock on a queue's upkeep goes, in seconds, when whoever held it died in the middle.

RQ's own stays for 15 minutes, in which nobody would look for the jobs of the dead. Two that do the same
upkeep at once queue a job twice at worst, and the later claim of a shard fences the earlier.
"""


class KeptQueue(Queue):
    """A queue of which no job is out of reach for minutes because somebody was killed at a bad moment."""

    @property
    def intermediate_queue(self) -> PopsInTransit:
        return PopsInTransit(self.key, connection=self.connection)

    def acquire_maintenance_lock(self) -> bool:
        return bool(self.connection.set(self.registry_cleaning_key, 1, nx=True, ex=LOCK_S))


class PopsInTransit(IntermediateQueue):
    """Jobs that somebody popped and has not registered yet."""

    def set_first_seen(self, job_id: str) -> bool:
        key = self.get_first_seen_key(job_id)
        return bool(self.connection.set(key, now().timestamp(), nx=True, ex=_SEEN_S))

    def should_be_cleaned_up(self, job_id: str) -> bool:
        first_seen = self.get_first_seen(job_id)
        return first_seen is not None and now() - first_seen > timedelta(seconds=UNREGISTERED_S)
