"""A run of chaos: batches go through an installation while faults befall it; then peace, and a last look.

Who gives the batches is ``customer``, who inflicts the faults ``actor``; which they are says ``schedule``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from dispatcher.batches.record import BatchStatus
from tests.chaos.actor import Actor, Happened
from tests.chaos.aftermath import leftovers
from tests.chaos.customer import Customer, Live
from tests.chaos.folder import durable_bytes
from tests.chaos.installation import Installation, Settings
from tests.chaos.report import Report, Story, Summary
from tests.chaos.schedule import Kind, Scale, schedule
from workers import keys
from workers.connection import text_fields, translated
from workers.errors import StoreUnavailable
from workers.fleet import WorkerState

_LOOK_S = 0.1
_LOST_S = 2.5
"""From what is lost to the kill that loses it: a second of the log, or two while the disk is busy."""


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


class Campaign:
    """One run."""

    def __init__(self, wishes: Wishes, folder: Path, report: Report) -> None:
        """``folder``: storage and logs, which stay there."""
        self.summary = Summary(wishes.seed)
        self._wishes = wishes
        self._folder = folder
        self._report = report
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
            self._customer = Customer(
                installation,
                clock=self._clock,
                lines=wishes.lines,
                hasty_s=wishes.hasty_s,
                told=self._heard,
            )
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
        faults = schedule(Random(wishes.seed), wishes.scale, wishes.settings.numbers, wishes.lasts_s)
        actor = Actor(
            self._installation,
            Random(wishes.seed),
            clock=self._clock,
            cancel=self._customer.cancel_one,
            waiting=lambda: [live.client for live in self._customer.live],
            hasten=wishes.hasten,
        )
        watching = [asyncio.create_task(self._watch_storage()), asyncio.create_task(self._watch_claims())]
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(actor.play(faults, self._happened))
                for number in range(wishes.abreast):
                    group.create_task(self._batches(Random(f"{wishes.seed} {number}")))
        finally:
            for task in watching:
                task.cancel()
            await asyncio.wait(watching)
        self.summary.complaints += actor.complaints

    async def _batches(self, rng: Random) -> None:
        """One after the other, while faults begin."""
        while self._clock() < self._wishes.lasts_s:
            try:
                await self._customer.one_batch(rng, self._stands_still)
            except TimeoutError as error:
                self.summary.complaints.append(str(error))

    def _stands_still(self, live: Live) -> bool:
        last_s = max([self._wishes.lasts_s, live.begun_s, *self.summary.progress_s[-1:]])
        return self._clock() - last_s > self._wishes.patience_s * (1 + live.resumed)

    def _happened(self, happened: Happened) -> None:
        self.summary.faults.append(happened)
        self._report.happened(happened)

    def _heard(self, story: Story) -> None:
        self.summary.stories.append(story)
        self._report.ended(story)

    # -- watching -------------------------------------------------------------------------------------------

    async def _watch_claims(self) -> None:
        client = self._installation.desk.client
        while True:
            for live in list(self._customer.live):
                with contextlib.suppress(StoreUnavailable), translated():
                    asked_s = time.time()  # what is not in the answer yet began after this
                    shards = await client.hgetall(keys.BATCH_SHARDS.of(live.id))
                    live.takeovers.look(text_fields(shards), asked_s)
            await asyncio.sleep(_LOOK_S)

    async def _watch_storage(self) -> None:
        while True:
            self._installation.redis.remember_size()
            durable = await asyncio.to_thread(durable_bytes, self._installation.storage_folder)
            if durable > self._durable_bytes:
                self.summary.progress_s.append(self._clock())
                self._durable_bytes = durable
            await asyncio.sleep(_LOOK_S)

    # -- afterwards -----------------------------------------------------------------------------------------

    async def _look_after(self) -> None:
        """In peace nothing is left, and what had ended has stayed as it was."""
        deadline_s = time.monotonic() + self._wishes.patience_s
        while left := [*await leftovers(self._installation.desk), *await self._not_ended()]:
            if time.monotonic() > deadline_s:
                self.summary.complaints += left
                return
            await asyncio.sleep(_LOOK_S)
        for live, story in zip(self._customer.done, self.summary.stories, strict=True):
            if self._customer.folder_of(live).digest() != live.digest:
                await self._explain_change(live, story)

    async def _not_ended(self) -> list[str]:
        done = self._customer.done
        entries = await self._installation.desk.ledger.entries([live.id for live in done])
        final = {batch_id for batch_id, entry in entries.items() if BatchStatus(entry.status).final}
        return [f"{live.id} had ended, and has not" for live in done if live.id not in final]

    async def _explain_change(self, live: Live, story: Story) -> None:
        """Only a Redis that lost the end of a batch may have had it end again, and well."""
        entry = await self._installation.desk.ledger.entry(live.id)
        assert entry is not None, "it has ended"
        again = self._customer.look_at(live, entry)
        lost = any(story.ended_s - _LOOK_S < at_s < story.ended_s + _LOST_S for at_s in self._losses())
        if not lost or not again.good:
            self.summary.complaints.append(f"{live.id} had ended, and its files changed: {again}")

    def _losses(self) -> Iterator[float]:
        """When Redis may have lost what it had just been told."""
        losing = (Kind.REDIS_LOSE, Kind.REDIS_KILL)
        return (one.began_s for one in self.summary.faults if one.fault.kind in losing)
