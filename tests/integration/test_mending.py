"""Lost jobs come back by themselves, and nothing is queued twice that is only on its way."""

from __future__ import annotations

import asyncio

import pytest
from rq.job import Job
from rq.registry import FailedJobRegistry
from rq.serializers import JSONSerializer

from dispatcher import queues
from dispatcher.batches.ledger import Ledger, Tally
from dispatcher.batches.record import BatchStatus
from dispatcher.bookkeeping import Bookkeeping
from dispatcher.claimed import NotOurJobError
from dispatcher.claims import JobClaims
from dispatcher.mending import Mending
from dispatcher.running import FUNCTIONS
from workers.connection import connect_sync

pytestmark = pytest.mark.integration

BATCH = "batch_1"
SHARDS = 3


@pytest.fixture
def server(redis_url):
    client = connect_sync(redis_url)
    yield client
    client.close()


@pytest.fixture
async def ledger(valkey):
    """A batch of three shards is in progress; its jobs are queued."""
    ledger = Ledger(valkey)
    fields = {
        "status": "in_progress",
        "shards": str(SHARDS),
        "shards_done": "0",
        "queue": "default",
        "expires_at": str(await ledger.now() + 3600),
    }
    await ledger.open(BATCH, 1.0, fields)
    return ledger


@pytest.fixture
def jobs(server, ledger):
    queues.enqueue_shards(server, "default", BATCH, range(SHARDS))


@pytest.fixture
def mending(server, ledger):
    bookkeeping = Bookkeeping(asyncio.Event(), asyncio.Event())
    yield Mending(ledger, bookkeeping, server)
    bookkeeping.close()


@pytest.fixture
def claims(server):
    claims = JobClaims(
        server, ("high", "default", "low"), name="d1", functions=FUNCTIONS, on_stop=lambda job_id: None
    )
    claims.open()
    yield claims
    claims.close()


def waiting(server):
    return sorted(job_id.decode() for job_id in server.lrange("rq:queue:default", 0, -1))


async def look_twice(mending):
    await mending.look()
    await mending.look()


@pytest.mark.usefixtures("jobs")
async def test_a_shard_that_is_not_done_any_more_and_has_no_job_is_queued_again(
    mending, ledger, server, claims
):
    """It was reported done, Redis lost that, and the acknowledgement was repeated afterwards."""
    claimed = claims.claim()
    await ledger.claim(BATCH, 0, "d1")
    claims.finish(claimed)
    await mending.look()
    assert waiting(server) == ["batch_1-1", "batch_1-2"]
    await mending.look()
    assert waiting(server) == ["batch_1-0", "batch_1-1", "batch_1-2"]
    assert claims.claim().args == (BATCH, 1)  # those that waited go first
    await look_twice(mending)
    assert waiting(server) == ["batch_1-0", "batch_1-2"]


@pytest.mark.usefixtures("jobs")
async def test_what_waits_was_just_popped_or_runs_is_not_queued_again(mending, server, claims):
    claims.claim()
    server.lmove("rq:queue:default", "rq:queue:default:intermediate")
    await look_twice(mending)
    assert waiting(server) == ["batch_1-2"]


@pytest.mark.usefixtures("jobs")
async def test_a_job_that_comes_back_between_two_looks_is_not_queued_twice(mending, server):
    job_id = server.lpop("rq:queue:default")
    await mending.look()
    server.rpush("rq:queue:default", job_id)
    await look_twice(mending)
    assert waiting(server) == ["batch_1-0", "batch_1-1", "batch_1-2"]


@pytest.mark.usefixtures("jobs")
async def test_a_job_that_failed_for_good_stays_where_people_look_for_it(mending, server, claims):
    claims.fail(claims.claim(), NotOurJobError("no"), retry=False)
    await look_twice(mending)
    assert waiting(server) == ["batch_1-1", "batch_1-2"]
    registry = FailedJobRegistry("default", connection=server, serializer=JSONSerializer)
    assert registry.get_job_ids() == ["batch_1-0"]


async def all_done(ledger):
    for shard in range(SHARDS):
        claim = await ledger.claim(BATCH, shard, "d1")
        await ledger.progress(claim, "d1", Tally(1), done=True)


async def test_a_batch_whose_shards_are_done_gets_its_finaliser_back(mending, ledger, server):
    await all_done(ledger)
    await look_twice(mending)
    assert waiting(server) == ["batch_1-finalise"]


@pytest.mark.usefixtures("jobs")
async def test_a_batch_whose_cancelling_broke_off_gets_the_finaliser_that_ends_it(mending, ledger, server):
    await ledger.move(BATCH, BatchStatus.CANCELLING, among=[BatchStatus.IN_PROGRESS])
    queues.drop_shards(server, "default", BATCH, range(SHARDS))
    await look_twice(mending)
    assert waiting(server) == ["batch_1-finalise"]
    job = Job.fetch("batch_1-finalise", connection=server, serializer=JSONSerializer)
    assert job.func_name == "dispatcher.jobs.finalise_batch"


@pytest.mark.parametrize("status", ["validating", "completed", "cancelled", "failed", "expired"])
async def test_a_batch_that_ended_or_is_still_being_submitted_gets_nothing(mending, ledger, server, status):
    await ledger.set_fields(BATCH, {"status": status})
    await look_twice(mending)
    assert waiting(server) == []


async def test_an_old_batch_is_mended_however_many_newer_ones_have_ended(mending, ledger, server):
    for number in range(250):
        await ledger.open(f"newer_{number}", 2.0 + number, {"status": "completed", "queue": "default"})
    await look_twice(mending)
    assert waiting(server) == [f"{BATCH}-{shard}" for shard in range(SHARDS)]


@pytest.mark.usefixtures("jobs")
async def test_a_batch_whose_time_is_over_is_called_off_though_nobody_claims_its_shards(
    mending, ledger, server
):
    await ledger.set_fields(BATCH, {"expires_at": str(await ledger.now() - 60)})
    await mending.look()
    entry = await ledger.entry(BATCH)
    assert (entry.status, entry.fields["late"], entry.fields["overdue"]) == ("cancelling", "1", "1")
    assert waiting(server) == [f"{BATCH}-finalise"]


@pytest.mark.usefixtures("jobs")
async def test_a_batch_is_left_to_whoever_answers_its_late_lines_for_a_moment(mending, ledger, server):
    await ledger.set_fields(BATCH, {"expires_at": str(await ledger.now() - 1)})
    await mending.look()
    assert (await ledger.entry(BATCH)).status == BatchStatus.IN_PROGRESS


async def test_a_batch_that_has_all_its_answers_ends_as_it_is_however_late(mending, ledger):
    await all_done(ledger)
    await ledger.set_fields(BATCH, {"expires_at": str(await ledger.now() - 60)})
    await mending.look()
    assert (await ledger.entry(BATCH)).status == BatchStatus.IN_PROGRESS
