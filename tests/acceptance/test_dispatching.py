"""Batches through whole installations: every line ends once, whatever engines, dispatchers and Redis do.

The numbered cases are those of the table of live workers' behaviour that the dispatcher is built against.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from collections import Counter

import pytest
from rq import Queue
from rq.command import send_stop_job_command
from rq.job import Job
from rq.serializers import JSONSerializer

from dispatcher import queues
from dispatcher.batches.ledger import Tally
from forebay.simulator.faults import AnswerFault, CutBodyFault, OddBodyFault, ResetFault
from forebay.simulator.process import start_engine
from forebay.simulator.settings import EngineSettings
from tests.acceptance.conftest import row, rows
from workers.breaker import BreakerState
from workers.spec import WorkerSpec, worker_id

pytestmark = pytest.mark.acceptance


async def four_engines(rig, **settings):
    for runtime in ("vllm", "vllm", "sglang", "sglang"):
        await rig.engine(runtime, **settings)


def mixed(count):
    rng = random.Random(7)
    return [
        row(
            f"c{number}",
            tokens=max(2, min(200, int(rng.lognormvariate(3, 1)))),
            text=f"{number}: " + rng.choice(["plain", "ünïcode ☃", "line\u2028separator", 'quote "x"\t']) * 3,
        )
        for number in range(count)
    ]


# -- an ordinary day -----------------------------------------------------------------------------------------


async def test_a_mixed_batch_over_four_engines_ends_complete_in_order_with_bodies_untouched(rig):
    await four_engines(rig, slots=16)
    rig.monitor()
    rig.dispatcher("d1")
    lines = mixed(300)
    batch = await rig.submit(lines)
    status, results = await rig.ended(batch)
    assert (status, results.errors) == ("completed", [])
    assert results.names == [f"c{number}" for number in range(300)]
    bodies = [line[line.index('"body": ') + len('"body": ') : -1] for line in lines]
    wanted = Counter(hashlib.sha256(body.encode()).hexdigest() for body in bodies)
    arrived = Counter(record.body_sha256 for engine in rig.engines for record in engine.stats.log)
    assert arrived == wanted
    assert all(engine.stats.log for engine in rig.engines)
    view = await rig.store.view()
    assert [worker.leases for worker in view.workers] == [0, 0, 0, 0]


async def test_an_answer_passes_byte_for_byte(rig):
    odd = '{"id":  "x", "n": 1.10e2, "big": 12345678901234567890123, "u": "\\u00e9 \u2028", "z": -0.0}'
    engine = await rig.engine()
    engine.control(AnswerFault(status=200, body=odd))
    rig.monitor()
    rig.dispatcher("d1")
    batch = await rig.submit(rows(3))
    assert (await rig.ended(batch))[0] == "completed"
    with rig.storage.files(batch).open("output.jsonl") as output:
        assert all(f'"body":{odd}}}'.encode() in line for line in output)


async def test_two_thousand_lines_on_instant_engines(rig):
    await four_engines(rig, instant=True, slots=64)
    rig.monitor()
    rig.dispatcher("d1")
    batch = await rig.submit(rows(2000), slots=256)
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", [f"c{number}" for number in range(2000)])
    assert len(rig.sent) == len(set(rig.sent)) == 2000


async def test_plain_rq_code_gets_the_answer_to_an_inline_request(rig):
    await rig.engine()
    rig.monitor()
    rig.dispatcher("d1")
    body = {"model": "sim-model", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    plain = Queue("high", connection=rig.rq_redis, serializer=JSONSerializer)
    job = plain.enqueue("dispatcher.jobs.run_request", body)
    await rig.until(lambda: job.get_status(refresh=True) == "finished", "the job finishes")
    answer = job.return_value(refresh=True)
    assert (answer["status_code"], answer["body"]["usage"]["completion_tokens"]) == (200, 3)
    assert (answer["forebay"]["attempts"], answer["forebay"]["worker"]) == (1, worker_id(rig.engines[0].url))


# -- dispatchers die -----------------------------------------------------------------------------------------


async def test_a_killed_dispatcher_costs_no_line_and_doubles_none(rig):
    await four_engines(rig, slots=8, tokens_per_s=100.0)
    rig.monitor()
    killed = rig.dispatcher("killed", part_lines=8, lease_ttl_s=2)
    batch = await rig.submit(rows(200, tokens=5), slots=16)
    await rig.some_done(batch, 20)
    killed.kill()
    killed.wait()
    rig.let_claims_run_out("killed")
    rig.dispatcher("next")
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", [f"c{number}" for number in range(200)])
    assert len(set(rig.sent)) == 200
    assert len(rig.sent) < 2 * 200 - 20  # what was durable was not sent again


async def test_one_of_two_dispatchers_is_killed_and_the_other_does_its_lines(rig):
    await four_engines(rig, slots=8, tokens_per_s=100.0)
    rig.monitor()
    killed = rig.dispatcher("killed", part_lines=8, lease_ttl_s=2)
    rig.dispatcher("left", part_lines=8, lease_ttl_s=2)
    batch = await rig.submit(rows(200, tokens=5), slots=16)
    await rig.until(lambda: rig.rq_redis.scard("rq:worker:killed:executions"), "the one holds a shard")
    await rig.some_done(batch, 10)
    killed.kill()
    killed.wait()
    rig.let_claims_run_out("killed")
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", [f"c{number}" for number in range(200)])


async def test_sigterm_finishes_what_is_in_flight_and_hands_back_the_rest(rig):
    await four_engines(rig, slots=4, tokens_per_s=100.0)
    rig.monitor()
    first = rig.dispatcher("first")
    batch = await rig.submit(rows(160, tokens=5), slots=16)
    await rig.some_done(batch, 20)
    first.terminate()
    assert await rig.gone(first) == 0
    assert [worker.leases for worker in (await rig.store.view()).workers] == [0, 0, 0, 0]
    assert (await rig.entry(batch)).status == "in_progress"
    rig.dispatcher("second")
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", [f"c{number}" for number in range(160)])
    assert len(rig.sent) == len(set(rig.sent)) == 160


async def test_a_second_signal_ends_at_once_and_what_was_answered_is_kept(rig):
    engine = await rig.engine(slots=4, tokens_per_s=100.0)
    rig.monitor()
    first = rig.dispatcher("first")
    batch = await rig.submit([*rows(20, tokens=2), row("long", tokens=5000)], slots=4)
    await rig.some_done(batch, 10)
    await rig.until(lambda: "say long" in rig.sent, "the long one runs")
    first.send_signal(signal.SIGTERM)
    first.send_signal(signal.SIGINT)  # two of a kind might arrive as one
    assert await rig.gone(first) == 0
    await rig.until(lambda: engine.stats.aborted, "the engine sees it go")
    assert (await rig.worker(engine.url)).leases == 0


# -- Redis stalls --------------------------------------------------------------------------------------------


async def test_a_stalled_redis_costs_no_line_and_ends_nobody(rig):
    await four_engines(rig, slots=8, tokens_per_s=100.0)
    monitor = rig.monitor()
    dispatcher = rig.dispatcher("d1")
    batch = await rig.submit(rows(200, tokens=5), slots=16)
    await rig.some_done(batch, 20)
    server = (await rig.store.client.info("server"))["process_id"]
    os.kill(server, signal.SIGSTOP)
    try:
        # All that is in flight is answered meanwhile, and nothing new can be placed.
        await rig.until(lambda: sum(engine.load().running for engine in rig.engines) == 0, "engines idle")
    finally:
        os.kill(server, signal.SIGCONT)
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", [f"c{number}" for number in range(200)])
    assert (monitor.poll(), dispatcher.poll()) == (None, None)
    assert len(rig.sent) == len(set(rig.sent)) == 200


# -- ends ----------------------------------------------------------------------------------------------------


async def test_a_cancelled_batch_aborts_what_runs_and_keeps_what_is_done(rig):
    engine = await rig.engine(slots=8, tokens_per_s=100.0)
    rig.monitor()
    rig.dispatcher("d1", watch_interval_s=0.1)
    lines = rows(40, tokens=2) + [row(f"long{number}", tokens=5000) for number in range(6)]
    batch = await rig.submit(lines, slots=8)
    await rig.some_done(batch, 2)
    await rig.until(lambda: engine.load().running >= 4, "the long ones run")
    durable = (await rig.entry(batch)).completed
    await rig.cancel(batch)
    status, results = await rig.ended(batch)
    assert (status, results.codes) == ("cancelled", {"batch_cancelled"})
    assert results.all_names == sorted(json.loads(line)["custom_id"] for line in lines)
    await rig.until(lambda: engine.load().running == 0, "the engine runs nothing any more")
    assert engine.stats.aborted >= 4
    answered = sum(record.outcome == "answered" for record in engine.stats.log)
    assert durable <= len(results.output) <= answered
    assert (await rig.worker(engine.url)).leases == 0


async def test_the_lines_of_a_stopped_job_end_as_error_lines_and_so_does_the_batch(rig):
    engine = await rig.engine(slots=8, tokens_per_s=100.0)
    rig.monitor()
    rig.dispatcher("d1")
    batch = await rig.submit([row(f"long{number}", tokens=5000) for number in range(4)], slots=4)
    shards = [queues.shard_job_id(batch, shard) for shard in range((await rig.entry(batch)).shards)]
    await rig.until(lambda: engine.load().running == 4, "the long ones run")
    for shard in shards:
        send_stop_job_command(rig.rq_redis, shard, serializer=JSONSerializer)
    status, results = await rig.ended(batch)
    assert (status, results.codes) == ("completed", {"job_stopped"})
    assert results.all_names == sorted(f"long{number}" for number in range(4))
    await rig.until(lambda: engine.load().running == 0, "the engine runs nothing any more")
    for shard in shards:
        job = Job.fetch(shard, connection=rig.rq_redis, serializer=JSONSerializer)
        assert job.get_status() == "stopped"


async def test_lines_whose_results_vanished_before_the_end_are_sent_again(rig):
    await rig.engine()
    rig.monitor()
    batch = await rig.submit(rows(20), slots=4)
    shards = (await rig.entry(batch)).shards
    for shard in range(shards):
        claim = await rig.ledger.claim(batch, shard, "test")
        await rig.ledger.progress(claim, "test", Tally(), done=True)
    queues.drop_shards(rig.rq_redis, "default", batch, range(shards))
    queues.enqueue_finalise(rig.rq_redis, "default", batch)
    rig.dispatcher("d1")
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", [f"c{number}" for number in range(20)])
    assert len(rig.sent) == 20


async def test_a_batch_past_its_deadline_sends_nothing(rig):
    engine = await rig.engine()
    rig.monitor()
    batch = await rig.submit(rows(30), window_s=0.001)
    rig.dispatcher("d1")
    status, results = await rig.ended(batch)
    assert (status, results.codes, results.output) == ("expired", {"batch_expired"}, [])
    assert len(results.errors) == 30
    assert engine.stats.by_path["/v1/chat/completions"] == 0


async def test_a_batch_that_is_late_keeps_what_is_done_and_expires_the_rest(rig):
    engine = await rig.engine(slots=4, tokens_per_s=100.0)
    rig.monitor()
    rig.dispatcher("d1")
    await rig.ready()
    await rig.until(lambda: rig.rq_redis.exists("rq:worker:d1"), "the dispatcher is there")
    lines = rows(20, tokens=2) + [row(f"long{number}", tokens=5000) for number in range(2)]
    batch = await rig.submit(lines, slots=4, window_s=4.0)
    await rig.until(lambda: engine.load().running, "something is sent in time")
    status, results = await rig.ended(batch)
    assert (status, results.codes) == ("expired", {"batch_expired"})
    assert results.all_names == sorted(json.loads(line)["custom_id"] for line in lines)
    answered = {record.prompt for record in engine.stats.log if record.outcome == "answered"}
    assert results.names
    assert {f"say {name}" for name in results.names} <= answered
    assert {"long0", "long1"} <= {line["custom_id"] for line in results.errors}
    await rig.until(lambda: engine.load().running == 0, "the engine runs nothing any more")


async def test_a_model_that_nobody_serves_waits_and_keeps_nobody_else_waiting(rig):
    await rig.engine(slots=8)
    rig.monitor()
    rig.dispatcher("d1")
    await rig.ready()
    unserved = await rig.submit(rows(300, model="nobody-serves-this"), slots=8)
    await rig.until(lambda: rig.rq_redis.scard("rq:worker:d1:executions"), "it is being waited for")
    served = await rig.submit(rows(50), slots=8)
    status, results = await rig.ended(served)
    assert (status, len(results.output)) == ("completed", 50)
    assert (await rig.entry(unserved)).status == "in_progress"
    await rig.cancel(unserved)
    status, results = await rig.ended(unserved)
    assert (status, results.codes, len(results.errors)) == ("cancelled", {"batch_cancelled"}, 300)


# -- what engines do -----------------------------------------------------------------------------------------


async def faulty_and_sound(rig, *faults, dispatcher=None, **settings):
    """Two engines, the first of which has the faults; both services run and both engines are ready."""
    faulty = await rig.engine("vllm", **settings)
    sound = await rig.engine("sglang", **settings)
    rig.monitor()
    await rig.ready()
    for fault in faults:
        faulty.control(fault)
    rig.dispatcher("d1", **(dispatcher or {}))
    return faulty, sound


NO_ANSWERS = (
    ResetFault(requests=2),
    CutBodyFault(requests=2),
    OddBodyFault(requests=2, form="empty"),
    OddBodyFault(requests=2, form="html"),
    OddBodyFault(requests=2, form="invalid_json"),
)


async def test_2_3_and_4_what_is_no_answer_is_tried_elsewhere_and_never_reaches_a_result(rig):
    never_opens = {"breaker__failure_threshold": 1000, "breaker__rate_minimum": 1000}
    faulty, _ = await faulty_and_sound(rig, *NO_ANSWERS, dispatcher=never_opens, slots=16)
    batch = await rig.submit(rows(200))
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", [f"c{number}" for number in range(200)])
    assert all(line["response"]["body"]["usage"]["completion_tokens"] == 4 for line in results.output)
    hits = [fault["hits"] for fault in faulty.state()["faults"]]
    assert all(hits)
    assert sum(line["forebay"]["attempts"] - 1 for line in results.output) == sum(hits)


async def test_4_lines_that_nobody_answers_with_json_end_as_error_lines_and_the_next_batch_runs(rig):
    for _ in range(2):
        (await rig.engine()).control(OddBodyFault(form="invalid_json"))
    rig.monitor()
    rig.dispatcher("d1", retry__max_attempts=2, retry__base_s=0.01, breaker__failure_threshold=1000)
    status, results = await rig.ended(await rig.submit(rows(8)))
    assert (status, results.codes, results.output) == ("completed", {"max_attempts"}, [])
    assert results.all_names == sorted(f"c{number}" for number in range(8))
    for engine in rig.engines:
        engine.clear()
    status, results = await rig.ended(await rig.submit(rows(8)))
    assert (status, len(results.output)) == ("completed", 8)


async def test_5_an_error_inside_a_200_is_kept_as_it_came(rig):
    engine = await rig.engine()
    engine.control(OddBodyFault(form="error_object"))
    rig.monitor()
    rig.dispatcher("d1")
    batch = await rig.submit(rows(3))
    status, results = await rig.ended(batch)
    assert (status, len(results.output), results.errors) == ("completed", 3, [])
    assert all("error" in line["response"]["body"] for line in results.output)
    assert (await rig.worker(engine.url)).breaker is BreakerState.CLOSED


RETRY_AFTER = ("2", "Wed, 21 Oct 2099 07:28:00 GMT", "-5", "1e12", "abc")


async def test_6_any_retry_after_is_survived_and_none_reaches_beyond_half_the_time_left(rig):
    busy = [await rig.engine(slots=4) for _ in RETRY_AFTER]
    sound = await rig.engine(slots=16)
    rig.monitor()
    await rig.ready()
    for engine, header in zip(busy, RETRY_AFTER, strict=True):
        engine.control(AnswerFault(status=429, retry_after=header))
    rig.dispatcher("d1", retry__cap_s=0.2)
    batch = await rig.submit(rows(60), window_s=600.0)
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", [f"c{number}" for number in range(60)])
    assert {line["forebay"]["worker"] for line in results.output} == {worker_id(sound.url)}
    for engine in busy:
        assert engine.stats.by_status[429] > 0
        worker = await rig.worker(engine.url)
        assert worker.breaker is BreakerState.CLOSED
        assert worker.deferred_until <= await rig.store.now() + 300.0


async def test_8_a_full_queue_shrinks_the_limit_and_leaves_the_breaker_alone(rig):
    full, sound = await faulty_and_sound(rig, AnswerFault(status=503, queue_full=True), slots=16)
    before = (await rig.worker(full.url)).limit
    batch = await rig.submit(rows(60))
    status, results = await rig.ended(batch)
    assert (status, len(results.output)) == ("completed", 60)
    assert full.stats.by_status[503] > 0
    worker = await rig.worker(full.url)
    assert (worker.breaker, worker.limit < before) == (BreakerState.CLOSED, True)
    assert {line["forebay"]["worker"] for line in results.output} == {worker_id(sound.url)}


async def test_9_and_25_refused_prompts_are_error_lines_and_good_ones_follow(rig):
    engine = await rig.engine("sglang", slots=16, max_model_len=512)
    rig.monitor()
    rig.dispatcher("d1")
    await rig.ready()
    long = [row(f"long{number}", text="word " * 5000) for number in range(60)]
    batch = await rig.submit(long + rows(40))
    status, results = await rig.ended(batch)
    assert status == "completed"
    assert sorted(results.names) == sorted(f"c{number}" for number in range(40))
    assert sorted(line["custom_id"] for line in results.errors) == sorted(f"long{n}" for n in range(60))
    assert {line["response"]["status_code"] for line in results.errors} == {400}
    assert all(line["error"] is None and line["response"]["body"] for line in results.errors)
    assert {line["forebay"]["attempts"] for line in results.errors} == {1}
    worker = await rig.worker(engine.url)
    assert (worker.breaker, worker.breaker_trips) == (BreakerState.CLOSED, 0)


async def test_12_an_engine_that_is_killed_loses_no_request(rig):
    doomed = start_engine(EngineSettings(slots=30, tokens_per_s=1.0, slowdown=0.0))
    try:
        await rig.store.register(WorkerSpec(url=doomed.url, max_running=30))
        rig.monitor()
        rig.dispatcher("d1")
        batch = await rig.submit(rows(60), slots=30)

        async def thirty_run():
            return (await rig.worker(doomed.url)).leases >= 30

        await rig.until(thirty_run, "thirty requests are in flight")
        await rig.engine(slots=16)
        await rig.engine("sglang", slots=16)
    finally:
        doomed.kill()
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", [f"c{number}" for number in range(60)])
    assert worker_id(doomed.url) not in {line["forebay"]["worker"] for line in results.output}


async def test_27_a_worker_that_refuses_in_a_millisecond_does_not_look_least_loaded(rig):
    refuses, _ = await faulty_and_sound(rig, AnswerFault(status=429), instant=True, slots=16)
    batch = await rig.submit(rows(400))
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", [f"c{number}" for number in range(400)])
    assert refuses.stats.by_status[429] < 100
