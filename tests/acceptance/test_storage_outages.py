"""Whole installations on a bucket that refuses, or on a full disk: nothing is lost, and the batch says so."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dispatcher.batches.storage import Storage
from forebay import Forebay
from tests.acceptance.conftest import Rig, rows
from tests.buckets import S3, s3_for_tests
from tests.small_disks import SmallDisk, small_disk

pytestmark = pytest.mark.acceptance

LINES = 120


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    with s3_for_tests(monkeypatch) as server:
        yield server


def answered(forebay: Forebay, batch: str, folder: Path) -> list[str]:
    saved = forebay.save_results(batch, folder / "out.jsonl")
    assert saved.errors is None
    return [json.loads(line)["custom_id"] for line in saved.output.read_bytes().splitlines()]


async def test_a_batch_in_a_bucket_survives_a_killed_dispatcher_and_a_bucket_that_refuses(rig: Rig, s3: S3):
    rig.storage = Storage(f"s3://{s3.bucket}/prefix")
    for _ in range(2):
        await rig.engine(slots=8, tokens_per_s=100.0)
    rig.monitor()
    killed = rig.dispatcher("killed", part_lines=4, lease_ttl_s=2)
    (rig.folder / "in.jsonl").write_text("".join(f"{line}\n" for line in rows(LINES, tokens=5)))
    forebay = await asyncio.to_thread(Forebay, rig.redis_url, rig.storage.url)
    batch = (await asyncio.to_thread(forebay.submit, rig.folder / "in.jsonl")).id
    await rig.some_done(batch, 10)
    killed.kill()
    killed.wait()
    rig.let_claims_run_out("killed")
    next_one = rig.dispatcher("next", part_lines=4)
    with s3.refusing("slow", "PUT"):

        async def trouble() -> bool:
            return "results cannot be stored" in ((await rig.entry(batch)).trouble or "")

        await rig.until(trouble, "the batch says that results cannot be stored")
        shown = await asyncio.to_thread(forebay.status, batch)
        assert "next" in (shown.forebay.trouble or "")
    await rig.ended(batch)
    assert (await asyncio.to_thread(forebay.status, batch)).forebay.trouble is None
    names = await asyncio.to_thread(answered, forebay, batch, rig.folder)
    assert names == [f"c{number}" for number in range(LINES)]
    assert next_one.poll() is None
    await asyncio.to_thread(forebay.close)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "small", "2m") as mounted:
        yield mounted


async def test_a_batch_on_a_full_disk_waits_says_why_and_goes_on_when_there_is_room(
    rig: Rig, disk: SmallDisk
):
    rig.storage = Storage(str(disk.folder))
    await rig.engine(slots=8, tokens_per_s=100.0)
    rig.monitor()
    dispatcher = rig.dispatcher("d1", part_lines=4)
    batch = await rig.submit(rows(LINES, tokens=5), slots=8)
    await rig.some_done(batch, 8)
    disk.fill()

    async def trouble() -> bool:
        return "No space left" in ((await rig.entry(batch)).trouble or "")

    await rig.until(trouble, "the batch says that the disk is full")
    disk.free()
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", [f"c{number}" for number in range(LINES)])
    assert (len(set(rig.sent)), dispatcher.poll()) == (LINES, None)
    assert len(rig.sent) == LINES  # what waited for the disk was not sent again
