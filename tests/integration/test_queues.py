"""What is put on RQ's queues: once, in order, readable by plain RQ code."""

from __future__ import annotations

import time

import pytest
from rq.job import Job
from rq.serializers import JSONSerializer

from dispatcher import jobs, queues
from dispatcher.claims import JobClaims
from dispatcher.running import FUNCTIONS
from workers.connection import connect_sync

pytestmark = pytest.mark.integration

BATCH = "batch_1"


@pytest.fixture
def connection(redis_url):
    client = connect_sync(redis_url)
    yield client
    client.close()


@pytest.fixture
def claims(connection):
    claims = JobClaims(connection, queues.QUEUES, name="d1", functions=FUNCTIONS, on_stop=lambda job_id: None)
    claims.open()
    yield claims
    claims.close()


def waiting(connection, name="default"):
    return [key.decode() for key in connection.lrange(f"rq:queue:{name}", 0, -1)]


def test_shards_are_queued_once_and_in_order(connection):
    assert queues.enqueue_shards(connection, "default", BATCH, [2, 0, 1]) == 3
    assert queues.enqueue_shards(connection, "default", BATCH, [0, 1, 2, 3]) == 1
    assert waiting(connection) == [f"{BATCH}-{shard}" for shard in (2, 0, 1, 3)]


def test_more_shards_than_one_chunk_are_all_queued(connection, monkeypatch):
    monkeypatch.setattr(queues, "_ENQUEUE_CHUNK", 3)
    assert queues.enqueue_shards(connection, "default", BATCH, range(8)) == 8
    assert waiting(connection) == [f"{BATCH}-{shard}" for shard in range(8)]


def test_a_running_shard_is_not_queued_again_and_one_that_failed_is(connection, claims):
    queues.enqueue_shards(connection, "default", BATCH, [0])
    claimed = claims.claim()
    assert queues.enqueue_shards(connection, "default", BATCH, [0]) == 0
    claims.fail(claimed, RuntimeError("x"), retry=False)
    assert queues.enqueue_shards(connection, "default", BATCH, [0]) == 1
    assert claims.claim().id == f"{BATCH}-0"


def test_a_shard_s_job_holds_ids_only_and_is_rerun_after_a_crash(connection):
    queues.enqueue_shards(connection, "low", BATCH, [7])
    job = Job.fetch(queues.shard_job_id(BATCH, 7), connection=connection, serializer=JSONSerializer)
    assert (job.func_name, tuple(job.args), job.kwargs) == (jobs.RUN_SHARD, (BATCH, 7), {})
    assert (job.timeout, job.result_ttl, job.should_retry) == (-1, 0, True)


def test_the_finaliser_is_queued_once_and_ahead_of_other_work(connection, claims):
    queues.enqueue_shards(connection, "default", "batch_2", [0])
    for _ in range(2):
        queues.enqueue_finalise(connection, "default", BATCH)
    assert waiting(connection) == [queues.finalise_job_id(BATCH), "batch_2-0"]
    claimed = claims.claim()
    assert (claimed.function, claimed.args) == (jobs.FINALISE_BATCH, (BATCH,))
    queues.enqueue_finalise(connection, "default", BATCH)
    assert waiting(connection) == ["batch_2-0"]
    claims.finish(claimed)
    queues.enqueue_finalise(connection, "default", BATCH)
    assert waiting(connection) == [queues.finalise_job_id(BATCH), "batch_2-0"]


def test_dropping_shards_leaves_those_that_run(connection, claims):
    queues.enqueue_shards(connection, "default", BATCH, range(4))
    claims.claim()
    assert queues.running_shards(connection, "default", BATCH) == 1
    assert queues.drop_shards(connection, "default", BATCH, range(5)) == 3
    assert waiting(connection) == []
    assert queues.running_shards(connection, "default", BATCH) == 1


def test_a_shard_that_is_claimed_while_it_is_being_dropped_stays_whole(connection, claims, monkeypatch):
    queues.enqueue_shards(connection, "default", BATCH, [0])
    claimed = []
    fetch = Job.fetch.__func__

    def claimed_meanwhile(cls, *args, **kwargs):
        job = fetch(cls, *args, **kwargs)
        if not claimed:  # a claim fetches its job too
            claimed.append(None)
            claimed[0] = claims.claim()
        return job

    with monkeypatch.context() as patch:
        patch.setattr(Job, "fetch", classmethod(claimed_meanwhile))
        assert queues.drop_shards(connection, "default", BATCH, [0]) == 0
    assert queues.running_shards(connection, "default", BATCH) == 1
    claims.finish(claimed[0])
    assert queues.running_shards(connection, "default", BATCH) == 0


def test_a_shard_that_a_dead_dispatcher_held_can_be_dropped(connection, claims):
    queues.enqueue_shards(connection, "default", BATCH, [0])
    claimed = claims.claim()
    claims.hand_back(claimed)
    # What is left of a dispatcher that died a minute ago: the name of its execution, without a record.
    connection.zadd(f"rq:executions:{claimed.id}", {"dead": time.time() + 60})
    assert queues.drop_shards(connection, "default", BATCH, [0]) == 1
    assert connection.keys("rq:*:" + claimed.id) == []


def test_the_finaliser_is_no_running_shard(connection, claims):
    queues.enqueue_finalise(connection, "default", BATCH)
    claims.claim()
    assert queues.running_shards(connection, "default", BATCH) == 0


def test_an_inline_request_keeps_its_result_as_long_as_it_asks(connection):
    body = {"model": "m"}
    job_id = queues.enqueue_request(
        connection, "high", body, url="/v1/embeddings", timeout_s=3, result_ttl_s=60
    )
    job = Job.fetch(job_id, connection=connection, serializer=JSONSerializer)
    assert (tuple(job.args), job.kwargs) == ((body,), {"url": "/v1/embeddings", "timeout_s": 3})
    assert (job.result_ttl, job.failure_ttl) == (60, 60)
    assert queues.waiting_jobs(connection) == {"high": 1, "default": 0, "low": 0}


def test_a_queue_that_somebody_spoiled_is_left_out_of_those_that_are_counted(connection):
    queues.enqueue_request(connection, "low", {"model": "m"})
    connection.set("rq:queue:high", "x")
    assert queues.waiting_jobs(connection) == {"default": 0, "low": 1}
