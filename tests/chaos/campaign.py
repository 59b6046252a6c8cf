"""A run of chaos: batches go through an installation while faults befall it, and each is checked at its end.

Belongs here: giving batches, waiting for their ends, reading what came of them. What is checked is
``check``'s subject, what befalls whom ``schedule``'s and ``actor``'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import TypeVar

from dispatcher.batches.ledger import Entry, record_of
from dispatcher.batches.record import BatchStatus
from forebay.submission import DAY_S, Options, prepare, publish
from tests.chaos.actor import Actor, Happened
from tests.chaos.aftermath import leftovers
from tests.chaos.check import Ended, Findings, check
from tests.chaos.folder import Folder, durable_bytes
from tests.chaos.installation import Installation, Settings
from tests.chaos.places import Place, has_ended, status_of
from tests.chaos.report import Report, Story, Summary
from tests.chaos.schedule import Scale, schedule
from tests.chaos.takeovers import Takeovers
from tests.chaos.workload import Given, input_file, lines
from workers import keys
from workers.connection import text_fields, translated
from workers.errors import StoreUnavailable
from workers.fleet import WorkerState

T = TypeVar("T")

_LOOK_S = 0.1
_CLIENT_S = 60.0
_UNREACHABLE = 4
_HASTY = 0.2
"""So many batches have a deadline that they may not meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a run is like. ``lasts_s``: for so long faults begin; then what is under way may end in peace."""

    seed: int
    lasts_s: float
    lines: int
    hasty_s: float
    """How long the batches may take that have a near deadline."""
    abreast: int
    """Batches at once."""
    scale: Scale
    settings: Settings
    hasten: bool = False
    """Do not wait for the claims of dead dispatchers."""
    patience_s: float = 120.0
    """After so long in peace without a durable result, a batch is taken for stuck."""


@dataclass(slots=True, eq=False)
class _Live:
    """A batch under way."""

    id: str
    given: list[Given]
    hasty: bool
    begun_s: float
    client: Place
    """Somebody who waits for it at the command line."""
    takeovers: Takeovers = field(default_factory=lambda: Takeovers(time.time()))
    cancel_asked: bool = False
    resumed: int = 0
    digest: str = ""
    repeated: int = 0


class Campaign:
    """One run."""

    def __init__(self, wishes: Wishes, folder: Path, report: Report) -> None:
        """``folder``: storage and logs, which stay there."""
        self.summary = Summary(wishes.seed)
        self._wishes = wishes
        self._folder = folder
        self._report = report
        self._rng = Random(wishes.seed)
        self._live: list[_Live] = []
        self._done: list[_Live] = []
        self._started_at = time.monotonic()
        self._durable_bytes = 0

    async def run(self) -> Summary:
        """From the first process to the last."""
        wishes = self._wishes
        self._report.begins(wishes.seed, self._folder, {"lasts_s": wishes.lasts_s, **asdict(wishes.settings)})
        async with Installation(wishes.settings, self._folder) as installation:
            self._installation = installation
            await self._until_ready()
            self._started_at = time.monotonic()
            await self._torment()
            await self._look_after()
            self.summary.complaints += await installation.end_services()
        self.summary.lasted_s = self._clock()
        self._report.summary(self.summary)
        return self.summary

    def _clock(self) -> float:
        return time.monotonic() - self._started_at

    async def _until_ready(self) -> None:
        async with asyncio.timeout(60):
            while True:
                view = await self._installation.desk.fleet.view()
                if view.workers and all(worker.state is WorkerState.READY for worker in view.workers):
                    return
                await asyncio.sleep(_LOOK_S)

    async def _torment(self) -> None:
        wishes = self._wishes
        numbers = wishes.settings.numbers
        faults = schedule(Random(wishes.seed), wishes.scale, numbers, wishes.lasts_s)
        actor = Actor(
            self._installation,
            Random(wishes.seed),
            clock=self._clock,
            cancel=self._cancel,
            waiting=lambda: [live.client for live in self._live],
            hasten=wishes.hasten,
        )
        watching = [asyncio.create_task(self._watch_storage()), asyncio.create_task(self._watch_claims())]
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(actor.play(faults, self._happened))
                for _ in range(wishes.abreast):
                    group.create_task(self._batches(Random(self._rng.random())))
        finally:
            for task in watching:
                task.cancel()
            await asyncio.wait(watching)
        self.summary.complaints += actor.complaints

    def _happened(self, happened: Happened) -> None:
        self.summary.faults.append(happened)
        self._report.happened(happened)

    # -- watching -------------------------------------------------------------------------------------------

    async def _watch_claims(self) -> None:
        client = self._installation.desk.client
        while True:
            for live in list(self._live):
                with contextlib.suppress(StoreUnavailable), translated():
                    # The moment before the answer: what is not in it yet began after it.
                    now_s = time.time()
                    live.takeovers.look(
                        text_fields(await client.hgetall(keys.BATCH_SHARDS.of(live.id))), now_s
                    )
            await asyncio.sleep(_LOOK_S)

    async def _watch_storage(self) -> None:
        while True:
            self._installation.redis.remember_size()
            durable = await asyncio.to_thread(durable_bytes, self._installation.storage_folder)
            if durable > self._durable_bytes:
                self.summary.progress_s.append(self._clock())
                self._durable_bytes = durable
            await asyncio.sleep(_LOOK_S)

    # -- batches --------------------------------------------------------------------------------------------

    async def _batches(self, rng: Random) -> None:
        while self._clock() < self._wishes.lasts_s:
            live = await self._submit(rng)
            entry = await self._until_ended(live)
            self._live.remove(live)
            await self._tell(live, entry)

    async def _submit(self, rng: Random) -> _Live:
        desk = self._installation.desk
        given = lines(rng, self._wishes.lines)
        now_s = await _surely(desk.ledger.now)
        slots = await _surely(desk.slots)
        hasty = rng.random() < _HASTY
        window_s = self._wishes.hasty_s if hasty else DAY_S
        record = await asyncio.to_thread(
            prepare,
            desk.storage,
            io.BytesIO(input_file(given)),
            name="chaos",
            options=Options(
                bad_lines="skip", queue=rng.choice(("high", "default", "low")), window_s=window_s
            ),
            now_s=now_s,
            slots=slots,
        )
        files = desk.storage.files(record.id)
        await _surely(lambda: publish(desk.ledger, desk.connection, files))
        live = _Live(record.id, given, hasty, self._clock(), self._installation.client(record.id))
        self._live.append(live)
        return live

    async def _until_ended(self, live: _Live) -> Entry:
        """Wait for a batch's end, and help only when nothing else can. Raises TimeoutError if it is stuck."""
        desk = self._installation.desk
        while True:
            entry = await _surely(lambda: desk.ledger.entry(live.id))
            if entry is not None and BatchStatus(entry.status).final:
                return entry
            if entry is None or self._stands_still(live):
                if live.resumed > 1:
                    raise TimeoutError(f"{live.id} is stuck: {entry}")
                live.resumed += 1
                await _surely(lambda: desk.resume(live.id))
            await asyncio.sleep(_LOOK_S)

    def _stands_still(self, live: _Live) -> bool:
        last_s = max([self._wishes.lasts_s, live.begun_s, *self.summary.progress_s[-1:]])
        return self._clock() - last_s > self._wishes.patience_s * (1 + live.resumed)

    async def _cancel(self, rng: Random) -> str:
        if not self._live:
            return "no batch"
        live = rng.choice(self._live)
        live.cancel_asked = True
        with contextlib.suppress(StoreUnavailable):  # as a person's command would fail
            record = await self._installation.desk.cancel(live.id)
            return f"{live.id} is {record.status}"
        return f"{live.id}, in vain"

    # -- what became of them --------------------------------------------------------------------------------

    async def _tell(self, live: _Live, entry: Entry) -> None:
        ended_s = self._clock()
        findings = await asyncio.to_thread(self._check, live, entry)
        findings.wrong.extend(await self._after_client(live.client, entry))
        story = Story(
            batch_id=live.id,
            begun_s=live.begun_s,
            ended_s=ended_s,
            status=entry.status,
            cancel_asked=live.cancel_asked,
            resumed=live.resumed,
            repeated=live.repeated,
            findings=findings,
        )
        self._done.append(live)
        self.summary.stories.append(story)
        self._report.ended(story)

    def _check(self, live: _Live, entry: Entry) -> Findings:
        record = record_of(entry).model_dump(mode="json")
        folder = self._folder_of(live)
        live.digest = folder.digest()
        ended = Ended(
            live.given,
            record,
            folder.output,
            folder.errors,
            cancel_asked=live.cancel_asked,
            may_expire=live.hasty,
        )
        findings = check(ended)
        parts = folder.parts()
        findings.wrong.extend(live.takeovers.needless(parts))
        answers = [line for part in parts for line in part.lines]
        live.repeated = len(answers) - len(set(answers))
        return findings

    def _folder_of(self, live: _Live) -> Folder:
        return Folder(self._installation.storage_folder, live.id)

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

    # -- afterwards -----------------------------------------------------------------------------------------

    async def _look_after(self) -> None:
        """In peace nothing is left, and what had ended has stayed as it was."""
        desk = self._installation.desk
        deadline_s = time.monotonic() + self._wishes.patience_s
        while left := await leftovers(desk):
            if time.monotonic() > deadline_s:
                self.summary.complaints += left
                break
            await asyncio.sleep(_LOOK_S)
        for live in self._done:
            entry = await desk.ledger.entry(live.id)
            if entry is None or not BatchStatus(entry.status).final:
                self.summary.complaints.append(f"{live.id} had ended, and is {entry and entry.status}")
            if self._folder_of(live).digest() != live.digest:
                self.summary.complaints.append(f"{live.id} had ended, and its files changed")


async def _surely(ask: Callable[[], Awaitable[T]]) -> T:
    """Ask until Redis answers."""
    while True:
        try:
            return await ask()
        except StoreUnavailable:
            await asyncio.sleep(_LOOK_S)
