"""Batches whose time is over are removed: first their files, then what Redis knows of them.

When that is stands in `batches.retention`. Every dispatcher looks now and then; several that find the same do
no harm, since each step may be repeated, and whoever dies in between leaves a batch that is found again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import structlog

from dispatcher.batches.errors import BatchError
from dispatcher.batches.ledger import Entry, Ledger
from dispatcher.batches.record import is_batch_id
from dispatcher.batches.retention import remove_at
from dispatcher.batches.storage import RECORD, Storage

log = structlog.get_logger(__name__)


class Sweeping:
    """One dispatcher's."""

    def __init__(self, storage: Storage, ledger: Ledger, queues: Collection[str]) -> None:
        """`queues`: those that are served here, whose batches have their files in this storage."""
        self._storage = storage
        self._ledger = ledger
        self._queues = queues

    async def look(self) -> None:
        """Remove what is due. Raises StoreUnavailable."""
        for batch_id in await self._ledger.due_for_removal(await self._ledger.now()):
            entry = await self._ledger.entry(batch_id)
            if entry is not None and remove_at(entry.fields) is not None:
                await self._remove(entry)

    async def _remove(self, entry: Entry) -> None:
        # Anybody may have written the name, and what follows removes a folder.
        if not is_batch_id(entry.id):
            log.error("not the name of a batch: it is not removed", batch=entry.id)
            return
        try:
            if not await asyncio.to_thread(self._remove_files, entry):
                return
        except BatchError as error:
            log.error("a batch's files cannot be removed", batch=entry.id, error=str(error))
            return
        await self._ledger.forget(entry.id)
        log.info("batch removed, its time was over", batch=entry.id)

    def _remove_files(self, entry: Entry) -> bool:
        """Whether the batch is of this storage; then it has no files any more."""
        files = self._storage.files(entry.id)
        if not files.exists(RECORD):
            if entry.queue not in self._queues:
                return False  # of a run that had its files elsewhere, or of others who share this Redis
            if self._storage.may_be_elsewhere():
                return False
        files.remove_all()
        return True
