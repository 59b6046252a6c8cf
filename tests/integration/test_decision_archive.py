"""Decision records in Redis, real and fake: bounded by count and age, found by what a person knows."""

from __future__ import annotations

import pytest

from dispatcher.archive import MOST_ATTEMPTS, Archive
from dispatcher.records import record_of
from tests.sightings import sighting
from workers import keys

pytestmark = pytest.mark.integration


@pytest.fixture(params=["valkey", "fake_redis"])
def client(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
async def now_s(client):
    seconds, micros = await client.time()
    return float(seconds) + float(micros) / 1e6


def record(number, at, *, attempt=1, batch="batch_1", name=None):
    seen = sighting(
        at,
        request_id=f"r{number}",
        custom_id=f"c{number}" if name is None else name,
        batch_id=batch,
        attempt=attempt,
    )
    return record_of(seen, "d1")


async def keys_of(client):
    return {key async for key in client.scan_iter(match=keys.DECISION.of("*"))}


async def test_a_record_comes_back_as_it_was_kept(client, now_s):
    archive, kept = Archive(client), record(1, now_s)
    await archive.keep([kept])
    assert await archive.of_requests(["r1", "r2"]) == [[kept], []]
    assert await archive.find("c1") == [[kept]]
    assert await archive.requests() == ["r1"]


async def test_keeping_again_changes_nothing(client, now_s):
    archive, records = Archive(client), [record(1, now_s + number, attempt=number) for number in (1, 2)]
    for _ in range(3):
        await archive.keep(records)
    assert await archive.of_requests(["r1"]) == [records]


async def test_of_a_request_the_last_attempts_are_kept_in_their_order(client, now_s):
    archive = Archive(client)
    records = [record(1, now_s + number, attempt=number) for number in range(1, MOST_ATTEMPTS + 4)]
    await archive.keep(records[::-1])
    assert await archive.of_requests(["r1"]) == [records[-MOST_ATTEMPTS:]]


async def test_no_more_requests_than_that_are_kept_and_their_keys_go_too(client, now_s):
    archive = Archive(client, keep=3)
    for start in (0, 5):
        await archive.keep([record(number, now_s + number) for number in range(start, start + 5)])
    assert await archive.requests() == ["r7", "r8", "r9"]
    assert await keys_of(client) == {keys.DECISION.of(f"r{number}") for number in (7, 8, 9)}


async def test_a_request_seen_again_counts_as_new(client, now_s):
    archive = Archive(client, keep=2)
    await archive.keep([record(1, now_s), record(2, now_s + 1), record(1, now_s + 2, attempt=2)])
    await archive.keep([record(3, now_s + 3)])
    assert set(await archive.requests()) == {"r1", "r3"}


async def test_what_is_too_old_goes_with_the_next_that_is_kept(client, now_s):
    archive = Archive(client, ttl_s=60.0)
    await archive.keep([record(1, now_s - 30), record(2, now_s)])
    await Archive(client, ttl_s=20.0).keep([record(3, now_s)])
    assert await archive.requests() == ["r2", "r3"]
    assert keys.DECISION.of("r1") not in await keys_of(client)


async def test_every_key_of_a_request_ends_by_itself(client, now_s):
    await Archive(client, ttl_s=60.0).keep([record(1, now_s)])
    assert 0 < await client.ttl(keys.DECISION.of("r1")) <= 60


async def test_the_newest_of_several_requests_with_one_name_comes_first_and_a_batch_narrows_them(
    client, now_s
):
    archive = Archive(client)
    old, new = record(1, now_s, batch="batch_a", name="x"), record(2, now_s + 9, batch="batch_b", name="x")
    await archive.keep([new, old])
    assert await archive.find("x") == [[new], [old]]
    assert await archive.find("x", "batch_a") == [[old]]
    assert await archive.find("x", "batch_c") == []
    assert await archive.find("r1", "batch_b") == []


@pytest.mark.parametrize("name", ["a*", "[ab]", "a?c", "a|b", "back\\slash", "^a-b", "größe ↗", "*"])
async def test_a_name_means_itself_whatever_signs_it_has(client, now_s, name):
    archive = Archive(client)
    wanted = record(0, now_s, name=name)
    await archive.keep([wanted, record(1, now_s, name="abc"), record(2, now_s, name="b")])
    assert await archive.find(name) == [[wanted]]


async def test_nothing_is_found_where_nothing_was_kept(client):
    archive = Archive(client)
    assert await archive.find("c1") == []
    assert await archive.requests() == []


async def test_the_requests_of_one_batch_are_told_from_others(client, now_s):
    archive = Archive(client)
    await archive.keep(
        [record(1, now_s), record(2, now_s + 1, batch="batch_2"), record(3, now_s, batch=None)]
    )
    assert await archive.requests("batch_1") == ["r1"]
    assert await archive.requests() == ["r1", "r3", "r2"]
