"""A new batch of the failed lines of one that has ended: which are taken, and what is said of the new one.

How the lines are found is the subject of ``dispatcher.batches.failed``, how any file becomes a batch that of
``submission``. Blocks.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from dispatcher.batches.errors import StorageMissingError
from dispatcher.batches.failed import FailedLines, failed_lines, read_inputs
from dispatcher.batches.intake import Limits
from dispatcher.batches.plan import open_plan
from dispatcher.batches.record import BatchRecord
from dispatcher.batches.storage import BatchFiles, Storage
from forebay import submission
from forebay.durations import parse_duration, parse_keep
from forebay.errors import RetryRefused
from forebay.submission import Options

RETRY_OF = "retry_of"
"""The key of the new batch's metadata that names the batch it retries."""
LEFT_OUT = "retry_left_out"
"""And the one that counts its failed lines that are no requests; not there when there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What shall be otherwise than in the old batch; None: as it was there."""

    queue: str | None = None
    order: Literal["input", "completed"] | None = None
    strategy: str | None = None
    hedge: bool | None = None
    share: float | None = None
    window_s: float | None = None
    keep: str | float | None = None


def prepare(
    storage: Storage,
    old: BatchRecord,
    changes: Changes,
    *,
    now_s: float,
    slots: int,
    limits: Limits | None = None,
    mean_answers: Mapping[str, float] | None = None,
) -> BatchRecord:
    """Store and plan the failed lines of ``old``, which is how it stands now, under a new id.

    Lines that were cancelled or expired count as failed; those that are no requests are left out. Raises
    RetryRefused, SettingsError for a strategy that is not known here, StorageError, DamagedFileError.
    """
    files = storage.files(old.id)
    failed = _failed(old, files, storage.url)
    try:
        with io.BufferedReader(_Stream(read_inputs(files, failed.rows)), 1024 * 1024) as source:
            return submission.prepare(
                storage,
                source,
                name=(old.metadata or {}).get("input_name", "input"),
                options=_options(old, changes, failed.left_out),
                now_s=now_s,
                slots=slots,
                limits=limits,
                mean_answers=mean_answers,
            )
    except StorageMissingError as error:
        raise _gone(old, storage.url) from error


def _failed(old: BatchRecord, files: BatchFiles, url: str) -> FailedLines:
    if not old.status.final:
        raise RetryRefused(f"{old.id} has not ended, it is {old.status}; wait for its end, or cancel it")
    if not old.request_counts.failed:
        raise RetryRefused(f"no line of {old.id} failed; there is nothing to retry")
    try:
        failed = failed_lines(files, open_plan(files))
    except StorageMissingError as error:
        raise _gone(old, url) from error
    if not len(failed.rows):
        raise RetryRefused(
            f"all {failed.left_out:,} failed lines of {old.id} are no requests (invalid_line); "
            "mend them and submit them anew"
        )
    return failed


def _gone(old: BatchRecord, url: str) -> RetryRefused:
    return RetryRefused(f"the files of {old.id} are gone from {url}, or were never there")


def _options(old: BatchRecord, changes: Changes, left_out: int) -> Options:
    before = old.forebay
    metadata = {key: value for key, value in (old.metadata or {}).items() if key != LEFT_OUT}
    metadata[RETRY_OF] = old.id
    if left_out:
        metadata[LEFT_OUT] = str(left_out)
    options = Options(
        queue=before.queue,
        order=before.order,
        detail=before.detail,
        strategy=before.strategy,
        hedge=before.hedge,
        share=before.share,
        priority=before.priority,
        window_s=parse_duration(old.completion_window),
        keep_s=_keep_s(before.keep, changes.keep),
        metadata=metadata,
    )
    given: dict[str, Any] = {
        name: value
        for name in ("queue", "order", "strategy", "hedge", "share", "window_s")
        if (value := getattr(changes, name)) is not None
    }
    return replace(options, **given)


def _keep_s(before: str | None, anew: str | float | None) -> float | None:
    keep = before if anew is None else anew
    return None if keep is None else parse_keep(keep)


class _Stream(io.RawIOBase):
    """Pieces of bytes as a file that is open for reading."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._held = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if not self._held:
            self._held = memoryview(next(self._pieces, b""))
        count = min(len(buffer), len(self._held))
        buffer[:count] = self._held[:count]
        self._held = self._held[count:]
        return count
