"""Who gives an installation batches, waits for each, and has a look at what came of it.

What is checked is ``check``'s subject; what befalls the installation meanwhile is ``actor``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from dispatcher.batches.ledger import Entry, record_of
from dispatcher.batches.record import BatchStatus
from forebay.errors import UnknownBatch
from forebay.submission import DAY_S, Options, prepare, publish
from tests.chaos.check import Ended, Findings, check
from tests.chaos.folder import Folder
from tests.chaos.installation import Installation
from tests.chaos.places import Place, has_ended, status_of
from tests.chaos.report import Story
from tests.chaos.takeovers import Takeovers
from tests.chaos.workload import Given, input_file, lines
from workers.errors import StoreUnavailable

T = TypeVar("T")

_LOOK_S = 0.1
_CLIENT_S = 60.0
_UNREACHABLE = 4
_HASTY = 0.2
"""So many batches have a deadline that they may not meet."""


@dataclass(slots=True, eq=False)
class Live:
    """A batch, from the moment in which it was submitted."""

    id: str
    given: list[Given]
    hasty: bool
    """Whether its deadline is near."""
    begun_s: float
    client: Place
    """Somebody who waits for it at the command line."""
    takeovers: Takeovers = field(default_factory=lambda: Takeovers(time.time()))
    cancel_asked: bool = False
    resumed: int = 0
    digest: str = ""
    repeated: int = 0


class Customer:
    """All of a run's batches."""

    def __init__(
        self,
        installation: Installation,
        *,
        clock: Callable[[], float],
        lines: int,
        hasty_s: float,
        told: Callable[[Story], None],
    ) -> None:
        """``lines``: of a batch. ``hasty_s``: how long a batch may take whose deadline is near."""
        self.live: list[Live] = []
        self.done: list[Live] = []
        self._installation = installation
        self._clock = clock
        self._lines = lines
        self._hasty_s = hasty_s
        self._told = told

    async def one_batch(self, rng: Random, stands_still: Callable[[Live], bool]) -> None:
        """Give one, and see it to its end. Raises TimeoutError if it is stuck."""
        live = await self._submit(rng)
        try:
            entry = await self._until_ended(live, stands_still)
        finally:
            self.live.remove(live)
        ended_s = self._clock()
        findings = await asyncio.to_thread(self.look_at, live, entry)
        findings.wrong.extend(await self._after_client(live.client, entry))
        self.done.append(live)
        story = Story(
            batch_id=live.id,
            begun_s=live.begun_s,
            ended_s=ended_s,
            status=entry.status,
            resumed=live.resumed,
            repeated=live.repeated,
            findings=findings,
        )
        self._told(story)

    async def cancel_one(self, rng: Random) -> str:
        """Ask for the end of a batch; returns what came of it, in words."""
        if not self.live:
            return "no batch"
        live = rng.choice(self.live)
        live.cancel_asked = True
        with contextlib.suppress(StoreUnavailable, UnknownBatch):  # as a person's command would fail
            record = await self._installation.desk.cancel(live.id)
            return f"{live.id} is {record.status}"
        return f"{live.id}, in vain"

    def look_at(self, live: Live, entry: Entry) -> Findings:
        """Check what lies in the storage of a batch that has ended. Blocks."""
        folder = self.folder_of(live)
        live.digest = folder.digest()
        ended = Ended(
            live.given,
            record_of(entry).model_dump(mode="json"),
            folder.output,
            folder.errors,
            cancel_asked=live.cancel_asked,
            may_expire=live.hasty,
        )
        findings, parts = check(ended), folder.parts()
        findings.wrong.extend(live.takeovers.needless(parts))
        answers = [line for part in parts for line in part.lines]
        live.repeated = len(answers) - len(set(answers))
        return findings

    def folder_of(self, live: Live) -> Folder:
        return Folder(self._installation.storage_folder, live.id)

    async def _submit(self, rng: Random) -> Live:
        desk = self._installation.desk
        given = lines(rng, self._lines)
        now_s = await surely(desk.ledger.now)
        slots = await surely(desk.slots)
        hasty = rng.random() < _HASTY
        queue = rng.choice(("high", "default", "low"))
        record = await asyncio.to_thread(
            prepare,
            desk.storage,
            io.BytesIO(input_file(given)),
            name="chaos",
            options=Options(bad_lines="skip", queue=queue, window_s=self._hasty_s if hasty else DAY_S),
            now_s=now_s,
            slots=slots,
        )
        files = desk.storage.files(record.id)
        await surely(lambda: publish(desk.ledger, desk.connection, files))
        live = Live(record.id, given, hasty, self._clock(), self._installation.client(record.id))
        self.live.append(live)
        return live

    async def _until_ended(self, live: Live, stands_still: Callable[[Live], bool]) -> Entry:
        """Wait for a batch's end, and help only when nothing else can."""
        desk = self._installation.desk
        while True:
            entry = await surely(lambda: desk.ledger.entry(live.id))
            if entry is not None and BatchStatus(entry.status).final:
                return entry
            if entry is None or stands_still(live):
                if live.resumed > 1:
                    raise TimeoutError(f"{live.id} is stuck: {entry}")
                live.resumed += 1
                await surely(lambda: desk.resume(live.id))
            await asyncio.sleep(_LOOK_S)

    async def _after_client(self, client: Place, entry: Entry) -> list[str]:
        """Whoever waited at the command line came back with the right word."""
        wanted = int(entry.failed > 0) if entry.status == BatchStatus.COMPLETED else 3
        for _ in range(2):
            if not await has_ended(client.child, _CLIENT_S):
                return [f"{client.life} still waits"]
            status = status_of(client.child)
            if status != _UNREACHABLE:
                return [] if status == wanted else [f"{client.life} ended with {status}, not {wanted}"]
            client.start()  # Redis was away when it began
        return [f"{client.life} found no Redis"]


async def surely(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask until Redis answers."""
    while True:
        try:
            return await ask()
        except StoreUnavailable:
            await asyncio.sleep(_LOOK_S)
