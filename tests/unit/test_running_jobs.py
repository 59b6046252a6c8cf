"""Jobs that a dispatcher holds: one whose end cannot be told must not take the others with it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from dispatcher import jobs
from dispatcher.batches.errors import StorageError
from dispatcher.bookkeeping import Bookkeeping
from dispatcher.placement import Closing
from dispatcher.running import RunningJobs


class Inline:
    """Answers requests, but the first only when it is interrupted."""

    def __init__(self):
        self.waits = asyncio.Event()

    async def run(self, job, urgency, **given):
        if job.id == "stopped":
            self.waits.set()
            await asyncio.Event().wait()
        return {"status_code": 200}


class Claims:
    """RQ's bookkeeping, in which something is broken that concerns one job."""

    def __init__(self):
        self.finished = []

    def finish(self, claimed, result=None):
        if claimed.id == "broken":
            raise KeyError("created_at")
        self.finished.append(claimed.id)

    def fail(self, claimed, error, *, retry):
        raise KeyError("created_at")

    def stop(self, claimed):
        raise KeyError("created_at")


def claimed(job_id):
    return SimpleNamespace(
        id=job_id,
        execution=SimpleNamespace(id=f"execution of {job_id}"),
        queue=SimpleNamespace(name="default"),
        function=jobs.RUN_REQUEST,
        args=({},),
        kwargs={},
    )


def claimed_shard():
    shard = claimed("batch_1-0")
    shard.function, shard.args = jobs.RUN_SHARD, ()
    shard.kwargs = {"batch_id": "batch_1", "shard": 0}
    return shard


@pytest.fixture
def held():
    ending = asyncio.Event()
    bookkeeping = Bookkeeping(ending, asyncio.Event())
    yield RunningJobs(
        Claims(),
        bookkeeping,
        None,
        None,
        shards=None,
        inline=Inline(),
        finaliser=None,
        queue_names=("default",),
        owner="d1",
        ending=ending,
    )
    bookkeeping.close()


async def test_a_job_whose_end_cannot_be_told_is_let_go_and_the_others_go_on(held):
    async with asyncio.TaskGroup() as group:
        held.start(claimed("broken"), group)
        held.start(claimed("sound"), group)
    assert (held._claims.finished, len(held)) == (["sound"], 0)


async def test_an_interrupted_job_whose_end_cannot_be_told_is_let_go_too(held):
    async with asyncio.TaskGroup() as group:
        held.start(claimed("stopped"), group)
        await held._inline.waits.wait()
        held.stop("stopped")
    assert len(held) == 0


class Unreadable:
    """Shards whose files cannot be read."""

    async def run(self, batch_id, shard, urgency, stop, hold):
        raise StorageError("the mount is gone")


class Cancelled:
    """A ledger in which every batch is cancelling; `told` once it was told of trouble."""

    def __init__(self):
        self.told = asyncio.Event()

    async def set_fields(self, batch_id, fields):
        self.told.set()

    async def entries(self, batch_ids):
        return {batch_id: SimpleNamespace(status="cancelling") for batch_id in batch_ids}


async def test_a_shard_that_pauses_for_its_storage_is_handed_back_though_its_batch_is_cancelled(held):
    """Its job would stay with us for a minute, and the end of its batch wait for that."""
    handed_back = []
    held._claims.hand_back = lambda claimed: handed_back.append(claimed.id)
    held._shards, held._ledger = Unreadable(), Cancelled()
    shard = claimed_shard()
    async with asyncio.TaskGroup() as group:
        held.start(shard, group)
        await held._ledger.told.wait()
        await held.interrupt_unwanted()
        held._ending.set()
    assert (handed_back, len(held)) == (["batch_1-0"], 0)


class Fenced:
    """A ledger in which somebody else has claimed every shard meanwhile, or nobody."""

    def __init__(self, stands):
        self.stands = stands

    async def hand_back(self, claim, owner):
        return self.stands


class Ending:
    """Shards whose dispatcher ends while they are held."""

    async def run(self, batch_id, shard, urgency, stop, hold):
        hold("a claim")
        raise Closing


@pytest.mark.parametrize(("stands", "told"), [(True, "handed back"), (False, "dropped")])
async def test_a_shard_that_somebody_else_claimed_meanwhile_is_not_queued_again(held, stands, told):
    ends = []
    held._claims.hand_back = lambda claimed: ends.append("handed back")
    held._claims.drop = lambda claimed: ends.append("dropped")
    held._shards, held._ledger = Ending(), Fenced(stands)
    shard = claimed_shard()
    async with asyncio.TaskGroup() as group:
        held.start(shard, group)
    assert ends == [told]
