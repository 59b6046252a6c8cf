"""One file through a fleet, from start to end, on this machine: what `forebay run` does.

The services are ``local``'s subject, what is left for a later run ``state``'s, and how it all looks that of
whoever watches. The steps: check the paths; take the input in, or take up what an earlier run left; start the
services; wait for a worker; publish the batch; watch it; save its results; leave nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from dispatcher.batches.errors import StorageError, StorageMissingError
from dispatcher.batches.record import BatchRecord, BatchStatus
from dispatcher.batches.storage import BatchFiles, Storage
from forebay import beginning, explanations, submission
from forebay.client import LOOK_S, Forebay
from forebay.errors import BatchLost, NoWorkerReady, RunRefused, UnknownBatch
from forebay.interrupts import Interrupts
from forebay.local import LocalServices, LocalSettings
from forebay.progress import Progress
from forebay.results import Saved
from forebay.run_settings import RunSettings
from forebay.settings import FrontSettings
from forebay.state import RunState
from workers.errors import StoreUnavailable, UnknownWorker
from workers.fleet import WorkerState, WorkerView

_POLL_S = 0.1
_OWN_LOOK_S = 0.2
"""From one look at the batch to the next, in a Redis that is ours alone: results are there so much sooner."""
_COMPANY_S = 3.0
"""How long a ready worker waits for the others: the longest requests go first, and shall find the fastest."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. ``saved`` is None when it was interrupted: then the same command takes it up again.

    ``elapsed_s`` is the whole run, ``batch_s`` the part of it in which requests could be sent.
    """

    record: BatchRecord
    saved: Saved | None
    workers: tuple[WorkerView, ...]
    elapsed_s: float
    batch_s: float

    @property
    def interrupted(self) -> bool:
        """Whether somebody stopped it."""
        return self.saved is None


class Watcher(Protocol):
    """Whoever shows a run to a person or a program."""

    def note(self, text: str) -> None:
        """Something a person should know, once."""

    def started(self, record: BatchRecord, *, resumed: bool) -> None:
        """The input is taken in, or taken up again; nothing was sent yet."""

    def waiting(self, workers: Sequence[WorkerView]) -> None:
        """No worker is ready yet."""

    def progress(self, seen: Progress) -> None:
        """One look at the batch while it runs."""

    def close(self) -> None:
        """The run is over, however it ended."""


def run(settings: RunSettings, watcher: Watcher) -> Outcome:
    """Run a file. From the main thread only.

    Raises RunRefused, RefusedInput and SettingsError before anything is started; later NoServer, ChildDied,
    QueueFull, NoWorkerReady, StoreUnavailable, StorageError. KeyboardInterrupt comes out only before the
    batch is published; afterwards it is an outcome.
    """
    started = time.monotonic()
    beginning.check(settings)
    with Interrupts() as interrupts, RunState(settings.output) as state:
        batch_id, resumed = beginning.take_in_or_up(settings, state)
        batch = _Batch(settings, state, batch_id, fresh=not resumed)
        watcher.started(submission.read_record(batch.files), resumed=resumed)
        outcome: Outcome | None = None
        try:
            with LocalServices(batch.services()) as services:
                interrupts.on_hurry = services.hurry
                try:
                    with Forebay(settings=batch.front(services.redis_url)) as forebay:
                        outcome = _Run(batch, services, forebay, watcher, started).outcome()
                    services.close()
                except KeyboardInterrupt:
                    if outcome is None:
                        raise
                    services.hurry()  # all is done but for ending them
            return outcome
        finally:
            ended = outcome is not None and not outcome.interrupted
            nothing_sent = not resumed and not batch.published
            if (ended or nothing_sent) and not settings.keep_state:
                if nothing_sent and not batch.private:
                    with suppress(StorageError):
                        batch.files.remove_all()
                state.remove()


class _Batch:
    """One run's batch: its files, and what the services must know to serve it."""

    def __init__(self, settings: RunSettings, state: RunState, batch_id: str, *, fresh: bool) -> None:
        """`fresh`: it was taken in just now, so that nothing of it was ever sent."""
        manifest = state.manifest()
        assert manifest is not None, "a run that goes on has a manifest"
        self.id = batch_id
        self.settings = settings
        self.state = state
        self.private = manifest.storage is None
        self.published = False
        self.replaces = manifest.replaces
        self.fresh = fresh
        self.storage = manifest.storage or str(state.storage)
        self.files: BatchFiles = Storage(self.storage).files(batch_id)
        try:
            self.queue = submission.read_record(self.files).forebay.queue
        except StorageMissingError as error:
            raise RunRefused(f"the files of the run to resume are gone ({error}); use --restart") from error
        if settings.redis_url is not None and self.private and self.queue != beginning.own_queue(batch_id):
            raise RunRefused(
                f"that run was begun on the queue {self.queue} of a Redis of its own, which others may serve "
                "here and not see its files; go on without --redis, or use --restart"
            )

    def services(self) -> LocalSettings:
        return LocalSettings(
            redis_url=self.settings.redis_url,
            storage=self.storage,
            logs=self.state.logs,
            dispatchers=self.settings.dispatchers,
            monitor=self.settings.redis_url is None,
            queues=(self.queue,),
        )

    def front(self, redis_url: str) -> FrontSettings:
        return FrontSettings(redis_url=redis_url, storage=self.storage)


