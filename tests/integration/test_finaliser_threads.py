"""Batches that end leave room for those that run: parts become durable while files are made."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dispatcher import finaliser as module
from dispatcher.batches.ledger import Ledger
from dispatcher.batches.parts import Entry, done_lines
from dispatcher.batches.record import BatchRecord
from dispatcher.batches.results import Usage
from dispatcher.batches.storage import Storage
from dispatcher.finaliser import Finaliser
from dispatcher.keeper import Keeper

pytestmark = pytest.mark.integration

DEFAULT_THREADS = 3
LONGEST_S = 20.0
"""More than a part ever takes to be written: by then the test has failed."""


@pytest.fixture
def made(monkeypatch):
    """The making of files, which goes on until it is let go: whether it has begun, and its end."""
    begun, goes_on = threading.Semaphore(0), threading.Event()

    def make(*_args, **_how):
        begun.release()
        goes_on.wait(LONGEST_S)
        raise InterruptedError

    monkeypatch.setattr(module, "open_plan", lambda files: None)
    monkeypatch.setattr(module, "finalise", make)
    yield begun, goes_on
    goes_on.set()


@pytest.fixture
async def ledger(valkey):
    """Several batches are called off, and one is in progress."""
    ledger = Ledger(valkey)
    for number in range(DEFAULT_THREADS):
        record = BatchRecord(id=f"batch_{number}", created_at=1).to_json().decode()
        await ledger.open(f"batch_{number}", 1.0, {"status": "cancelling", "record": record})
    await ledger.open("batch_running", 1.0, {"status": "in_progress", "shards": "1"})
    return ledger


async def test_a_part_is_written_while_more_files_are_made_than_there_are_threads(tmp_path, ledger, made):
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(DEFAULT_THREADS))
    begun, goes_on = made
    storage = Storage(str(tmp_path))
    finaliser, files = Finaliser(storage, ledger), storage.files("batch_running")
    ends = [asyncio.create_task(finaliser.run(f"batch_{number}")) for number in range(DEFAULT_THREADS)]
    claim = await ledger.claim("batch_running", 0, "d1")
    for _ in range(2):
        while not begun.acquire(blocking=False):  # noqa: ASYNC110 - a thread has no event for us
            await asyncio.sleep(0.001)
    keeper = Keeper(files, ledger, claim, owner="d1", part_lines=1, part_age_s=1)
    keeper.add(Entry(1, True, Usage(1, 1), b"{}"), 1, late=False)
    keeper.close()
    async with asyncio.timeout(LONGEST_S / 2):
        await keeper.run()
    assert done_lines(files, 0) == {1: True}
    assert not any(end.done() for end in ends)
    goes_on.set()
    ended = await asyncio.gather(*ends, return_exceptions=True)
    assert {type(error) for error in ended} == {InterruptedError}
    finaliser.close()
