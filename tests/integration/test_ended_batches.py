"""Batches that have ended stay known, and cost next to nothing."""

from __future__ import annotations

import pytest

from dispatcher.batches.ended import LOOKS
from dispatcher.batches.ledger import SHARDS_STAY_S, Ledger, Tally
from workers import keys
from workers.errors import Fenced

pytestmark = pytest.mark.integration

ENDED = 1000
FIELDS = {"queue": "default", "total": "5", "completed": "2"}
NOW_S = 1000.0
ENDS = {"status": "completed", "completed_at": "900"}


@pytest.fixture
async def ledger(valkey):
    """A thousand batches have ended, and one is in progress."""
    async with valkey.pipeline(transaction=False) as pipeline:
        for number in range(ENDED):
            pipeline.hset(keys.BATCH.of(number), mapping=FIELDS | ENDS)
            pipeline.zadd(keys.BATCHES.of(), {str(number): number})
        await pipeline.execute()
    ledger = Ledger(valkey)
    await ledger.open("running", ENDED, FIELDS | {"status": "in_progress"})
    return ledger


@pytest.fixture
def asked(valkey):
    """How many batches were asked for since the last time."""

    async def asked():
        calls = (await valkey.info("commandstats")).get("cmdstat_hmget", {}).get("calls", 0)
        await valkey.config_resetstat()
        return calls

    return asked


@pytest.mark.parametrize(
    ("look", "found"),
    [
        (lambda ledger: ledger.lines_left("default"), 3),
        (lambda ledger: ledger.due_for_removal(NOW_S), []),
    ],
)
async def test_who_looks_again_does_not_ask_for_those_that_were_seen_ended(ledger, asked, look, found):
    await asked()
    for expected in (ENDED + 1, 1, 1):
        assert await look(ledger) == found
        assert await asked() == expected


async def test_mending_asks_only_for_those_that_were_not_seen_ended(ledger, asked):
    await asked()
    for expected in (ENDED + 1, 1):
        assert [entry.id for entry in await ledger.unfinished()] == ["running"]
        assert await asked() == expected


async def test_one_that_was_forgotten_and_is_resumed_is_seen_again(ledger):
    await ledger.unfinished()
    await ledger.forget("7")
    await ledger.unfinished()
    await ledger.open("7", 7, FIELDS | {"status": "in_progress"})
    assert [entry.id for entry in await ledger.unfinished()] == ["7", "running"]


async def test_one_that_has_just_ended_is_asked_for_still(ledger):
    """A failover may lose its end."""
    await ledger.move("running", "completed", among=["in_progress"])
    assert await ledger.unfinished() == []
    await ledger.set_fields("running", {"status": "finalizing"})
    assert [entry.id for entry in await ledger.unfinished()] == ["running"]


async def test_one_whose_end_redis_has_lost_is_seen_again_after_a_while(ledger):
    await ledger.unfinished()
    await ledger.set_fields("7", {"status": "finalizing"})
    looks = [[entry.id for entry in await ledger.unfinished()] for _ in range(LOOKS)]
    assert looks[0] == ["running"]
    assert looks[-1] == ["7", "running"]


async def test_what_is_known_of_shards_goes_a_day_after_the_end(ledger):
    shards = keys.BATCH_SHARDS.of("running")
    claim = await ledger.claim("running", 0, "d1")
    assert await ledger.move("running", "finalizing", among=["in_progress"]) == "finalizing"
    assert await ledger.move("running", "completed", among=["in_progress"]) == "finalizing"
    assert await ledger.client.ttl(shards) == -1
    await ledger.move("running", "completed", among=["finalizing"])
    assert SHARDS_STAY_S - 3600 < await ledger.client.ttl(shards) <= SHARDS_STAY_S
    assert (await ledger.progress(claim, "d1", Tally(completed=1), done=True)).status == "completed"
    assert SHARDS_STAY_S - 3600 < await ledger.client.ttl(shards) <= SHARDS_STAY_S


async def test_an_ended_batch_does_without_what_was_known_of_its_shards(ledger):
    claim = await ledger.claim("running", 0, "d1")
    await ledger.progress(claim, "d1", Tally(completed=5), done=True)
    await ledger.move("running", "completed", among=["in_progress"])
    before = await ledger.entry("running")
    await ledger.client.delete(keys.BATCH_SHARDS.of("running"))
    with pytest.raises(Fenced):
        await ledger.progress(claim, "d1", Tally(completed=4), done=False)
    assert not await ledger.hand_back(claim, "d1")
    assert await ledger.claim("running", 0, "d1") == "completed"
    assert not await ledger.left_open("running", 0)
    await ledger.reopen("running", [0])
    assert (await ledger.entry("running"), await ledger.shards_done("running")) == (before, set())
    assert not await ledger.client.exists(keys.BATCH_SHARDS.of("running"))


async def test_one_that_is_to_go_is_asked_for_until_it_goes(ledger):
    await ledger.set_fields("7", {"keep_s": "100", "completed_at": "950"})
    assert await ledger.due_for_removal(NOW_S) == []
    assert await ledger.due_for_removal(NOW_S + 50) == ["7"]
    assert await ledger.due_for_removal(NOW_S + 50) == ["7"]
