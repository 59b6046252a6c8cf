"""Lines that kill whoever sends them: a claim dies when its run is called off and nobody hands it back."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections import Counter

import pytest

from dispatcher.attempts import Answered, Course
from dispatcher.batches.ledger import Ledger
from dispatcher.batches.parts import shard_entries
from dispatcher.batches.poison import CAREFUL_AFTER, LONE_DEATHS
from dispatcher.batches.storage import Storage
from dispatcher.reply import Reply
from dispatcher.shard import POISON, ShardEnd, ShardRunner
from dispatcher.solitude import Solitude
from forebay.submission import Options, prepare, publish
from workers.connection import connect_sync
from workers.errors import StoreUnavailable

pytestmark = pytest.mark.integration

LINES = 40
ANSWER = b'{"usage":{"prompt_tokens":3,"completion_tokens":5}}'


class Room:
    """A fleet that always has room."""

    async def room(self, models, urgency):
        return models

    def announced(self, coming, urgency):
        return contextlib.nullcontext()

    def saw_answer(self, *_, **__):
        return None


class Deadly:
    """Answers every request but those that kill: whoever sends one is dead from then on."""

    def __init__(self, killers):
        self.killers = killers
        self.solitude = Solitude()
        self.died = asyncio.Event()
        self.asked = Counter()
        self.sending = set()
        self.company = {}

    async def run(self, request):
        name = request.custom_id
        async with self.solitude.sending(request.alone):
            self.asked[name] += 1
            self.sending.add(name)
            try:
                await asyncio.sleep(0)
                self.company[name] = self.sending - {name}
                if name in self.killers:
                    self.died.set()
                if self.died.is_set():
                    await asyncio.Event().wait()
            finally:
                self.sending.discard(name)
        assert not request.hedge or request.alone is None
        return Answered(Reply(200, ANSWER, 0.1), Course("w:1", 1, 0.0, 0.1))


@pytest.fixture
def ledger(valkey):
    return Ledger(valkey)


@pytest.fixture
def storage(tmp_path):
    return Storage(str(tmp_path))


@pytest.fixture
async def batch(redis_url, storage, ledger, monkeypatch):
    """One shard of all lines."""
    monkeypatch.setattr("dispatcher.batches.plan.cut", lambda total, _: [total])
    rows = (
        {
            "custom_id": f"c{n}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "m", "prompt": "a"},
        }
        for n in range(LINES)
    )
    source = io.BytesIO(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    record = prepare(storage, source, name="in", options=Options(), now_s=await ledger.now())
    connection = connect_sync(redis_url)
    await publish(ledger, connection, storage.files(record.id))
    connection.close()
    return record.id


@pytest.fixture
def runner(storage, ledger):
    def make(attempts, owner):
        return ShardRunner(
            storage, ledger, Room(), attempts, owner=owner, part_lines=256, part_age_s=60.0, hedge=True
        )

    return make


async def claim_and_die(runner, batch, attempts, owner):
    """One dispatcher's life with the shard: its end, or None when it died."""
    attempts.died.clear()
    run = asyncio.create_task(runner(attempts, owner).run(batch, 0, 1))
    death = asyncio.create_task(attempts.died.wait())
    await asyncio.wait([run, death], return_when=asyncio.FIRST_COMPLETED)
    death.cancel()
    if run.done():
        return run.result()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    return None


async def until_it_ends(runner, batch, attempts):
    """How often it died before."""
    deaths = 0
    while (end := await claim_and_die(runner, batch, attempts, f"d{deaths}")) is None:
        deaths += 1
    assert end is ShardEnd.BATCH_DONE
    return deaths


def results(storage, batch):
    entries = list(shard_entries(storage.files(batch), 0))
    assert len({entry.line for entry in entries}) == len(entries)
    return entries


async def test_a_line_that_kills_ends_as_an_error_and_the_others_are_answered(runner, ledger, storage, batch):
    deaths = await until_it_ends(runner, batch, Deadly({"c17"}))
    entries = results(storage, batch)
    bad = [json.loads(entry.record) for entry in entries if not entry.ok]
    assert [(line["custom_id"], line["error"]["code"]) for line in bad] == [("c17", POISON)]
    assert len(entries) == LINES
    entry = await ledger.entry(batch)
    assert (entry.completed, entry.failed, entry.shards_done) == (LINES - 1, 1, 1)
    assert CAREFUL_AFTER + LONE_DEATHS <= deaths <= CAREFUL_AFTER + 6 + LONE_DEATHS


