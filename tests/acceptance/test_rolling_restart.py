"""Every dispatcher is replaced while work goes on: nothing is sent twice, charged or late for want of one."""

from __future__ import annotations

import pytest
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer

from dispatcher import queues
from forebay.simulator.faults import HangFault
from tests.acceptance.conftest import MODEL, rows

pytestmark = pytest.mark.acceptance

SECOND = 100
"""Tokens that an engine takes a second for: a dispatcher that is told to end has work in flight."""
LINES = 48
"""Of each batch; there is one for each dispatcher that is replaced."""
GOES_ON = 8
"""Requests that reach engines after a dispatcher was told to end: the others do not wait for it."""


def holds_work(rig, name):
    return rig.rq_redis.scard(f"rq:worker:{name}:executions")


def inline_request(rig, text):
    queue = Queue("high", connection=rig.rq_redis, serializer=JSONSerializer)
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    return queue.enqueue("dispatcher.jobs.run_request", body)


async def test_all_dispatchers_are_replaced_one_after_the_other_under_load(rig):
    for runtime in ("vllm", "vllm", "sglang", "sglang"):
        await rig.ready_engine(runtime, slots=4, tokens_per_s=100.0)
    running = {name: rig.dispatcher(name) for name in ("old-1", "old-2", "old-3")}
    for name in running:
        await rig.until(lambda name=name: rig.rq_redis.exists(f"rq:worker:{name}"), f"{name} is there")

    batches, inline = [], []
    for number in (1, 2, 3):
        batches.append(await rig.submit(rows(LINES, tokens=SECOND), slots=16))
        old = f"old-{number}"
        await rig.until(lambda old=old: holds_work(rig, old), f"{old} holds a shard")
        before = len(rig.sent)
        running[old].terminate()
        inline.append(inline_request(rig, f"asked while {old} ends"))
        enough = min(before + GOES_ON, number * LINES)
        await rig.until(lambda enough=enough: len(rig.sent) >= enough, "the others go on")
        assert await rig.gone(running[old]) == 0
        rig.dispatcher(f"new-{number}")
        await rig.until(lambda number=number: rig.rq_redis.exists(f"rq:worker:new-{number}"), "it is there")

    for batch in batches:
        status, results = await rig.ended(batch)
        assert (status, results.names) == ("completed", [f"c{line}" for line in range(LINES)])
        assert {line["forebay"]["attempts"] for line in results.output} == {1}
    for job in inline:
        await rig.until(lambda job=job: job.get_status(refresh=True) == "finished", "it is answered")
        assert job.return_value(refresh=True)["forebay"]["attempts"] == 1
    assert len(rig.sent) == 3 * LINES + 3
    assert sum(engine.stats.aborted for engine in rig.engines) == 0
    await rig.until(lambda: not rig.rq_redis.keys("rq:executions:*"), "no job is held")
    assert [worker.leases for worker in (await rig.store.view()).workers] == [0, 0, 0, 0]
    names = {name.decode().rpartition(":")[2] for name in rig.rq_redis.smembers("rq:workers")}
    assert names == {"new-1", "new-2", "new-3"}


async def test_what_is_not_done_within_the_drain_timeout_is_handed_back_uncharged(rig):
    engine = await rig.ready_engine(slots=4)
    engine.control(HangFault(requests=2, paths=("/v1/chat/completions",)))
    first = rig.dispatcher("first", drain_timeout_s=0.2)
    batch = await rig.submit(rows(1), slots=4)
    job = inline_request(rig, "hangs")
    await rig.until(lambda: len(rig.sent) == 2, "both are with the engine")
    first.terminate()
    assert await rig.gone(first) == 0
    await rig.until(lambda: engine.stats.aborted == 2, "the engine sees them go")
    assert (await rig.worker(engine.url)).leases == 0
    shard = Job.fetch(queues.shard_job_id(batch, 0), connection=rig.rq_redis, serializer=JSONSerializer)
    for one in (shard, job):
        assert one.get_status(refresh=True) == "queued"
        assert not one.number_of_retries
    rig.dispatcher("second")
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", ["c0"])
    assert results.output[0]["forebay"]["attempts"] == 1
    await rig.until(lambda: job.get_status(refresh=True) == "finished", "it is answered")
    assert sorted(rig.sent) == ["hangs", "hangs", "say c0", "say c0"]
