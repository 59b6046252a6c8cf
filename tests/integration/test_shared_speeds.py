"""Dispatchers tell each other how fast workers are, through a real Redis."""

from __future__ import annotations

import pytest

from dispatcher.shared_speeds import TTL_S, SharedSpeeds
from dispatcher.speeds import Speeds
from tests.fleets import worker
from workers import keys

pytestmark = pytest.mark.integration


async def now_of(valkey) -> float:
    seconds, micros = await valkey.time()
    return seconds + micros / 1e6


async def test_what_one_dispatcher_saw_another_knows_until_it_sees_itself(valkey):
    one, other = Speeds(), Speeds()
    one.saw("a:1", 100, 2.0)
    await SharedSpeeds(valkey, one).tell()
    assert not other.has_seen("a:1")
    await SharedSpeeds(valkey, other).listen(await now_of(valkey))
    assert other.has_seen("a:1")
    assert other.of(worker("a:1", load=None)) == 50.0
    other.saw("a:1", 100, 1.0)
    assert other.of(worker("a:1", load=None)) == 100.0
    assert other.news(0.0) == {"a:1": 100.0}  # what it only heard of it does not tell on


async def test_what_was_told_long_ago_is_not_believed_and_goes(valkey):
    one, other = Speeds(), Speeds()
    one.saw("a:1", 100, 2.0)
    await SharedSpeeds(valkey, one).tell()
    assert 0 < await valkey.ttl(keys.SPEEDS.of()) <= TTL_S
    await SharedSpeeds(valkey, other).listen(await now_of(valkey) + TTL_S + 1)
    assert other.of(worker("a:1", load=None)) is None


async def test_what_was_told_long_ago_goes_while_others_tell(valkey):
    long_ago = await now_of(valkey) - TTL_S - 1
    old = {f"gone:{number}": f"rate=5 at={long_ago:.6f}" for number in range(20)}
    await valkey.hset(keys.SPEEDS.of(), mapping=old | {"what": "else"})
    for number in range(200):
        speeds = Speeds()
        speeds.saw(f"a:{number % 4}", 100, 2.0)
        await SharedSpeeds(valkey, speeds).tell()
    assert set(await valkey.hkeys(keys.SPEEDS.of())) == {f"a:{number}" for number in range(4)}


async def test_only_news_is_told(valkey):
    speeds = Speeds()
    shared_speeds = SharedSpeeds(valkey, speeds)
    await shared_speeds.tell()
    assert not await valkey.exists(keys.SPEEDS.of())
    speeds.saw("a:1", 100, 2.0)
    await shared_speeds.tell()
    await valkey.delete(keys.SPEEDS.of())
    speeds.saw("a:1", 101, 2.0)
    await shared_speeds.tell()
    assert not await valkey.exists(keys.SPEEDS.of())
    speeds.saw("a:1", 1000, 2.0)
    await shared_speeds.tell()
    assert await valkey.exists(keys.SPEEDS.of())


async def test_what_is_no_speed_is_not_believed_whoever_wrote_it(valkey):
    now_s = await now_of(valkey)
    rates = ("0", "-1", "1e999", "1.2.3", "e", "1 2")
    await valkey.hset(
        keys.SPEEDS.of(), mapping={f"w:{n}": f"rate={rate} at={now_s}" for n, rate in enumerate(rates)}
    )
    speeds = Speeds()
    await SharedSpeeds(valkey, speeds).listen(now_s)
    assert [speeds.has_seen(f"w:{n}") for n in range(len(rates))] == [False] * len(rates)


@pytest.mark.parametrize(
    "spoil",
    [lambda valkey, key: valkey.set(key, "fast"), lambda valkey, key: valkey.hset(key, "a:1", b"\xff")],
    ids=["another type", "no text"],
)
async def test_a_key_that_is_none_of_ours_is_not_heard(valkey, spoil):
    await spoil(valkey, keys.SPEEDS.of())
    speeds = Speeds()
    await SharedSpeeds(valkey, speeds).listen(await now_of(valkey))
    assert not speeds.has_seen("a:1")
