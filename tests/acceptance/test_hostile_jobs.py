"""Jobs and answers of strangers: each ends once, with a reason, and the dispatcher goes on."""

from __future__ import annotations

import pytest
from rq import Queue, Retry
from rq.serializers import JSONSerializer

from dispatcher.batches.nesting import DEEPEST
from forebay.simulator.faults import AnswerFault
from tests.acceptance.conftest import MODEL, rows

pytestmark = pytest.mark.acceptance

RUN_REQUEST = "dispatcher.jobs.run_request"
RUN_SHARD = "dispatcher.jobs.run_shard"
FINALISE = "dispatcher.jobs.finalise_batch"


def nested(levels):
    return "[" * levels + "]" * levels


def chain(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


async def test_jobs_and_answers_of_strangers_end_once_and_the_next_batch_runs(rig):
    engine = await rig.ready_engine(slots=8)
    patient = {"breaker__failure_threshold": 1000, "breaker__rate_minimum": 1000}
    dispatcher = rig.dispatcher("d1", retry__max_attempts=2, retry__base_s=0.01, **patient)
    queue = Queue("high", connection=rig.rq_redis, serializer=JSONSerializer)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}

    async def ended(function, *args, **kwargs):
        job = queue.enqueue(function, args=args, kwargs=kwargs, retry=Retry(max=50))
        await rig.until(
            lambda: job.get_status(refresh=True) in ("finished", "failed"), f"{function} {str(args)[:80]}"
        )
        assert job.retries_left in (50, None)
        return job.latest_result()

    # Answers: an error's deep body is text, a success is none; nobody sends the request again and again.
    for status, levels, sent in ((400, 100_000, 1), (400, 970, 1), (200, 100_000, 2), (200, 970, 2)):
        engine.control(AnswerFault(status=status, body='{"x":' + nested(levels) + "}"))
        before = len(rig.sent)
        result = await ended(RUN_REQUEST, body)
        assert len(rig.sent) - before == sent
        if status == 400:
            assert result.return_value["body"] == '{"x":' + nested(levels) + "}"
        else:
            assert "max_attempts" in result.exc_string
        engine.clear()
    engine.control(AnswerFault(status=200, body='{"x":' + nested(DEEPEST - 1) + "}"))
    assert (await ended(RUN_REQUEST, body)).return_value["status_code"] == 200
    engine.clear()

    # Requests and jobs that cannot be.
    batch = await rig.submit(rows(4), slots=4)
    assert (await rig.ended(batch))[0] == "completed"
    for function, args, kwargs, why in (
        (RUN_REQUEST, ({**body, "x": chain(900)},), {}, "nested"),
        (RUN_REQUEST, ({**body, "x": float("nan")},), {}, "cannot be sent as JSON"),
        (RUN_REQUEST, ({**body, "x": 10**4000},), {"url": ["/v1/completions"]}, "url must be one of"),
        (RUN_REQUEST, (body,), {"timeout_s": -1}, "timeout_s must be"),
        (RUN_REQUEST, (body,), {"host": "http://elsewhere"}, "unexpected keyword argument"),
        (RUN_SHARD, (batch, 99), {}, "has no shard 99"),
        (RUN_SHARD, (batch, -1), {}, "has no shard -1"),
        (RUN_SHARD, (batch, "0"), {}, "a shard is a whole number"),
        (RUN_SHARD, (batch, True), {}, "a shard is a whole number"),
        ("os.system", ("true",), {}, "does not run 'os.system'"),
    ):
        assert why in (await ended(function, *args, **kwargs)).exc_string
    for function, args in (
        (RUN_SHARD, ("../../etc", 0)),
        (RUN_SHARD, (["batch"], 0)),
        (FINALISE, ("../x\n\x1b[2J",)),
        (FINALISE, (batch,)),
    ):
        assert (await ended(function, *args)).return_value is None  # nothing is there to be done

    assert dispatcher.poll() is None
    assert sorted(path.name for path in rig.folder.iterdir() if not path.name.endswith(".log")) == ["storage"]
    status, results = await rig.ended(await rig.submit(rows(8), slots=4))
    assert (status, len(results.output)) == ("completed", 8)
