"""Jobs that a dispatcher holds: one whose end cannot be told must not take the others with it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from dispatcher import jobs
from dispatcher.bookkeeping import Bookkeeping
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
