"""The Python client: the verbs of the command line, for programs. Synchronous and typed.

::

    with Forebay("redis://localhost:6379/0") as forebay:
        batch = forebay.submit("prompts.jsonl")
        forebay.wait(batch.id)
        for result in forebay.results(batch.id):
            print(result["custom_id"], result["response"])

Everything is done by ``desk`` on one event loop, in a thread that the client owns; there is no second,
synchronous way to do it. Calls may come from any thread. What reads or writes a batch's files runs in the
calling thread.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self, TypeVar

import msgspec
from anyio.from_thread import BlockingPortal, start_blocking_portal

from dispatcher.batches.errors import DamagedFileError, StorageError, UnreadableRecordError
from dispatcher.batches.parse import ALLOWED_URLS
from dispatcher.batches.record import BatchRecord
from dispatcher.inline_request import InlineRequestError, read_request
from dispatcher.records import DecisionRecord
from forebay import explanations, retrying, submission
from forebay import results as result_files
from forebay.desk import Desk, Forgotten
from forebay.durations import parse_duration
from forebay.errors import WaitedTooLong
from forebay.explanations import Explained
from forebay.fleet import Workers
from forebay.inline import Answer, Inline
from forebay.progress import Pace, Progress, look
from forebay.recovery import Resumed
from forebay.settings import FrontSettings, front_settings
from forebay.submission import Options
from workers.errors import SettingsError, StoreUnavailable

T = TypeVar("T")

LOOK_S = 0.5
"""Seconds from one look at a batch to the next."""
PATIENCE_S = 300.0
"""How long an outage of Redis is waited out while watching a batch."""
_RECORDS_AT_ONCE = 500
"""Requests whose decision records are read in one round trip: bounds what they hold."""


class Forebay:
    """A fleet's front door. A context manager; without one, call ``close``.

    ``redis_url`` and ``storage`` (a folder or any fsspec URL, the same that the dispatchers have) default to
    ``FOREBAY_REDIS_URL`` and ``FOREBAY_STORAGE``, then to ``forebay.toml``, then to a Redis on this machine
    and a folder below the user's data folder.

    Every method raises StoreUnavailable when Redis does not answer and UnknownBatch for an id that it does
    not know; those that touch files raise StorageError.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        storage: str | None = None,
        *,
        settings: FrontSettings | None = None,
    ) -> None:
        """Connect. Raises SettingsError for impossible URLs, StoreUnavailable, TooOld."""
        self.settings = settings or front_settings(redis_url, storage)
        self._closing = ExitStack()
        try:
            self._portal: BlockingPortal = self._closing.enter_context(start_blocking_portal("asyncio"))
            self.desk = Desk(self.settings)
            self._closing.callback(self._portal.call, self.desk.close)
            self.warning: str | None = self._portal.call(self.desk.check)
            """Why this Redis may lose what is stored in it, or None."""
        except BaseException:
            self._closing.close()
            raise
        self.workers = Workers(self._portal, self.desk.fleet)
        """The fleet: add, list, show, drain, remove, reset."""
        self._inline = Inline(self.desk.connection)

    def close(self) -> None:
        """End the connections and the thread. Doing it twice does nothing."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- batches ------------------------------------------------------------------------------------------

    def submit(
        self,
        source: str | os.PathLike[str] | BinaryIO,
        *,
        queue: str = "default",
        bad_lines: Literal["fail", "skip"] = "fail",
        order: Literal["input", "completed"] = "input",
        detail: bool = True,
        strategy: str | None = None,
        hedge: bool | None = None,
        share: float = 1.0,
        window: str | float = "24h",
        keep: str | float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> BatchRecord:
        """Store, check and plan a batch file (a path, or a file open for reading bytes), and queue it.

        ``bad_lines="skip"`` lets good lines run and makes error lines of the bad ones; ``order`` is that of
        the result files; ``detail`` adds the ``forebay`` key to each result; ``strategy`` names how workers
        are chosen; ``hedge`` says whether requests on slow workers may get a second attempt on faster ones at
        the end (None, of both: as the dispatcher is set); ``share`` is how much of the fleet the batch gets
        beside others of its queue (above 0; one of 2 gets twice as much as one of 1); ``window`` is the time
        to the deadline, as ``24h`` or in seconds; ``keep`` how long its files and keys stay after its end, as
        ``30d``, in seconds, or ``forever`` (None: as it is configured, else for ever). Raises RefusedInput,
        which lists the bad lines, and SettingsError for an unknown strategy, an impossible share or metadata
        that is no text, and QueueFull when more requests would wait in the queue than
        ``most_queued_requests`` says; then nothing is left behind.
        """
        options = Options(
            queue=queue,
            bad_lines=bad_lines,
            order=order,
            detail=detail,
            strategy=strategy,
            hedge=hedge,
            share=share,
            window_s=parse_duration(str(window)),
            keep_s=self.settings.keep_s(keep),
            metadata=metadata,
        )
        if isinstance(source, str | os.PathLike):
            with Path(source).open("rb") as opened:
                return self._submit(opened, Path(source).name, options)
        return self._submit(source, str(getattr(source, "name", "input")), options)

    def _submit(self, source: BinaryIO, name: str, options: Options) -> BatchRecord:
        self.check_room(options.queue, 1)  # before a large file is stored in vain
        record = submission.prepare(
            self.desk.storage,
            source,
            name=name,
            options=options,
            now_s=self._portal.call(self.desk.ledger.now),
            slots=self._portal.call(self.desk.slots),
            limits=self.settings.input,
            mean_answers=self._portal.call(self.desk.lengths.means),
        )
        return self._publish_new(record)

    def _publish_new(self, record: BatchRecord) -> BatchRecord:
        """Queue what was just prepared, if there is room for it; else nothing of it stays."""
        counts = record.request_counts
        try:
            self.check_room(record.forebay.queue, counts.total - counts.failed)
        except BaseException:
            with suppress(StorageError):  # that there is no room is what matters
                self.desk.storage.files(record.id).remove_all()
            raise
        return self.publish(record.id)

    def check_room(self, queue: str, lines: int) -> None:
        """Whether so many lines more may wait in a queue. Raises QueueFull."""
        self._portal.call(self.desk.check_room, queue, lines)

    def retry(
        self,
        batch_id: str,
        *,
        queue: str | None = None,
        order: Literal["input", "completed"] | None = None,
        strategy: str | None = None,
        hedge: bool | None = None,
        share: float | None = None,
        window: str | float | None = None,
        keep: str | float | None = None,
    ) -> BatchRecord:
        """Make a new batch of only the failed lines of one that has ended, and queue it.

        Lines that were cancelled or expired are among them; lines that are no requests are left out, and
        counted in the new batch's metadata as ``retry_left_out``. Its metadata names the old batch as
        ``retry_of``. What is None is as it was in the old batch. Raises RetryRefused when that has not ended,
        none of its lines failed, or its files are gone; DamagedFileError; QueueFull as for ``submit``.
        """
        record = retrying.prepare(
            self.desk.storage,
            self.status(batch_id),
            retrying.Changes(
                queue=queue,
                order=order,
                strategy=strategy,
                hedge=hedge,
                share=share,
                window_s=None if window is None else parse_duration(str(window)),
                keep=keep,
            ),
            now_s=self._portal.call(self.desk.ledger.now),
            slots=self._portal.call(self.desk.slots),
            limits=self.settings.input,
            mean_answers=self._portal.call(self.desk.lengths.means),
        )
        return self._publish_new(record)

    def publish(self, batch_id: str, *, window_s: float | None = None) -> BatchRecord:
        """Make a batch known and queue it, from its files alone; what is known and queued stays as it is.

        ``window_s`` gives a batch that Redis does not know a new deadline, so many seconds from now.
        """
        self._portal.call(self.desk.publish, batch_id, window_s)
        return self.status(batch_id)

    def resume(self, batch_id: str, *, window: str | float | None = None) -> Resumed:
        """Bring a batch back of which Redis lost something: all of it, when it was emptied, or some jobs.

        What has durable results is not sent again; what is missing nowhere stays as it is. ``window`` gives a
        batch that Redis did not know a new deadline, counted from now, as ``24h`` or in seconds; None leaves
        it. Raises UnknownBatch when it has no files either.
        """
        window_s = None if window is None else parse_duration(str(window))
        return self._portal.call(self.desk.resume, batch_id, window_s)

    def forgotten(self, on_damaged: Callable[[DamagedFileError], object] | None = None) -> list[BatchRecord]:
        """Batches that have files here and that Redis does not know, newest first: see ``resume``.

        One whose record cannot be read is left out; ``on_damaged`` is called with what is wrong with it.
        """
        lost = self._portal.call(self.desk.forgotten)
        if on_damaged is not None:
            for error in lost.damaged:
                on_damaged(error)
        return lost.records

    def status(self, batch_id: str) -> BatchRecord:
        """The batch as it stands now. Raises UnreadableRecordError when a newer version wrote it."""
        return self._portal.call(self.desk.record, batch_id)

    def batches(
        self, limit: int = 100, on_unreadable: Callable[[UnreadableRecordError], object] | None = None
    ) -> list[BatchRecord]:
        """The newest batches, newest first.

        One that this version cannot read is left out; ``on_unreadable`` is called with what is wrong with it.
        """
        known = self._portal.call(self.desk.records, limit)
        if on_unreadable is not None:
            for error in known.unreadable:
                on_unreadable(error)
        return known.records

    def cancel(self, batch_id: str) -> BatchRecord:
        """Ask for a batch's end. Lines that have results keep them; the others become ``batch_cancelled``.

        Changes nothing when all lines have results already.
        """
        return self._portal.call(self.desk.cancel, batch_id)

    def forget(self, batch_id: str, *, with_queue: bool = False, files: bool = False) -> Forgotten:
        """Remove what Redis knows of a batch that has ended; says what there was.

        ``with_queue``: and its queue, which was its alone. ``files``: and its files, for good; else they
        stay, and ``resume`` brings it back. Raises NotEnded, UnknownBatch when there is nothing of it, and
        StorageMissingError when its files are to be removed and are not here; then it stays known.
        """
        return self._portal.call(self.desk.forget, batch_id, with_queue, files)

    def progress(
        self,
        batch_id: str,
        *,
        interval_s: float = LOOK_S,
        patience_s: float = PATIENCE_S,
        check: Callable[[], object] = lambda: None,
    ) -> Iterator[Progress]:
        """Look at a batch every ``interval_s`` seconds until it has ended; the last look shows its end.

        An outage of Redis is waited out for up to ``patience_s`` seconds. ``check`` is called before every
        look, also during an outage; what it raises ends the watching.
        """
        pace = Pace()
        models = self._portal.call(self.desk.models, batch_id)
        started_s: float | None = None
        last_seen_s = time.monotonic()
        while True:
            check()
            try:
                entry = self._portal.call(self.desk.entry, batch_id)
                fleet = self._portal.call(self.desk.fleet.view)
            except StoreUnavailable:
                if time.monotonic() - last_seen_s > patience_s:
                    raise
            else:
                last_seen_s = time.monotonic()
                started_s = fleet.now_s if started_s is None else started_s
                seen = look(entry, fleet, pace, started_s=started_s, models=models)
                yield seen
                if seen.status.final:
                    return
            time.sleep(interval_s)

    def wait(
        self,
        batch_id: str,
        on_progress: Callable[[Progress], object] | None = None,
        timeout_s: float | None = None,
    ) -> BatchRecord:
        """Wait until a batch has ended; returns how it stands then.

        ``on_progress`` is called with every look. Raises WaitedTooLong after ``timeout_s``, even while Redis
        is away; None: never.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        known = "not known yet"
        looks = itertools.count()

        def check() -> None:
            if next(looks) and time.monotonic() >= deadline:
                raise WaitedTooLong(f"{batch_id} has not ended after {timeout_s:g} s; it is {known}")

        for seen in self.progress(batch_id, check=check):
            known = seen.status.value
            if on_progress is not None:
                on_progress(seen)
        return self.status(batch_id)

    def results(self, batch_id: str) -> Iterator[dict[str, Any]]:
        """The results, good ones first; of a running batch, those that are durable so far.

        Raises StorageMissingError when the batch's files are not in this client's storage.
        """
        record = self.status(batch_id)
        files = result_files.files_of(self.desk.storage, record)
        decode = msgspec.json.Decoder(dict[str, Any]).decode
        return (decode(line) for line in result_files.records(files, final=record.status.final))

    def save_results(
        self,
        batch_id: str,
        output: str | os.PathLike[str],
        errors: str | os.PathLike[str] | None = None,
    ) -> result_files.Saved:
        """Write the results to files, each whole or not at all; of a running batch, those so far.

        ``errors`` None: beside the output, with ``.errors.jsonl`` in place of its suffix. A file that would
        be empty is not made. Existing files are replaced. Raises SettingsError for places where they cannot
        be, OSError, and StorageMissingError when the batch's files are not in this client's storage; then
        existing files stay.
        """
        good, bad = result_files.targets(Path(output), None if errors is None else Path(errors))
        record = self.status(batch_id)
        return result_files.save(
            result_files.files_of(self.desk.storage, record),
            final=record.status.final,
            output=good,
            errors=bad,
        )

    # -- decisions ----------------------------------------------------------------------------------------

    def explain(
        self,
        name: str,
        *,
        batch_id: str | None = None,
        on_unreadable: Callable[[str], object] = lambda _: None,
    ) -> Explained:
        """Why a request went where it went: its last attempts that were recorded.

        ``name`` is a line's custom_id, the id of a result, or an inline request's job; of lines with that
        custom_id in several batches the newest, unless ``batch_id`` names one. A record that this version
        cannot read is left out; ``on_unreadable`` is called with its request's id. Raises NotRecorded.
        """
        found = self._portal.call(self.desk.archive.find, name, batch_id, on_unreadable)
        return explanations.newest(found, name)

    def decisions(
        self,
        batch_id: str | None = None,
        *,
        on_unreadable: Callable[[str], object] = lambda _: None,
    ) -> Iterator[DecisionRecord]:
        """All decision records that are kept, or those of one batch, request by request.

        One that this version cannot read is left out; ``on_unreadable`` is called with its request's id.
        """
        request_ids = self._portal.call(self.desk.archive.requests, batch_id)
        for start in range(0, len(request_ids), _RECORDS_AT_ONCE):
            some = request_ids[start : start + _RECORDS_AT_ONCE]
            for attempts in self._portal.call(self.desk.archive.of_requests, some, on_unreadable):
                yield from attempts

    # -- single requests ----------------------------------------------------------------------------------

    def enqueue(
        self,
        body: dict[str, Any],
        *,
        url: str = "/v1/chat/completions",
        queue: str = "default",
        timeout_s: float | None = None,
    ) -> str:
        """Queue one request; returns its job's id. ``timeout_s`` None: the dispatcher's default.

        Raises SettingsError for a url that no worker may be asked, and for a body that no line of a file may
        have.
        """
        if url not in ALLOWED_URLS:
            raise SettingsError(f"{url} is not allowed; there are {', '.join(sorted(ALLOWED_URLS))}")
        try:
            read_request(body, url)
        except InlineRequestError as error:
            raise SettingsError(str(error)) from error
        return self._inline.enqueue(queue, body, url=url, timeout_s=timeout_s)

    def answer(self, job_id: str, *, queue: str = "default", timeout_s: float | None = None) -> Answer:
        """Wait for the answer to a request of this queue. Raises WaitedTooLong, UnknownJob."""
        return self._inline.answer(queue, job_id, timeout_s=timeout_s)