class _Run:
    """The part of a run in which services are up."""

    def __init__(
        self, batch: _Batch, services: LocalServices, forebay: Forebay, watcher: Watcher, started: float
    ) -> None:
        self._batch = batch
        self._services = services
        self._forebay = forebay
        self._watcher = watcher
        self._started = started
        self._added: list[str] = []
        self._seen: Progress | None = None

    def outcome(self) -> Outcome:
        if self._forebay.warning:
            self._watcher.note(self._forebay.warning)
        try:
            self._forget_the_replaced()
            self._check_room()
            self._have_a_monitor()
            self._register()
            self._wait_for_a_worker()
            return self._watched()
        finally:
            self._services.drain()
            self._leave_the_fleet()

    def _check(self) -> None:
        """Whether all goes on. Raises ChildDied."""
        self._services.check()
        self._have_a_monitor()

    def _have_a_monitor(self) -> None:
        """Start one where nobody's watches the fleet. Beside others it would take a part of all workers over,
        and this machine may have neither their keys nor a way to them.
        """
        if self._services.monitored:
            return
        with suppress(StoreUnavailable):
            if not self._forebay.workers.monitors():
                self._services.start_monitor()

    def _forget_the_replaced(self) -> None:
        """Take the batch out of somebody's Redis in place of which this run was started again: its files are
        gone, so that nobody could end it.
        """
        replaced = self._batch.replaces
        if replaced is None or self._batch.settings.redis_url is None:
            return
        with suppress(UnknownBatch):
            alone = self._forebay.cancel(replaced).forebay.queue == beginning.own_queue(replaced)
            self._forebay.forget(replaced, with_queue=alone)

    def _check_room(self) -> None:
        """Refuse a file for which somebody's queue has no room; a Redis of our own has nobody to protect."""
        batch = self._batch
        if batch.settings.redis_url is None or not batch.fresh:
            return
        counts = submission.read_record(batch.files).request_counts
        self._forebay.check_room(batch.queue, counts.total - counts.failed)

    def _register(self) -> None:
        for spec in self._batch.settings.workers:
            if self._forebay.workers.register(spec).outcome == "created":
                self._added.append(spec.id)

    def _leave_the_fleet(self) -> None:
        """Take the workers out again that this run brought into somebody's Redis, but for those in use: our
        dispatchers have ended, so that whose leases are left are others'.
        """
        if self._batch.settings.redis_url is None:
            return
        for worker in self._added:
            with suppress(StoreUnavailable, UnknownWorker):
                if self._forebay.workers.show(worker).leases:
                    self._watcher.note(f"{worker} stays registered: others use it")
                else:
                    self._forebay.workers.remove(worker)

    def _wait_for_a_worker(self) -> None:
        patience_s = self._batch.settings.wait_ready_s
        deadline = time.monotonic() + patience_s
        company = time.monotonic() + min(patience_s, _COMPANY_S)
        while True:
            self._check()
            workers = self._forebay.workers.list()
            ready = [worker for worker in workers if worker.state is WorkerState.READY]
            if ready and (len(ready) == len(workers) or time.monotonic() >= company):
                return
            if not ready and time.monotonic() >= deadline:
                raise NoWorkerReady(_nobody(workers, patience_s))
            self._watcher.waiting(workers)
            time.sleep(_POLL_S)

    def _watched(self) -> Outcome:
        published = time.monotonic()
        try:
            self._batch.published = True
            self._forebay.publish(self._batch.id, window_s=self._batch.settings.options.window_s)
            often = LOOK_S if self._batch.settings.redis_url else _OWN_LOOK_S
            for seen in self._forebay.progress(self._batch.id, interval_s=often, check=self._check):
                self._seen = seen
                self._watcher.progress(seen)
            return self._ended(published)
        except KeyboardInterrupt:
            return self._interrupted(published)

    def _ended(self, published: float) -> Outcome:
        batch_s = time.monotonic() - published
        settings = self._batch.settings
        record = self._forebay.status(self._batch.id)
        if record.status is BatchStatus.FAILED:
            raise BatchLost(record)
        saved = self._forebay.save_results(self._batch.id, settings.output, settings.errors)
        self._services.drain()  # first, so that its last decision records are written
        self._explain()
        if not settings.keep_state:
            self._forget()
        return self._outcome(record, saved, batch_s)

    def _explain(self) -> None:
        target = self._batch.settings.explain
        if target is None:
            return
        try:
            explanations.write(self._forebay.decisions(self._batch.id), target)
        except StoreUnavailable as error:
            self._watcher.note(f"decisions could not be written to {target}: {error}")

    def _forget(self) -> None:
        """Leave no half of a batch: what Redis knows of one whose files go, the files of one it forgets."""
        if self._batch.private:
            alone = self._batch.queue == beginning.own_queue(self._batch.id)
            with suppress(UnknownBatch):
                self._forebay.forget(self._batch.id, with_queue=alone)
        elif self._batch.settings.redis_url is None:
            self._batch.files.remove_all()

    def _interrupted(self, published: float) -> Outcome:
        batch_s = time.monotonic() - published
        self._services.drain()  # first, so that what it still stores is counted
        record = submission.read_record(self._batch.files)
        with suppress(StoreUnavailable):
            record = self._forebay.status(self._batch.id)
        self._explain()
        return self._outcome(record, None, batch_s)

    def _outcome(self, record: BatchRecord, saved: Saved | None, batch_s: float) -> Outcome:
        workers = self._seen.workers if self._seen else ()
        return Outcome(record, saved, workers, time.monotonic() - self._started, batch_s)


def _nobody(workers: Sequence[WorkerView], patience_s: float) -> str:
    if not workers:
        return "no worker is registered; name at least one with --worker URL"
    lines = [f"  {worker.id} ({worker.state}): {worker.reason or 'no answer'}" for worker in workers]
    return "\n".join([f"no worker became ready within {patience_s:g} s:", *lines])