async def test_several_lines_that_kill_are_all_found(runner, storage, batch):
    killers = {"c3", "c4", "c30", "c39"}
    attempts = Deadly(killers)
    await until_it_ends(runner, batch, attempts)
    entries = results(storage, batch)
    assert {json.loads(entry.record)["custom_id"] for entry in entries if not entry.ok} == killers
    assert attempts.company["c30"] == set()


async def test_a_claim_that_is_handed_back_makes_no_shard_careful(runner, ledger, batch):
    held = []
    attempts = Deadly({"c0"})
    for number in range(CAREFUL_AFTER + 1):
        attempts.died.clear()
        task = asyncio.create_task(runner(attempts, f"d{number}").run(batch, 0, 1, None, held.append))
        await attempts.died.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await ledger.hand_back(held[-1], f"d{number}")
    assert [claim.past.died for claim in held] == [0] * (CAREFUL_AFTER + 1)


async def test_a_group_is_noted_before_it_is_sent_however_long_redis_is_away(
    runner, ledger, batch, monkeypatch
):
    for number in range(CAREFUL_AFTER + 1):
        await ledger.claim(batch, 0, f"d{number}")
    attempts, plain, refused = Deadly(set()), ledger.note_group, []

    async def away_at_first(claim, owner, group):
        if len(refused) < 2:
            refused.append(dict(attempts.asked))
            raise StoreUnavailable("away")
        await plain(claim, owner, group)

    monkeypatch.setattr(ledger, "note_group", away_at_first)
    monkeypatch.setattr("dispatcher.keeper._PAUSE_S", (0.001, 0.002))
    assert await runner(attempts, "last").run(batch, 0, 1) is ShardEnd.BATCH_DONE
    assert refused == [{}, {}]
    assert set(attempts.asked.values()) == {1}


async def test_a_careful_claim_that_was_fenced_leaves_the_shard_alone(runner, ledger, storage, batch):
    for number in range(CAREFUL_AFTER + 1):
        await ledger.claim(batch, 0, f"d{number}")
    attempts, taken = Deadly(set()), []
    plain = attempts.run

    async def claimed_meanwhile(request):
        answer = await plain(request)
        if not taken:
            taken.append(await ledger.claim(batch, 0, "new"))
        return answer

    attempts.run = claimed_meanwhile
    assert await runner(attempts, "slow").run(batch, 0, 1) is ShardEnd.FENCED
    assert all(entry.ok for entry in results(storage, batch))


async def test_a_line_whose_claim_was_fenced_before_it_was_sent_alone_gets_no_result(
    runner, ledger, storage, batch
):
    for number in range(CAREFUL_AFTER):
        await ledger.claim(batch, 0, f"d{number}")
    await ledger.note_group(await ledger.claim(batch, 0, "last"), "last", range(5, 6))
    attempts = Deadly(set())
    plain = attempts.run

    async def claimed_just_before(request):
        assert request.alone is not None
        await ledger.claim(batch, 0, "new")
        return await plain(request)

    attempts.run = claimed_just_before
    assert await runner(attempts, "slow").run(batch, 0, 1) is ShardEnd.FENCED
    assert (results(storage, batch), attempts.asked) == ([], Counter())


async def test_a_group_is_durable_before_the_next_is_noted(runner, ledger, storage, batch, monkeypatch):
    for number in range(CAREFUL_AFTER + 1):
        await ledger.claim(batch, 0, f"d{number}")
    attempts, plain, durable, sent = Deadly(set()), ledger.note_group, [], []

    async def note_group(claim, owner, group):
        durable.append(len(results(storage, batch)))
        sent.append(attempts.asked.total())
        await plain(claim, owner, group)

    monkeypatch.setattr(ledger, "note_group", note_group)
    assert await runner(attempts, "last").run(batch, 0, 1) is ShardEnd.BATCH_DONE
    assert durable == sent == [0, 20, 30, 35, 38, 39]
