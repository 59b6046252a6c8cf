"""Dispatchers tell each other how fast workers are, through a real Redis."""

from __future__ import annotations

import pytest

from dispatcher.hearsay import TTL_S, Hearsay
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
    await Hearsay(valkey, one).tell()
    assert not other.has_seen("a:1")
    await Hearsay(valkey, other).listen(await now_of(valkey))
    assert other.has_seen("a:1")
    assert other.of(worker("a:1", load=None)) == 50.0
    other.saw("a:1", 100, 1.0)
    assert other.of(worker("a:1", load=None)) == 100.0
    assert other.news() == {"a:1": 100.0}  # what it only heard of it does not tell on


async def test_what_was_told_long_ago_is_not_believed_and_goes(valkey):
    one, other = Speeds(), Speeds()
    one.saw("a:1", 100, 2.0)
    await Hearsay(valkey, one).tell()
    assert 0 < await valkey.ttl(keys.SPEEDS.of()) <= TTL_S
    await Hearsay(valkey, other).listen(await now_of(valkey) + TTL_S + 1)
    assert other.of(worker("a:1", load=None)) is None


async def test_only_news_is_told(valkey):
    speeds = Speeds()
    hearsay = Hearsay(valkey, speeds)
    await hearsay.tell()
    assert not await valkey.exists(keys.SPEEDS.of())
    speeds.saw("a:1", 100, 2.0)
    await hearsay.tell()
    await valkey.delete(keys.SPEEDS.of())
    speeds.saw("a:1", 101, 2.0)
    await hearsay.tell()
    assert not await valkey.exists(keys.SPEEDS.of())
    speeds.saw("a:1", 1000, 2.0)
    await hearsay.tell()
    assert await valkey.exists(keys.SPEEDS.of())
