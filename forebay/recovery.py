"""How a batch comes back of which Redis has lost something: its jobs, or all of it. The files alone suffice.

What is durable is not sent again: dispatchers skip the lines that have results, as after any crash. How a new
file becomes a batch is ``submission``'s subject.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from anyio import to_thread

from dispatcher import queues
from dispatcher.batches.errors import DamagedFileError, StorageMissingError
from dispatcher.batches.ledger import Entry, Ledger, status_of
from dispatcher.batches.plan import open_plan
from dispatcher.batches.record import BatchRecord, BatchStatus
from dispatcher.batches.storage import RECORD, BatchFiles, Storage
from forebay import submission
from forebay.errors import UnknownBatch
from workers.connection import SyncRedis


@dataclass(frozen=True, slots=True)
class Resumed:
    """A batch that was resumed: ``record`` is how it stands now.

    ``known``: Redis knew it before. ``queued``: how many of its jobs were put on their queue, 0 when nothing
    was missing. ``workers``: how many are registered; without any, nothing is sent.
    """

    record: BatchRecord
    known: bool
    queued: int
    workers: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Batches that have files and that Redis does not know: the records, newest first.

    ``damaged``: what is wrong with the records that cannot be read, by id; each names its batch.
    """

    records: list[BatchRecord]
    damaged: list[DamagedFileError]


async def resume(
    ledger: Ledger, connection: SyncRedis, files: BatchFiles, *, window_s: float | None
) -> tuple[bool, int]:
    """Make a batch known if it is not, and queue what is queued nowhere; gives ``known`` and ``queued``.

    ``window_s`` gives a batch that Redis does not know a new deadline, so many seconds from now; None leaves
    it. Nothing happens to a batch that has ended. Raises UnknownBatch, StoreUnavailable, StorageError,
    DamagedFileError, UnreadableRecordError.
    """
    entry = await ledger.entry(files.batch_id)
    if entry is not None:
        return True, await _repair(ledger, connection, files, entry)
    record = await to_thread.run_sync(_record, files)
    if record.status.final:
        await _remember(ledger, files, record)
        return False, 0
    await submission.publish(ledger, connection, files, window_s=window_s)
    entry = await ledger.entry(files.batch_id)
    return False, entry.shards if entry else 0


async def forgotten(ledger: Ledger, storage: Storage) -> Lost:
    """The batches that have files and that Redis does not know. Raises StoreUnavailable, StorageError."""
    ids = await to_thread.run_sync(storage.batch_ids)
    unknown = set(ids) - (await ledger.entries(ids)).keys()
    return await to_thread.run_sync(_lost, [storage.files(batch_id) for batch_id in sorted(unknown)])


def _record(files: BatchFiles) -> BatchRecord:
    try:
        return submission.read_record(files)
    except StorageMissingError as error:
        raise UnknownBatch(
            f"no batch {files.batch_id} is known, nor are its files in this storage; see: forebay batches, "
            "and forebay resume without an id"
        ) from error


def _lost(several: Iterable[BatchFiles]) -> Lost:
    records: list[BatchRecord] = []
    damaged: list[DamagedFileError] = []
    for files in several:
        # Whoever is being submitted right now has files before it has a record.
        if files.exists(RECORD):
            try:
                records.append(submission.read_record(files))
            except DamagedFileError as error:
                damaged.append(error)
    records.sort(key=lambda record: record.created_at, reverse=True)
    return Lost(records, damaged)


async def _repair(ledger: Ledger, connection: SyncRedis, files: BatchFiles, entry: Entry) -> int:
    status = status_of(entry)
    if status.final:
        return 0
    if status is BatchStatus.VALIDATING:  # whoever submitted it died on the way
        await submission.publish(ledger, connection, files)
        return entry.shards
    left: list[int] = []
    if status is BatchStatus.IN_PROGRESS:
        done = await ledger.shards_done(entry.id)
        left = [shard for shard in range(entry.shards) if shard not in done]
    if left:
        return await to_thread.run_sync(queues.requeue_lost, connection, entry.queue, entry.id, left)
    return int(await to_thread.run_sync(queues.requeue_lost_finalise, connection, entry.queue, entry.id))


async def _remember(ledger: Ledger, files: BatchFiles, record: BatchRecord) -> None:
    """Make a batch known that had ended: its result files are there."""
    plan = await to_thread.run_sync(open_plan, files)
    await ledger.open(record.id, float(record.created_at), submission.ended_fields(record, plan))
