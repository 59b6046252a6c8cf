"""What lines may be held, who goes on when some are answered, and that nothing is counted for ever."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.batches.plan import PlannedRequest
from dispatcher.held_lines import HeldLines

HIGH, LOW = 0, 2


def planned(length, model="a"):
    return PlannedRequest(1, 0, length, model, 1, None, 1, 0)


def hold(held, length, model="a", urgency=LOW):
    """Hold a line; gives what ends it."""
    answered = asyncio.Event()
    held.hold(planned(length, model), urgency, until=asyncio.create_task(answered.wait()))
    return answered


@pytest.fixture
async def held():
    return HeldLines(160)


async def test_below_the_bound_every_model_has_room(held):
    hold(held, 159)
    assert held.with_room(["a", "b"], LOW) == ["a", "b"]


async def test_above_it_each_model_and_urgency_still_has_a_portion(held):
    hold(held, 160)
    assert list(held.with_room(["a", "b"], LOW)) == ["b"]
    assert list(held.with_room(["a", "b"], HIGH)) == ["a", "b"]
    hold(held, held.portion - 1, "b")
    assert list(held.with_room(["a", "b"], LOW)) == ["b"]
    hold(held, 1, "b")
    assert list(held.with_room(["a", "b"], LOW)) == []


async def test_a_line_larger_than_the_bound_goes_when_nothing_is_held(held):
    assert held.with_room(["a"], LOW)
    answered = hold(held, 1000)
    assert not held.with_room(["a"], LOW)
    answered.set()
    await held.freed(LOW)
    assert held.with_room(["a"], LOW)


async def test_what_is_read_counts_until_it_is_held_or_has_failed(held):
    with held.reading([planned(100), planned(100)], LOW):
        assert held.bytes == 200
        answered = hold(held, 100)
    assert held.bytes == 100
    with pytest.raises(OSError, match="gone"), held.reading([planned(50)], LOW):
        raise OSError("gone")
    assert held.bytes == 100
    answered.set()
    await held.freed(LOW)
    assert held.bytes == 0


async def test_a_line_called_off_before_its_first_step_is_held_no_more(held):
    task = asyncio.create_task(asyncio.sleep(0))
    held.hold(planned(160), LOW, until=task)
    task.cancel()
    await held.freed(LOW)
    assert held.bytes == 0


async def test_the_more_urgent_are_woken_first_and_nobody_waits_on(held):
    answered = hold(held, 160)
    woken = []

    async def wait(urgency):
        await held.freed(urgency)
        woken.append(urgency)

    waiting = [asyncio.create_task(wait(urgency)) for urgency in (LOW, HIGH, LOW)]
    called_off = asyncio.create_task(held.freed(HIGH))
    await asyncio.sleep(0)
    called_off.cancel()
    answered.set()
    async with asyncio.timeout(30):
        await asyncio.gather(*waiting)
    assert woken == [HIGH, LOW, LOW]
