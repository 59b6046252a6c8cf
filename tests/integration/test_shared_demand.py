"""Dispatchers tell each other what waits in vain, through a real Redis."""

from __future__ import annotations

import pytest

from dispatcher.demand import Demand
from dispatcher.shared_demand import MOST_MODELS, SharedDemand
from workers import keys

pytestmark = pytest.mark.integration

URGENT = Demand("llama", 0, 3)
PATIENT = Demand(None, 1, 40, 12.5)


@pytest.fixture
def one(valkey):
    return SharedDemand(valkey, "one")


@pytest.fixture
def other(valkey):
    return SharedDemand(valkey, "other")


async def test_what_waits_at_one_is_heard_by_the_others_and_not_by_itself(one, other):
    assert await one.exchange([URGENT, PATIENT], 60) == []
    assert await other.exchange([], 60) == [(URGENT, PATIENT)]
    assert await other.exchange([PATIENT], 60) == [(URGENT, PATIENT)]
    assert await one.exchange([URGENT], 60) == [(PATIENT,)]


async def test_what_waits_no_more_is_not_heard_any_more(one, other):
    await one.exchange([URGENT], 60)
    await one.exchange([], 60)
    assert await other.exchange([], 60) == []


async def test_what_a_dead_dispatcher_told_is_forgotten(one, other, valkey):
    await one.exchange([URGENT], 0)
    assert await other.exchange([], 60) == []
    assert not await valkey.exists(keys.DEMAND.of())


async def test_models_of_which_there_are_too_many_are_left_out(one, other):
    await one.exchange([Demand(f"m{number}", 0, 1) for number in range(MOST_MODELS + 3)], 60)
    [heard] = await other.exchange([], 60)
    assert [demand.model for demand in heard] == [f"m{number}" for number in range(MOST_MODELS)]


@pytest.mark.parametrize(
    "text",
    ["", "until=9e9", "until=x []", "until=99999999999 {", "until=99999999999 [[1,2]]",
     'until=99999999999 [["m",0,-4,0]]', 'until=99999999999 [["m",0,1,1e999]]'],
)  # fmt: skip
async def test_what_others_wrote_there_is_not_heeded(one, valkey, text):
    await valkey.hset(keys.DEMAND.of(), "somebody", text)
    assert await one.exchange([URGENT], 60) == []
    assert await one.exchange([], 60) == []


async def test_a_key_of_another_type_is_left_alone(one, valkey):
    await valkey.set(keys.DEMAND.of(), "text")
    assert await one.exchange([URGENT], 60) == []
