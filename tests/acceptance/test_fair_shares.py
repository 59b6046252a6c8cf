"""Batches that share a fleet: a small one does not wait for a large one, and shares count."""

from __future__ import annotations

import pytest

from tests.acceptance.conftest import row

pytestmark = pytest.mark.acceptance


def lines_of(name, count, *, tokens):
    return [row(f"{name}{number}", tokens=tokens, text=f"{name} {number}") for number in range(count)]


def sent_of(rig, name):
    """The places of a batch's requests in the order in which the engine took them in."""
    return [place for place, prompt in enumerate(rig.sent) if f"{name} " in prompt]


async def test_a_small_batch_behind_a_large_one_ends_when_about_half_of_the_work_since_was_its_own(rig):
    """By turns of shards alone, its cheap lines would wait in the dispatcher for dearer ones of the other."""
    await rig.engine(slots=8, tokens_per_s=4000.0)
    rig.monitor()
    rig.dispatcher("d1")
    large = await rig.submit(lines_of("large", 500, tokens=12), slots=128)
    await rig.some_done(large, 30)
    small = await rig.submit(lines_of("small", 40, tokens=4), slots=16)
    before = len(rig.sent)
    status, results = await rig.ended(small)
    assert (status, len(results.output)) == ("completed", 40)
    beside = sent_of(rig, "small")[-1] + 1 - before - 40
    # Half of the work would be some 15 lines; the others were open or waiting here when it came.
    assert beside < 250
    await rig.cancel(large)
    await rig.ended(large)


async def test_a_batch_of_a_threefold_share_is_sent_three_times_as_many_lines(rig):
    await rig.engine(slots=8, tokens_per_s=2000.0)
    one = await rig.submit(lines_of("one", 200, tokens=4), slots=64)
    three = await rig.submit(lines_of("three", 200, tokens=4), slots=64, share=3.0)
    rig.monitor()
    rig.dispatcher("d1")
    status, _ = await rig.ended(three)
    assert status == "completed"
    beside = sum(place < sent_of(rig, "three")[-1] for place in sent_of(rig, "one"))
    assert 40 <= beside <= 110
    assert (await rig.ended(one))[0] == "completed"
