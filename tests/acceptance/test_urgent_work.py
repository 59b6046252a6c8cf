"""Urgent work beside a batch that fills the fleet: it goes first, all of it, not one request at a time."""

from __future__ import annotations

import pytest

from dispatcher import queues
from tests.acceptance.conftest import MODEL, row

pytestmark = pytest.mark.acceptance

SLOTS = 4


@pytest.fixture
async def beside(rig):
    """A batch on the default queue that keeps a slow engine busy, and one dispatcher."""
    await rig.engine(slots=SLOTS, tokens_per_s=100.0)
    rig.monitor()
    rig.dispatcher("d1")
    lines = [row(f"slow{number}", tokens=20, text=f"slow {number}") for number in range(300)]
    batch = await rig.submit(lines, slots=SLOTS)
    await rig.some_done(batch, 3 * SLOTS)
    yield batch
    await rig.cancel(batch)


def sent_of(rig, name):
    return [place for place, prompt in enumerate(rig.sent) if f"{name} " in prompt]


def sent_between(rig, name):
    """How many other requests the engine took in from the first of these to the last."""
    places = sent_of(rig, name)
    return places[-1] + 1 - places[0] - len(places)


async def test_urgent_inline_requests_run_at_the_same_time(rig, beside):
    jobs = [
        queues.enqueue_request(
            rig.rq_redis,
            "high",
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": f"urgent {number}"}],
                "max_tokens": 10,
                "ignore_eos": True,
            },
        )
        for number in range(16)
    ]
    await rig.until(lambda: len(sent_of(rig, "urgent")) == len(jobs), "all urgent requests are sent")
    # One at a time, each would be followed by lines of the batch in all other slots.
    assert sent_between(rig, "urgent") <= len(jobs)


async def test_the_lines_of_an_urgent_batch_go_before_those_that_wait(rig, beside):
    before = len(rig.sent)
    lines = [row(f"urgent{number}", tokens=5, text=f"urgent {number}") for number in range(40)]
    urgent = await rig.submit(lines, slots=SLOTS, queue="high")
    status, results = await rig.ended(urgent)
    assert (status, len(results.output)) == ("completed", len(lines))
    assert sent_between(rig, "urgent") <= len(lines) / 2
    assert sent_of(rig, "urgent")[-1] - before <= 2 * len(lines)
