"""The end of a batch: its two files from the durable parts, then its final status. It may be run again.

How the files are made is `batches.finalise`'s subject.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import structlog

from dispatcher.batches.errors import MissingLinesError, ShardsLeftError
from dispatcher.batches.finalise import Fill, Totals, fill_with, finalise, incomplete_shards
from dispatcher.batches.ledger import Entry, Ledger, record_of
from dispatcher.batches.plan import open_plan
from dispatcher.batches.record import BatchStatus
from dispatcher.batches.storage import ERRORS, OUTPUT, RECORD, BatchFiles, Storage
from dispatcher.shard import LATE

log = structlog.get_logger(__name__)

_CANCELLED = "batch_cancelled"
OVERDUE = "overdue"
"""The field of a batch that was called off because its time was over, not by a person."""
_AT_ONCE = 2
"""Batches whose files are made at once, each in a thread: several that end together share the storage."""

P = ParamSpec("P")
R = TypeVar("R")


class Finaliser:
    """Finalises batches.

    To read all parts of a large batch takes minutes. It has threads of its own for that, so that in those of
    asyncio the parts of other batches become durable meanwhile.
    """

    def __init__(self, storage: Storage, ledger: Ledger) -> None:
        self._storage = storage
        self._ledger = ledger
        self._threads = ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="finalise")

    def close(self) -> None:
        """Wait for the files that are being made, and end the threads."""
        self._threads.shutdown(wait=True)

    async def run(self, batch_id: str) -> None:
        """Write the files and flip the status; of a batch that has ended, only its record's file if that is
        behind.

        Raises ShardsLeftError when shards have to be run first, as when results have vanished from the
        storage (the batch is in progress then), StorageError, and UnreadableRecordError, before anything is
        changed.
        """
        entry = await self._ledger.entry(batch_id)
        if entry is None:
            return
        record = record_of(entry)  # first: whoever cannot write the record of its end must not end it
        if entry.ended:
            await asyncio.to_thread(_mend_record, self._storage.files(batch_id), record.to_json())
            return
        if entry.status == BatchStatus.IN_PROGRESS and entry.shards_done < entry.shards:
            done = await self._ledger.shards_done(batch_id)
            raise ShardsLeftError([shard for shard in range(entry.shards) if shard not in done])
        if entry.status != BatchStatus.CANCELLING:
            await self._ledger.move(
                batch_id, BatchStatus.FINALIZING, among=[BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING]
            )
        try:
            totals = await self._in_thread(self._make_files, entry)
        except MissingLinesError as error:
            shards = await self._in_thread(self._incomplete, batch_id)
            log.error("results have vanished", batch=batch_id, error=str(error), shards=shards)
            await self._ledger.reopen(batch_id, shards)
            raise ShardsLeftError(shards) from error
        await self._end(entry, totals)

    async def _in_thread(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: function(*args, **kwargs))

    def _make_files(self, entry: Entry) -> Totals:
        files = self._storage.files(entry.id)
        return finalise(
            files,
            open_plan(files),
            order="completed" if entry.fields.get("order") == "completed" else "input",
            fill=_fill(entry),
        )

    def _incomplete(self, batch_id: str) -> list[int]:
        files = self._storage.files(batch_id)
        return incomplete_shards(files, open_plan(files))

    async def _end(self, entry: Entry, totals: Totals) -> None:
        final = _final_status(entry)
        files = self._storage.files(entry.id)
        await self._ledger.move(
            entry.id,
            final,
            among=[BatchStatus.FINALIZING, BatchStatus.CANCELLING],
            fields={
                "completed": str(totals.completed),
                "failed": str(totals.failed),
                "prompt_tokens": str(totals.prompt_tokens),
                "completion_tokens": str(totals.completion_tokens),
                "output_file_id": files.file_id(OUTPUT) if totals.completed else "",
                "trouble": "",
                "error_file_id": files.file_id(ERRORS) if totals.failed else "",
            },
        )
        ended = await self._ledger.entry(entry.id)
        if ended is not None:
            record = record_of(ended).to_json()
            await asyncio.to_thread(files.write, RECORD, record)
        log.info(
            "batch ended",
            batch=entry.id,
            status=final.value,
            completed=totals.completed,
            failed=totals.failed,
        )


def _mend_record(files: BatchFiles, record: bytes) -> None:
    """Write the record of a batch that has ended, if whoever ended it could not."""
    if files.exists(RECORD) and files.read(RECORD) != record:
        files.write(RECORD, record)


def _fill(entry: Entry) -> Fill | None:
    if entry.status != BatchStatus.CANCELLING:
        return None
    if entry.fields.get(OVERDUE):
        return fill_with(entry.id, LATE, "the batch's time was over before this line was answered")
    return fill_with(entry.id, _CANCELLED, "the batch was cancelled before this line was answered")


def _final_status(entry: Entry) -> BatchStatus:
    if entry.status == BatchStatus.CANCELLING and not entry.fields.get(OVERDUE):
        return BatchStatus.CANCELLED
    return BatchStatus.EXPIRED if entry.fields.get("late") else BatchStatus.COMPLETED
