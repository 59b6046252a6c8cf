"""Results that vanish from the storage before the end: their lines are run again, and nothing else is."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from dispatcher.batches.errors import ShardsLeftError
from dispatcher.batches.ledger import Ledger, Tally
from dispatcher.batches.parts import Entry, PartWriter
from dispatcher.batches.plan import open_plan
from dispatcher.batches.results import Usage
from dispatcher.batches.storage import Storage
from dispatcher.finaliser import Finaliser
from forebay.submission import Options, prepare, publish
from workers.connection import connect_sync

pytestmark = pytest.mark.integration

LINES = 12


@pytest.fixture
def storage(tmp_path):
    return Storage(str(tmp_path))


@pytest.fixture
def ledger(valkey):
    return Ledger(valkey)


@pytest.fixture
def finaliser(storage, ledger):
    return Finaliser(storage, ledger)


@pytest.fixture
async def batch(storage, ledger, redis_url):
    """A batch of several shards in progress, of which none is done."""
    request = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 5}}
    lines = [json.dumps({"custom_id": f"c{number}"} | request) for number in range(LINES)]
    source = io.BytesIO("\n".join(lines).encode())
    record = prepare(storage, source, name="in", options=Options(), now_s=await ledger.now(), slots=1)
    connection = connect_sync(redis_url)
    await publish(ledger, connection, storage.files(record.id))
    connection.close()
    return record.id


async def run(storage, ledger, batch, shard):
    """What a dispatcher does with a shard; returns how many lines it had to send."""
    claim = await ledger.claim(batch, shard, "test")
    files = storage.files(batch)
    planned = open_plan(files).shard(shard)
    writer = PartWriter(files, shard, f"{claim.number}.test")
    for request in planned:
        writer.add(Entry(request.line, True, Usage(1, 2), json.dumps({"line": request.line}).encode()))
    writer.flush()
    tally = Tally(completed=len(planned), prompt_tokens=len(planned), completion_tokens=2 * len(planned))
    return await ledger.progress(claim, "test", tally, done=True)


async def test_shards_whose_results_vanished_are_run_again_and_then_the_batch_ends(
    finaliser, storage, ledger, batch
):
    shards = (await ledger.entry(batch)).shards
    assert shards > 1
    for shard in range(shards):
        await run(storage, ledger, batch, shard)
    [lost] = (Path(storage.url) / "batches" / batch / "parts" / "1").iterdir()
    lost.unlink()
    for _ in range(2):  # the second finds it as the first left it
        with pytest.raises(ShardsLeftError) as left:
            await finaliser.run(batch)
        assert left.value.shards == (1,)
        entry = await ledger.entry(batch)
        assert (entry.status, entry.shards_done) == ("in_progress", shards - 1)
    standing = await run(storage, ledger, batch, 1)
    assert standing.all_done
    await finaliser.run(batch)
    entry = await ledger.entry(batch)
    assert (entry.status, entry.completed, entry.failed, entry.prompt_tokens) == (
        "completed",
        LINES,
        0,
        LINES,
    )
    assert entry.fields["trouble"] == ""


async def test_a_batch_is_not_finalised_before_all_its_shards_are_done(finaliser, storage, ledger, batch):
    await run(storage, ledger, batch, 0)
    with pytest.raises(ShardsLeftError) as left:
        await finaliser.run(batch)
    entry = await ledger.entry(batch)
    assert left.value.shards == tuple(range(1, entry.shards))
    assert entry.status == "in_progress"
    assert not storage.files(batch).exists("output.jsonl")


async def test_a_batch_that_has_ended_is_not_opened_again(finaliser, storage, ledger, batch):
    for shard in range((await ledger.entry(batch)).shards):
        await run(storage, ledger, batch, shard)
    await finaliser.run(batch)
    await ledger.reopen(batch, [0])
    entry = await ledger.entry(batch)
    assert (entry.status, entry.shards_done) == ("completed", entry.shards)
