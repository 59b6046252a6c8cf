"""The front desk: what one Redis and one storage can be asked about batches and workers, in asyncio.

One desk serves the Python client, and through it the command line; whatever else opens the front door uses
the same desk. How a file becomes a batch is ``submission``'s subject.
"""

from __future__ import annotations

from dataclasses import dataclass

from anyio import to_thread

from dispatcher import queues
from dispatcher.archive import Archive
from dispatcher.batches.errors import (
    DamagedPlanError,
    StorageError,
    StorageMissingError,
    UnreadableRecordError,
)
from dispatcher.batches.ledger import Entry, Ledger, record_of
from dispatcher.batches.plan import open_plan
from dispatcher.batches.record import BatchRecord, BatchStatus, is_batch_id
from dispatcher.batches.storage import SHARDS, Storage
from dispatcher.lengths import AnswerLengths
from dispatcher.turns import memory_keys
from forebay import admission, recovery, submission
from forebay.errors import NotEnded, TooOld, UnknownBatch
from forebay.recovery import Lost, Resumed
from forebay.settings import FrontSettings
from workers.connection import SyncRedis, connect, connect_sync, public_url, server_facts, translated
from workers.errors import StoreUnavailable
from workers.store import FleetStore

_OLDEST = (6, 2)
"""Redis; every Valkey is newer."""
_STOPPABLE = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was forgotten of a batch. ``known``: Redis knew it. ``files``: its files were removed."""

    known: bool
    files: bool


@dataclass(frozen=True, slots=True)
class Known:
    """Batches that Redis knows: the records, newest first.

    ``unreadable``: what is wrong with those that this version cannot read; each names its batch.
    """

    records: list[BatchRecord]
    unreadable: list[UnreadableRecordError]


class Desk:
    """The doors to one Redis and one storage. Methods raise StoreUnavailable when Redis does not answer."""

    def __init__(self, settings: FrontSettings) -> None:
        """No I/O yet. Raises SettingsError and StorageUrlError for impossible URLs."""
        self.redis_url = settings.redis_url
        self._most_queued = settings.most_queued_requests
        self.storage = Storage(settings.storage)
        self.client = connect(settings.redis_url)
        self.connection = connect_sync(settings.redis_url)
        self.fleet = FleetStore(self.client)
        self.ledger = Ledger(self.client)
        self.archive = Archive(self.client)
        self.lengths = AnswerLengths(self.client)

    async def check(self) -> str | None:
        """Reach the server; returns why it may lose what we store, or None. Raises also TooOld."""
        try:
            # First without asyncio: redis-py's asyncio client, when it retries and checks its connections'
            # health, never comes back from a server that wants a password.
            await to_thread.run_sync(_ping, self.connection)
            facts = await server_facts(self.client)
        except StoreUnavailable as error:
            cause = str(error.__cause__ or error).rstrip(".")
            raise StoreUnavailable(
                f"cannot reach Redis at {public_url(self.redis_url)}: {cause}; start one, or pass --redis URL"
            ) from error
        if facts.version and _version(facts.version) < _OLDEST:
            raise TooOld(
                f"the server at {public_url(self.redis_url)} is version {facts.version}; "
                "Forebay needs Redis 6.2, Valkey 7.2 or newer"
            )
        return facts.warning

    async def close(self) -> None:
        """Close all connections."""
        await self.client.aclose()
        await to_thread.run_sync(self.connection.close)

    async def slots(self) -> int:
        """How many requests the fleet takes at once now; the usual number while there are no workers."""
        view = await self.fleet.view()
        return sum(worker.limit for worker in view.workers) or submission.USUAL_SLOTS

    async def check_room(self, queue: str, lines: int) -> None:
        """Whether so many lines more may wait in a queue; see ``admission.check_room``."""
        await admission.check_room(self.ledger, queue, lines, self._most_queued)

    async def publish(self, batch_id: str, window_s: float | None = None) -> str:
        """Make a prepared batch known and queue it; see ``submission.publish``."""
        files = self.storage.files(batch_id)
        return await submission.publish(self.ledger, self.connection, files, window_s=window_s)

    async def resume(self, batch_id: str, window_s: float | None = None) -> Resumed:
        """Bring a batch back of which Redis lost something; see ``recovery.resume``."""
        files = self.storage.files(batch_id)
        known, queued = await recovery.resume(self.ledger, self.connection, files, window_s=window_s)
        workers = len((await self.fleet.view()).workers)
        return Resumed(await self.record(batch_id), known, queued, workers)

    async def forgotten(self) -> Lost:
        """The batches whose files are here and that Redis does not know; see ``recovery.forgotten``."""
        return await recovery.forgotten(self.ledger, self.storage)

    async def entry(self, batch_id: str) -> Entry:
        """What Redis knows of a batch. Raises UnknownBatch."""
        entry = await self.ledger.entry(batch_id)
        if entry is None:
            raise _unknown(batch_id)
        return entry

    async def record(self, batch_id: str) -> BatchRecord:
        """The batch as everyone sees it. Raises UnknownBatch, UnreadableRecordError."""
        return record_of(await self.entry(batch_id))

    async def models(self, batch_id: str) -> frozenset[str]:
        """The models that its lines name; none when its files cannot be read from here."""
        try:
            plan = await to_thread.run_sync(open_plan, self.storage.files(batch_id))
        except (StorageError, DamagedPlanError):
            return frozenset()
        return frozenset(model for model in plan.models if model is not None)

    async def records(self, limit: int) -> Known:
        """The newest batches."""
        known = Known([], [])
        for entry in await self.ledger.recent(limit):
            try:
                known.records.append(record_of(entry))
            except UnreadableRecordError as error:
                known.unreadable.append(error)
        return known

    async def forget(self, batch_id: str, with_queue: bool, with_files: bool) -> Forgotten:
        """Remove what Redis knows of an ended batch; if asked to, its queue and, before all else, its files.

        One that is called off and whose files are not in this storage can be forgotten too: where they are
        gone, nobody could end it. Raises NotEnded, UnknownBatch when there is nothing of it, and
        StorageMissingError when its files are not here to be removed; then it stays known.
        """
        entry = await self.ledger.entry(batch_id)
        if entry is not None and not await to_thread.run_sync(self._is_over, entry):
            raise NotEnded(f"{batch_id} has not ended, it is {entry.status}; cancel it first")
        removed = with_files and await to_thread.run_sync(_remove_files, self.storage, batch_id)
        if entry is None and not removed:
            raise _unknown(batch_id)
        if with_files and not removed:
            raise StorageMissingError(
                f"the files of {batch_id} are not in {self.storage.url}, so nothing is forgotten; "
                "name the storage that its dispatchers have, with --storage, or leave out --files"
            )
        if entry is not None and with_queue:
            await to_thread.run_sync(_remove_queue, self.connection, entry.queue)
        await self.ledger.forget(batch_id)
        return Forgotten(entry is not None, removed)

    def _is_over(self, entry: Entry) -> bool:
        called_off = entry.status == BatchStatus.CANCELLING
        return entry.ended or (called_off and not self.storage.files(entry.id).exists(SHARDS))

    async def cancel(self, batch_id: str) -> BatchRecord:
        """Ask for a batch's end: what waits is dropped here, what runs is its dispatcher's work.

        A batch that has ended, or is being finalised, stays as it is. Raises UnknownBatch.
        """
        entry = await self.entry(batch_id)
        status = await self.ledger.move(batch_id, BatchStatus.CANCELLING, among=_STOPPABLE)
        if status == BatchStatus.CANCELLING:
            await to_thread.run_sync(queues.call_off, self.connection, entry.queue, batch_id, entry.shards)
        return await self.record(batch_id)


def _unknown(batch_id: str) -> UnknownBatch:
    return UnknownBatch(f"no batch {batch_id} is known; see: forebay batches; lost by Redis: forebay resume")


def _remove_files(storage: Storage, batch_id: str) -> bool:
    """Remove a batch's folder, whether there was one. Nothing that is not named like a batch is removed."""
    if not is_batch_id(batch_id) or not storage.files(batch_id).walk():
        return False
    storage.files(batch_id).remove_all()
    return True


def _ping(connection: SyncRedis) -> None:
    with translated():
        connection.ping()


def _remove_queue(connection: SyncRedis, name: str) -> None:
    with translated():
        queues.queue(connection, name).delete(delete_jobs=True)
        connection.delete(*memory_keys(name))


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
