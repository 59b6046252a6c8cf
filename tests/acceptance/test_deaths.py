"""Dispatchers that die: the line that kills them is found and ended, and what is handed back is no death."""

from __future__ import annotations

import pytest

from dispatcher.batches.plan import open_plan
from dispatcher.batches.poison import CAREFUL_AFTER, LONE_DEATHS, Past
from dispatcher.shard import POISON
from tests.acceptance.conftest import row, rows
from tests.acceptance.deadly_dispatcher import STATUS
from workers import keys

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(120)]


async def test_a_line_that_kills_its_dispatcher_alone_and_again_ends_as_an_error(rig):
    await rig.engine()
    rig.monitor()
    batch = await rig.submit([*rows(7), row("killer", text="killer")])
    planned = open_plan(rig.storage.files(batch)).shard(0)
    [place] = [position for position, request in enumerate(planned) if request.line == 8]
    for _ in range(CAREFUL_AFTER):
        await rig.ledger.claim(batch, 0, "dead")
    for _ in range(LONE_DEATHS - 1):
        await rig.ledger.note_group(await rig.ledger.claim(batch, 0, "dead"), "dead", range(place, place + 1))
    await rig.ready()
    deadly = rig.dispatcher("deadly", module="tests.acceptance.deadly_dispatcher")
    assert await rig.gone(deadly) == STATUS
    rig.let_claims_run_out("deadly")
    rig.dispatcher("next", module="tests.acceptance.deadly_dispatcher")
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", [f"c{number}" for number in range(7)])
    assert [(line["custom_id"], line["error"]["code"]) for line in results.errors] == [("killer", POISON)]


async def test_a_shard_that_a_dispatcher_hands_back_has_no_claim_that_died(rig):
    await rig.engine(tokens_per_s=1.0)
    rig.monitor()
    first = rig.dispatcher("first", drain_timeout_s=0)
    batch = await rig.submit(rows(4, tokens=1000))
    await rig.until(lambda: rig.sent, "a line is under way")
    first.terminate()
    assert await rig.gone(first) == 0
    text = await rig.ledger.client.hget(keys.BATCH_SHARDS.of(batch), "0")
    assert "state=open" in text
    claim = await rig.ledger.claim(batch, 0, "next")
    assert claim.past == Past()
