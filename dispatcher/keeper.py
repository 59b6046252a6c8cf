"""A claim's results: held until they are durable, then counted. Nothing is counted before.

How parts are written is `batches.parts`' subject, which lines are sent and what comes back `shard`'s.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from dispatcher.batches.errors import StorageError
from dispatcher.batches.ledger import Claim, Ledger, Standing, Tally
from dispatcher.batches.parts import Entry as Result
from dispatcher.batches.parts import PartWriter
from dispatcher.batches.storage import BatchFiles
from workers.errors import Fenced, StoreUnavailable

log = structlog.get_logger(__name__)

T = TypeVar("T")

_MOST_UNWRITTEN = 4
"""Parts' worth of results that may wait for the storage before no more lines are sent."""
_PAUSE_S = (0.5, 30.0)


@dataclass(slots=True)
class _Sums:
    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: int = 0

    def add(self, result: Result, cost: int) -> None:
        self.completed += result.ok
        self.failed += not result.ok
        self.prompt_tokens += result.usage.prompt_tokens or 0
        self.completion_tokens += result.usage.completion_tokens or 0
        self.cost += cost

    def tally(self) -> Tally:
        return Tally(self.completed, self.failed, self.prompt_tokens, self.completion_tokens, self.cost)


class Keeper:
    """Keeps the results of one claim on one shard.

    A part is written when enough results are there, or the oldest has waited long enough; a storage that
    cannot is asked until it can, and the batch says so meanwhile.
    """

    def __init__(
        self,
        files: BatchFiles,
        ledger: Ledger,
        claim: Claim,
        *,
        owner: str,
        part_lines: int,
        part_age_s: float,
        troubled: bool = False,
    ) -> None:
        """`owner` is unique among dispatchers, also over restarts: part files are named after it. `troubled`:
        the batch says that its files cannot be used, which the first part that is written disproves.
        """
        self._ledger = ledger
        self._claim = claim
        self._owner = owner
        self._part_lines = part_lines
        self._part_age_s = part_age_s
        # Where Redis lost its data, claims are counted from 1 again, and part names are used but once.
        self._writer = PartWriter(files, claim.shard, f"{claim.number}.{owner}.{secrets.token_hex(3)}")
        self._one_writes = threading.Lock()
        """A cancelled write goes on in its thread, beside which the last results are written."""
        self._unwritten: list[Result] = []
        self._sums = _Sums()
        self._durable = Tally()
        """What of the sums is durable, and may be told."""
        self._troubled = troubled
        self._late = False
        self._closed = False
        self._hurried = False
        self._writing = False
        self._written = asyncio.Event()
        self._due = asyncio.Event()

    # -- what a shard does ----------------------------------------------------------------------------------

    def count_durable(self, result: Result, cost: int, *, late: bool) -> None:
        """Count a result that an earlier claim made durable, and may have died before it told; before `run`.

        `late`: its line ran out of time.
        """
        self._late |= late
        self._sums.add(result, cost)
        self._durable = self._sums.tally()

    def add(self, result: Result, cost: int, *, late: bool) -> None:
        """Keep a result. `late`: its line ran out of time."""
        self._late |= late
        self._sums.add(result, cost)
        self._unwritten.append(result)
        if len(self._unwritten) in (1, self._part_lines):
            self._due.set()

    @property
    def is_behind(self) -> bool:
        """Whether so many results wait for the storage that nothing more should be sent."""
        return len(self._unwritten) > _MOST_UNWRITTEN * self._part_lines

    async def room(self) -> None:
        """Wait until the storage keeps up."""
        while self.is_behind:
            self._written.clear()
            await self._written.wait()

    async def all_durable(self) -> None:
        """Wait until all results that are here are durable: at once, not when they are many or old."""
        while self._unwritten or self._writing:
            self._hurried = True
            self._due.set()
            self._written.clear()
            await self._written.wait()

    def close(self) -> None:
        """No more results come: `run` ends when those here are durable."""
        self._closed = True
        self._due.set()

    async def done(self) -> Standing:
        """Say that every line has a durable result, until Redis answers. Raises Fenced."""
        return await self._until_redis_answers(lambda: self._progress(done=True))

    async def note_group(self, group: range) -> None:
        """Note which lines are about to be sent, until Redis answers. Raises Fenced."""
        await self._until_redis_answers(lambda: self._ledger.note_group(self._claim, self._owner, group))

    async def note_trouble(self, text: str) -> None:
        """Say for people why the batch's files cannot be used now. The next results that are kept end it."""
        await self._tell_trouble(f"{self._owner}: {text}")
        self._troubled = True

    async def write_last(self) -> None:
        """What came back before a cancellation is kept, if the storage takes it at once."""
        results, sums = self._take()
        try:
            await asyncio.shield(asyncio.to_thread(self._write_part, results))
            self._durable = sums
            await asyncio.shield(self._report_if_possible())
        except (StorageError, Fenced) as error:
            log.warning("last results were not kept", batch=self._claim.batch_id, error=str(error))

    # -- keeping --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write parts as results come, until `close`. Raises Fenced when a later claim stands."""
        while not (self._closed and not self._unwritten):
            await self._due.wait()
            self._due.clear()
            if not (self._closed or self._hurried) and len(self._unwritten) < self._part_lines:
                await self._until_old_or_many()
            if self._unwritten:
                await self._write()
                await self._report_if_possible()

    async def _until_old_or_many(self) -> None:
        try:
            async with asyncio.timeout(self._part_age_s):
                await self._due.wait()
        except TimeoutError:
            pass

    async def _write(self) -> None:
        """Make all results durable that are there now."""
        self._writing, self._hurried = True, False
        batch, sums = self._take()
        pause_s = _PAUSE_S[0]
        while True:
            try:
                # Shielded: a cancellation would take a write with it that still waits for its thread.
                await asyncio.shield(asyncio.to_thread(self._write_part, batch))
            except StorageError as error:
                log.error(
                    "cannot keep results", batch=self._claim.batch_id, error=str(error), retry_in_s=pause_s
                )
                await self.note_trouble(f"results cannot be stored: {error}")
                batch = []  # the writer holds them by now
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _PAUSE_S[1])
            else:
                break
        self._durable = sums
        self._writing = False
        if self._troubled:
            await self._tell_trouble("")
            self._troubled = False
        self._written.set()

    def _take(self) -> tuple[list[Result], Tally]:
        """The results that wait to be written, and what the sums are once they are."""
        batch, self._unwritten = self._unwritten, []
        return batch, self._sums.tally()

    def _write_part(self, results: Sequence[Result]) -> None:
        with self._one_writes:
            for result in results:
                self._writer.add(result)
            self._writer.flush()

    # -- telling --------------------------------------------------------------------------------------------

    async def _tell_trouble(self, text: str) -> None:
        try:
            await self._ledger.set_fields(self._claim.batch_id, {"trouble": text})
        except StoreUnavailable as error:
            log.warning("cannot tell the batch's trouble", batch=self._claim.batch_id, error=str(error))

    async def _until_redis_answers(self, tell: Callable[[], Awaitable[T]]) -> T:
        pause_s = _PAUSE_S[0]
        while True:
            try:
                return await tell()
            except StoreUnavailable as error:
                log.warning("cannot report a shard", batch=self._claim.batch_id, error=str(error))
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, _PAUSE_S[1])

    async def _report_if_possible(self) -> None:
        """Progress on the way: the next report says it all again, so one that fails is no loss."""
        try:
            await self._progress(done=False)
        except StoreUnavailable as error:
            log.warning("cannot report progress", batch=self._claim.batch_id, error=str(error))

    async def _progress(self, *, done: bool) -> Standing:
        if self._late:
            await self._ledger.set_fields(self._claim.batch_id, {"late": "1"})
        return await self._ledger.progress(self._claim, self._owner, self._durable, done=done)
