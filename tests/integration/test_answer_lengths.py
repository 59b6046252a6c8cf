"""How long answers get without a ceiling is learned from answers, kept in Redis, and planned by."""

from __future__ import annotations

import contextlib
import io

import msgspec
import pytest

from dispatcher import lengths
from dispatcher.attempts import Answered, Course, Unanswered
from dispatcher.batches.ledger import Ledger
from dispatcher.batches.plan import open_plan
from dispatcher.batches.storage import Storage
from dispatcher.lengths import AnswerLengths
from dispatcher.reply import Reply
from dispatcher.shard import ShardRunner
from forebay import Forebay
from forebay.submission import Options, prepare, publish
from workers import keys
from workers.connection import connect, connect_sync
from workers.errors import StoreUnavailable

pytestmark = pytest.mark.integration


def a_file(lines, **body):
    rows = [
        {
            "custom_id": f"c{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": f"{number}"} | body,
        }
        for number in range(lines)
    ]
    return io.BytesIO(b"\n".join(map(msgspec.json.encode, rows)))


async def learned(valkey, *answers, model="m", asked_tokens=None):
    known = AnswerLengths(valkey)
    for tokens in answers:
        known.saw(model, tokens, asked_tokens=asked_tokens)
    await known.flush()
    return await known.means()


async def written(valkey, model="m"):
    """What is written of a model, but for when."""
    text, _, at = (await valkey.hget(keys.ANSWERS.of(), model)).rpartition(" at=")
    assert 0 <= await Ledger(valkey).now() - float(at) < 3600
    return text


async def test_the_first_answers_make_a_plain_mean_for_each_model(valkey):
    await learned(valkey, 100, 200)
    await learned(valkey, 600)
    assert await learned(valkey, 7, model=None) == {"m": 300.0, "": 7.0}
    assert await written(valkey) == "mean=300.00 answers=3"


async def test_answers_with_a_ceiling_or_without_a_count_teach_nothing(valkey):
    await learned(valkey, 5, 5, asked_tokens=5)
    assert await learned(valkey, None, 0) == {}


async def test_the_mean_follows_what_is_asked_lately(valkey):
    await learned(valkey, *[100] * 5000)
    assert await learned(valkey, *[300] * 500) == {"m": 200.0}
    found = await learned(valkey, *[300] * 3000)
    assert found == {"m": 300.0}


async def test_what_cannot_be_written_is_kept_and_what_was_is_not_written_again(valkey, tmp_path):
    away = connect(f"unix://{tmp_path}/nobody")
    known = AnswerLengths(away)
    known.saw("m", 40, asked_tokens=None)
    with pytest.raises(StoreUnavailable):
        await known.flush()
    await away.aclose()
    known._scripts = AnswerLengths(valkey)._scripts
    await known.flush()
    await known.flush()
    assert await written(valkey) == "mean=40.00 answers=1"


async def test_models_are_bounded_and_a_new_one_takes_the_place_of_the_one_unused_for_longest(
    valkey, monkeypatch
):
    monkeypatch.setattr(lengths, "MOST_MODELS", 2)
    for model in ("a", "b", "a"):
        await learned(valkey, 10, model=model)
    assert await learned(valkey, 30, model="c") == {"a": 10.0, "c": 30.0}
    assert 0 < await valkey.ttl(keys.ANSWERS.of()) <= lengths.TTL_S


async def test_of_more_new_models_than_have_room_some_are_taken_and_none_that_is_told_of_goes(
    valkey, monkeypatch
):
    monkeypatch.setattr(lengths, "MOST_MODELS", 2)
    await learned(valkey, 10, model="a")
    await learned(valkey, 10, model="b")
    known = AnswerLengths(valkey)
    for model in ("a", "c", "d"):
        known.saw(model, 10, asked_tokens=None)
    await known.flush()
    assert set(await known.means()) == {"a", "c"}


async def test_what_no_longer_counts_goes_first_and_all_of_it(valkey, monkeypatch):
    monkeypatch.setattr(lengths, "MOST_MODELS", 4)
    long_ago = await Ledger(valkey).now() - lengths.TTL_S - 1
    old = {"a": f"mean=1.00 answers=1 at={long_ago}", "b": "mean=1.00 answers=1", "c": "who knows"}
    await valkey.hset(keys.ANSWERS.of(), mapping=old)
    await learned(valkey, 10, model="d")
    assert set(await learned(valkey, 10, model="e")) == {"d", "e"}


class Room:
    """A fleet that always has room."""

    async def room(self, models, urgency):
        return set(models)

    def announced(self, coming, urgency):
        return contextlib.nullcontext()

    def saw_answer(self, *_, **__):
        return None


class Answers:
    """Answers each request with thirty tokens, but the first with an error."""

    async def run(self, request):
        if request.custom_id == "c0":
            return Unanswered("max_attempts", "it failed", Course("w:1", 5, 0.0, 0.1))
        return Answered(Reply(200, b'{"usage":{"completion_tokens":30}}', 0.1), Course("w:1", 1, 0.0, 0.1))


async def test_a_shard_s_answers_are_learned_from(valkey, make_batch):
    runner, known, batch = await make_batch(a_file(5))
    await runner.run(batch, 0, 1)
    await known.flush()
    assert await valkey.hkeys(keys.ANSWERS.of()) == ["m"]
    assert await written(valkey) == "mean=30.00 answers=4"


@pytest.fixture
def make_batch(valkey, redis_url, tmp_path):
    rq_redis = connect_sync(redis_url)

    async def make(source):
        storage, ledger, known = Storage(str(tmp_path)), Ledger(valkey), AnswerLengths(valkey)
        record = prepare(storage, source, name="in", options=Options(), now_s=await ledger.now())
        await publish(ledger, rq_redis, storage.files(record.id))
        how = {"owner": "d1", "part_lines": 4, "part_age_s": 0.01, "hedge": False}
        return ShardRunner(storage, ledger, Room(), Answers(), lengths=known, **how), known, record.id

    yield make
    rq_redis.close()


async def known_to(redis_url, *answers):
    client = connect(redis_url)
    await learned(client, *answers)
    await client.aclose()


def test_a_file_is_planned_by_what_was_learned_of_its_model(redis_url, tmp_path):
    with Forebay(redis_url, str(tmp_path)) as forebay:

        def costs(**body):
            record = forebay.submit(a_file(1, **body))
            return [one.cost_tokens for one in open_plan(forebay.desk.storage.files(record.id)).shard(0)]

        prompt = 1
        assert costs() == [prompt + 256]
        forebay._portal.call(known_to, redis_url, 1000, 3000)
        assert costs() == [prompt + 2000]
        assert costs(model="other") == [prompt + 256]
        assert costs(max_tokens=5) == [prompt + 5]
