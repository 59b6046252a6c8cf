"""The record of a batch: what users see of it, in the words of OpenAI's Batch object, and its states.

The one transition table is here. Where records are kept is not: the ledger and `batch.json` both hold this.
Pure: the time and the source of randomness come in as arguments.
"""

import random
import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Literal, Self, assert_never

from pydantic import BaseModel, ConfigDict, Field

from dispatcher.batches.errors import IllegalMoveError


class BatchStatus(StrEnum):
    """Where a batch stands. Times are whole seconds since 1970."""

    VALIDATING = "validating"
    """Made so. Left when its file is planned, refused, or no longer wanted."""

    FAILED = "failed"
    """Its file was refused, or lost before the end. Final."""

    IN_PROGRESS = "in_progress"
    """Entered when its shards are queued; left when the last one is done, at the deadline, or by cancel."""

    FINALIZING = "finalizing"
    """Entered when every shard is done; left when both result files are written, or back to in_progress when
    results turn out to be missing from the storage."""

    COMPLETED = "completed"
    """Both files are written and every line was tried, however many failed. Final."""

    EXPIRED = "expired"
    """The deadline came first; lines without a result became `batch_expired`. Final."""

    CANCELLING = "cancelling"
    """Someone asked for the end; left when nothing is in flight and both result files are written."""

    CANCELLED = "cancelled"
    """Cancelled; lines without a result became `batch_cancelled`. Final."""

    @property
    def final(self) -> bool:
        """Whether nothing leads out of it."""
        return not MOVES[self]


_BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")

_S = BatchStatus
MOVES: Mapping[BatchStatus, frozenset[BatchStatus]] = {
    _S.VALIDATING: frozenset({_S.IN_PROGRESS, _S.FAILED, _S.CANCELLING, _S.EXPIRED}),
    _S.IN_PROGRESS: frozenset({_S.FINALIZING, _S.FAILED, _S.CANCELLING, _S.EXPIRED}),
    # All lines have results here, so there is nothing left to cancel.
    _S.FINALIZING: frozenset({_S.COMPLETED, _S.FAILED, _S.EXPIRED, _S.IN_PROGRESS}),
    _S.CANCELLING: frozenset({_S.CANCELLED, _S.FAILED, _S.EXPIRED}),
    _S.COMPLETED: frozenset(),
    _S.FAILED: frozenset(),
    _S.EXPIRED: frozenset(),
    _S.CANCELLED: frozenset(),
}
"""From each status to those that may follow it."""
FINAL: frozenset[str] = frozenset(status for status in BatchStatus if status.final)
"""The final ones. One that is not known here, since a newer version wrote it, is not among them."""


class _Frozen(BaseModel):
    """What is read back may be of a newer version: a field that is not known here is left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class RequestCounts(_Frozen):
    """Lines that are not blank. Those refused at intake count in `total` and in `failed`."""

    total: int = Field(default=0, ge=0)
    completed: int = Field(default=0, ge=0)
    failed: int = Field(default=0, ge=0)


class BatchUsage(_Frozen):
    """Tokens that engines counted, over all lines that said so."""

    input_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)


class BatchErrorItem(_Frozen):
    """One thing wrong with the file. `line` is None if it is the whole file, `param` if it is no one key."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(_Frozen):
    """What was wrong with the file, by line; at most the first hundred lines."""

    object: Literal["list"] = "list"
    data: tuple[BatchErrorItem, ...] = ()


class BatchOptions(_Frozen):
    """What Forebay knows of a batch beyond OpenAI's fields.

    `slots` is for how many requests at once the plan was cut, `shards` into how many pieces; both are None
    until it is planned. `priority` orders batches within a queue, higher first. `share` is how much of the
    fleet it gets beside others of its queue, in proportion to theirs. `hedge` says whether its requests may
    get second attempts; None: as the dispatcher is set. `keep` is a duration such as "30d", from its end to
    the removal of its files and keys; None: they stay. `remove_at` is when that will be, in whole seconds
    since 1970; None before the end. `trouble` says, for people, why the files of a batch that has not ended
    cannot be used now.
    """

    queue: str = "default"
    priority: int = 0
    bad_lines: Literal["fail", "skip"] = "fail"
    order: Literal["input", "completed"] = "input"
    detail: bool = True
    strategy: str | None = None
    hedge: bool | None = None
    share: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    keep: str | None = None
    remove_at: int | None = None
    slots: int | None = Field(default=None, ge=1)
    shards: int | None = Field(default=None, ge=0)
    trouble: str | None = None


class BatchRecord(_Frozen):
    """A batch as everyone sees it; immutable, so a change is a new record.

    Field names, and null for what does not exist yet, are OpenAI's. `endpoint` and `model` are None when the
    file uses several. `completion_window` is a duration such as "24h". Times are whole seconds since 1970.
    """

    id: str = Field(min_length=1)
    object: Literal["batch"] = "batch"
    endpoint: str | None = None
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str | None = Field(default=None, min_length=1)
    completion_window: str = "24h"
    status: BatchStatus = BatchStatus.VALIDATING
    output_file_id: str | None = Field(default=None, min_length=1)
    error_file_id: str | None = Field(default=None, min_length=1)
    created_at: int = Field(ge=0)
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage | None = None
    metadata: Mapping[str, str] | None = None
    forebay: BatchOptions = BatchOptions()

    def moved(self, status: BatchStatus, now_s: float) -> Self:
        """Give the record in another status, with the time at which it got there.

        Moving to the status that it has changes nothing. Raises `IllegalMoveError` when the table of moves
        has no such move.
        """
        if status is self.status:
            return self
        if status not in MOVES[self.status]:
            raise IllegalMoveError(f"batch {self.id} cannot go from {self.status} to {status}")
        return self.model_copy(update={"status": status, _stamp(status): int(now_s)})

    def to_json(self) -> bytes:
        """Write as JSON, nulls included; `from_json` gives the same record back."""
        return self.model_dump_json().encode()

    @classmethod
    def from_json(cls, data: bytes | str) -> Self:
        """Read what `to_json` wrote. Raises pydantic's ValidationError."""
        return cls.model_validate_json(data)


def new_batch_id(rng: random.Random) -> str:
    """Make an id of 96 random bits. Pass `random.SystemRandom()` wherever ids must not be guessed."""
    return f"batch_{rng.getrandbits(96):024x}"


def is_batch_id(name: str) -> bool:
    """Whether `new_batch_id` could have made it. What is removed as a batch's folder has such a name."""
    return _BATCH_ID.fullmatch(name) is not None


def batch_errors(items: Iterable[BatchErrorItem]) -> BatchErrors | None:
    """Make the list of errors; None when there are none."""
    data = tuple(items)
    return BatchErrors(data=data) if data else None


def _stamp(status: BatchStatus) -> str:
    """Name the field that says when a status was entered."""
    match status:
        case BatchStatus.VALIDATING:
            return "created_at"
        case (
            BatchStatus.IN_PROGRESS
            | BatchStatus.FINALIZING
            | BatchStatus.COMPLETED
            | BatchStatus.FAILED
            | BatchStatus.EXPIRED
            | BatchStatus.CANCELLING
            | BatchStatus.CANCELLED
        ):
            return f"{status.value}_at"
        case _:
            assert_never(status)
