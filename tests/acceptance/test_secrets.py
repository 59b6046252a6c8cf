"""Prompts, answers and keys stay where they belong, whatever goes wrong and however much is logged."""

from __future__ import annotations

import base64
import contextlib
import zlib
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from rq import Queue
from rq.serializers import JSONSerializer

from forebay.simulator.faults import AnswerFault, OddBodyFault
from tests.acceptance.conftest import row
from workers.spec import WorkerSpec

pytestmark = pytest.mark.acceptance

KEY = "sk-the-key-of-the-worker"
PROMPT = "a-prompt-of-a-batch"
ANSWER = "an-answer-to-a-batch"
INLINE = "a-prompt-of-an-inline-request"
INLINE_ANSWER = "an-answer-to-an-inline-request"


def unpacked(value: bytes) -> bytes:
    """A value as it is, and as it is when RQ packed it."""
    unpackers = (zlib.decompress, partial(base64.b64decode, validate=True))
    for unpack in unpackers if value else ():
        with contextlib.suppress(ValueError, zlib.error):
            return value + b" " + unpacked(unpack(value))
    return value


def everything_in(redis) -> dict[str, bytes]:
    """Every key with all that it holds, as text would show it."""
    readers = {
        b"string": lambda key: [redis.get(key)],
        b"hash": lambda key: chain.from_iterable(redis.hgetall(key).items()),
        b"list": lambda key: redis.lrange(key, 0, -1),
        b"set": redis.smembers,
        b"zset": lambda key: redis.zrange(key, 0, -1),
        b"stream": lambda key: chain.from_iterable(
            chain.from_iterable(fields.items()) for _, fields in redis.xrange(key)
        ),
    }
    return {
        key.decode(): b"\n".join([key, *map(unpacked, readers[redis.type(key)](key))])
        for key in redis.scan_iter()
    }


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def holding(secret: str, places: dict[str, bytes]) -> list[str]:
    return sorted(name for name, content in places.items() if secret.encode() in content)


async def test_prompts_answers_and_keys_are_in_no_log_and_batches_in_no_redis(rig, monkeypatch):
    monkeypatch.setenv("KEY_OF_THE_TEST", KEY)
    good = await rig.engine(api_key=KEY, slots=4)
    refusing = await rig.engine(api_key="another", slots=4)
    for engine in (good, refusing):
        await rig.store.register(WorkerSpec(url=engine.url, api_key_env="KEY_OF_THE_TEST"))
    rig.monitor(log_level="debug")
    patient = {"breaker__failure_threshold": 1000, "breaker__rate_minimum": 1000}
    rig.dispatcher("d1", log_level="debug", retry__max_attempts=2, retry__base_s=0.01, **patient)
    await rig.until(lambda: good.stats.by_path["/v1/models"], "the monitor comes in with the key")

    good.control(AnswerFault(status=500, body=f'{{"error": "{ANSWER}"}}', requests=4))
    good.control(OddBodyFault(form="invalid_json", requests=4))
    good.control(AnswerFault(status=200, body=f'{{"answer": "{ANSWER}"}}'))
    lines = [row(f"c{number}", text=f"{PROMPT} {number}") for number in range(20)]
    batch = await rig.submit([*lines, "no json at all, but " + PROMPT], bad_lines="skip")
    assert (await rig.ended(batch))[0] == "completed"

    good.clear()
    good.control(AnswerFault(status=200, body=f'{{"answer": "{INLINE_ANSWER}"}}'))
    queue = Queue("high", connection=rig.rq_redis, serializer=JSONSerializer)
    body = {"model": "sim-model", "messages": [{"role": "user", "content": INLINE}]}
    answered = queue.enqueue("dispatcher.jobs.run_request", body, description="an inline request")
    refused = queue.enqueue(
        "dispatcher.jobs.run_request", {"stream": True, "prompt": INLINE}, description="-"
    )
    unknown = queue.enqueue("os.system", INLINE, description="-")
    for job in (answered, refused, unknown):
        await rig.until(lambda job=job: job.get_status(refresh=True) in ("finished", "failed"), "it ends")
    assert answered.return_value(refresh=True)["body"] == {"answer": INLINE_ANSWER}

    redis = everything_in(rig.rq_redis)
    logs = {log.name: log.read_bytes() for log in rig.folder.glob("*.log")}
    stored = files_below(Path(rig.storage.url))
    assert holding("d1", logs)  # they are read, and said something
    for secret in (KEY, PROMPT, ANSWER, INLINE, INLINE_ANSWER):
        assert holding(secret, logs) == []
    for secret in (KEY, PROMPT, ANSWER):
        assert holding(secret, redis) == []
    for secret in (KEY, INLINE, INLINE_ANSWER):
        assert holding(secret, stored) == []
    # What is looked for can be found where it belongs: the job, and the job's result.
    assert holding(INLINE, redis) == sorted(f"rq:job:{job.id}" for job in (answered, refused, unknown))
    assert holding(INLINE_ANSWER, redis) == [f"rq:results:{answered.id}"]
    assert holding(PROMPT, stored)
    assert holding(ANSWER, stored)
