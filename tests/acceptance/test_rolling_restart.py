"""Every dispatcher is replaced while work goes on: nothing is sent twice, charged or late for want of one."""

from __future__ import annotations

import pytest
from rq import Queue
from rq.serializers import JSONSerializer

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
        await rig.engine(runtime, slots=4, tokens_per_s=100.0)
    rig.monitor()
    running = {name: rig.dispatcher(name) for name in ("old-1", "old-2", "old-3")}
    await rig.ready()
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
