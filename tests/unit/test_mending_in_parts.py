"""Mending a big batch leaves room for heartbeats: all bookkeeping has one thread."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from dispatcher import queues
from dispatcher.batches.record import BatchStatus
from dispatcher.bookkeeping import Bookkeeping
from dispatcher.mending import Mending
from dispatcher.queues import BatchJob

SHARDS = 1000
LONGEST_STEP = 200


class BigBatch:
    """A ledger with one big batch, whose time is over, or is not."""

    def __init__(self, *, overdue):
        self.overdue = overdue

    async def now(self):
        return 1000.0

    async def unfinished(self):
        return [
            SimpleNamespace(
                id="batch_1",
                queue="default",
                status=BatchStatus.IN_PROGRESS,
                shards=SHARDS,
                shards_done=0,
                expires_at=10.0 if self.overdue else 2000.0,
            )
        ]

    async def move(self, batch_id, new, *, among, fields):
        return new

    async def shards_done(self, batch_id):
        return set()


class Queues:
    """RQ's queues, whose first long step begins only to wait until another step was asked for."""

    def __init__(self, monkeypatch):
        self.done = []
        self.begun, self.asked = asyncio.Event(), threading.Event()
        self._loop = asyncio.get_running_loop()
        monkeypatch.setattr(queues, "drop_shards", lambda *given: self._long_step("dropped", given[-1]))
        monkeypatch.setattr(queues, "enqueue_again", lambda *given: self._long_step("queued", given[-1]))
        monkeypatch.setattr(queues, "enqueue_finalise", lambda *given: self.done.append("finaliser"))
        monkeypatch.setattr(queues, "lost_jobs", lambda connection, name, wanted: list(wanted))

    def _long_step(self, what, jobs):
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self.asked.wait(30)
        self.done.append((what, list(jobs)))

    def beat(self):
        self.done.append("heartbeat")

    def check(self, what, jobs):
        """A heartbeat went after the first part; the parts together are these jobs, in order."""
        assert self.done.pop(1) == "heartbeat"
        parts = [part for part in self.done if part != "finaliser"]
        assert {(told, len(part)) for told, part in parts} == {(what, LONGEST_STEP)}
        assert [job for _, part in parts for job in part] == jobs


@pytest.fixture
def bookkeeping():
    made = Bookkeeping(asyncio.Event(), asyncio.Event())
    yield made
    made.close()


async def beat_during(look, bookkeeping, steps):
    looking = asyncio.create_task(look())
    await steps.begun.wait()
    beating = asyncio.create_task(bookkeeping.step(steps.beat))
    await asyncio.sleep(0)  # it is asked for when its task has begun
    steps.asked.set()
    await asyncio.gather(looking, beating)


async def test_heartbeats_go_on_while_a_big_batch_is_called_off(bookkeeping, monkeypatch):
    steps = Queues(monkeypatch)
    mending = Mending(BigBatch(overdue=True), bookkeeping, None)
    await beat_during(mending.look, bookkeeping, steps)
    assert steps.done[-1] == "finaliser"
    steps.check("dropped", list(range(SHARDS)))


async def test_heartbeats_go_on_while_many_lost_jobs_are_queued_again(bookkeeping, monkeypatch):
    steps = Queues(monkeypatch)
    mending = Mending(BigBatch(overdue=False), bookkeeping, None)
    await mending.look()
    await beat_during(mending.look, bookkeeping, steps)
    steps.check("queued", [BatchJob("batch_1", shard) for shard in range(SHARDS)])
