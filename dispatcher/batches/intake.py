"""A user's file comes in: one streaming pass that stores it, checks every line and plans the good ones.

Memory does not grow with bytes and takes some fifty bytes a line: rows of numbers are kept, no text. What one
line must look like is `parse`, the form of the result `plan`. The caller decides what becomes of the batch.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import BinaryIO, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from dispatcher.batches.backend import Sink
from dispatcher.batches.duplicates import find_duplicates
from dispatcher.batches.errors import StorageError
from dispatcher.batches.lines import RawLine, split_lines
from dispatcher.batches.parse import BadLine, Line, parse_line, too_long
from dispatcher.batches.parts import INVALID_PART, Entry, encode_entry
from dispatcher.batches.plan import MOST_MODELS, Plan, Rows, write_plan
from dispatcher.batches.prompt import hash64, prompt_tokens
from dispatcher.batches.record import BatchErrorItem, BatchErrors, batch_errors
from dispatcher.batches.results import INVALID_LINE, Usage, error_line, record_id
from dispatcher.batches.storage import INPUT, BatchFiles

LISTED_BAD_LINES = 100
DEFAULT_COMPLETION_TOKENS = 256.0
"""Answer length taken for a model of which nothing is known yet."""

_CHUNK = 1024 * 1024
_MOST_COST = 2**32 - 1


class Limits(BaseModel):
    """What a file may hold. `max_lines` bounds its requests, and its blank lines as well."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_lines: int = Field(default=1_000_000, ge=1, lt=2**31, description="lines of a file")
    max_bytes: int = Field(default=2 * 1024**3, ge=1, description="bytes of a file")
    max_line_bytes: int = Field(default=16 * 1024**2, ge=1, lt=2**31, description="bytes of a line")


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a whole file is refused: `code` for programs, `message` for people."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Intake:
    """What became of a file: planned and ready to run if `problem` is None, else refused and not stored.

    `accepted` lines are requests, `refused` ones are not; `bad_lines` are the first hundred of these, by
    line. `plan` is None when the file is refused.
    """

    accepted: int
    refused: int
    bad_lines: tuple[BadLine, ...]
    problem: Problem | None
    plan: Plan | None

    @property
    def total(self) -> int:
        """Lines that are not blank."""
        return self.accepted + self.refused

    def errors(self) -> BatchErrors | None:
        """Say what is wrong in the form of a batch's record; None when nothing is.

        The bad lines, then the problem of the whole file unless the lines have told all of it.
        """
        items = [
            BatchErrorItem(code=bad.code, message=bad.message, line=bad.number, param=bad.param)
            for bad in self.bad_lines
        ]
        if self.problem is not None and (
            not items or self.problem.code != "invalid_lines" or self.refused > len(items)
        ):
            items.append(BatchErrorItem(code=self.problem.code, message=self.problem.message))
        return batch_errors(items)


def take_in(
    source: BinaryIO,
    files: BatchFiles,
    *,
    bad_lines: Literal["fail", "skip"],
    limits: Limits,
    slots: int,
    mean_completion_tokens: Mapping[str, float],
) -> Intake:
    """Store, check and plan a file.

    With `bad_lines="fail"` one bad line refuses the file; with "skip" bad lines become error lines and the
    good ones run. `slots` is how many requests the fleet holds at once. `mean_completion_tokens` foretells,
    by model, the answers of requests that set no ceiling.

    A refused file leaves nothing behind, unless the storage refuses to delete. Raises `StorageError`, and
    whatever reading `source` raises.
    """
    try:
        with _Refused(files if bad_lines == "skip" else None) as refused:
            intake = _check_and_plan(source, files, refused, limits, slots, mean_completion_tokens)
    except BaseException:
        with suppress(StorageError):  # what went wrong first is what matters
            files.remove_all()
        raise
    if intake.problem is not None:
        with suppress(StorageError):  # why the file is refused is what matters
            files.remove_all()
    return intake


class _Refused:
    """Bad lines: counted, the first ones listed, and their error lines written if there is a place for them.

    A context manager, since the part with the error lines appears when all of it is written.
    """

    def __init__(self, files: BatchFiles | None) -> None:
        """`files` is None when one bad line refuses the whole file, so that error lines are of no use."""
        self.count = 0
        self.skipping = files is not None
        self._files = files
        self._listed: list[BadLine] = []
        self._part: Sink | None = None
        self._open = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.__exit__(kind, raised, trace)

    def add(self, bad: BadLine) -> None:
        self.count += 1
        self._listed.append(bad)
        if len(self._listed) >= 2 * LISTED_BAD_LINES:
            self._listed = list(self.listed())
        if self._files is not None:
            self._write(self._files, bad)

    def listed(self) -> tuple[BadLine, ...]:
        """Give the first of the bad lines, by line."""
        return tuple(sorted(self._listed, key=lambda bad: bad.number)[:LISTED_BAD_LINES])

    def _write(self, files: BatchFiles, bad: BadLine) -> None:
        if self._part is None:
            self._part = self._open.enter_context(files.writing(INVALID_PART))
        name = record_id(files.batch_id, bad.number)
        record = error_line(bad.custom_id, INVALID_LINE, f"{bad.code}: {bad.message}", None, record_id=name)
        self._part.write(encode_entry(Entry(bad.number, ok=False, usage=Usage(None, None), record=record)))


def _check_and_plan(
    source: BinaryIO,
    files: BatchFiles,
    refused: _Refused,
    limits: Limits,
    slots: int,
    mean_completion_tokens: Mapping[str, float],
) -> Intake:
    requests = _Requests(limits, mean_completion_tokens, refused)
    try:
        with files.writing(INPUT) as sink:
            for line in split_lines(_copied(source, sink, limits.max_bytes), limits.max_line_bytes):
                requests.add(line)
    except _TooMuch as excess:
        return Intake(requests.count, refused.count, refused.listed(), excess.problem, None)
    table = requests.rows.table()
    keep = np.ones(len(table), np.bool_)
    for row, bad in find_duplicates(files, table):
        keep[row] = False
        refused.add(bad)
    accepted = int(keep.sum())
    if problem := _problem(accepted, refused):
        return Intake(accepted, refused.count, refused.listed(), problem, None)
    plan = write_plan(files, table, keep, requests.rows.models, slots=slots, refused=refused.count)
    return Intake(accepted, refused.count, refused.listed(), None, plan)


class _TooMuch(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.problem = Problem(code, message)


def _copied(source: BinaryIO, sink: Sink, most_bytes: int) -> Iterator[bytes]:
    """Read the source in chunks, storing each before it is looked at."""
    total = 0
    while chunk := source.read(_CHUNK):
        total += len(chunk)
        if total > most_bytes:
            raise _TooMuch("file_too_large", f"the file is larger than {most_bytes} bytes")
        sink.write(chunk)
        yield chunk


class _Requests:
    """Lines to rows: good ones are added to the plan's rows, bad ones to those refused."""

    def __init__(
        self, limits: Limits, mean_completion_tokens: Mapping[str, float], refused: _Refused
    ) -> None:
        self.rows = Rows()
        self.count = 0
        self._blank = 0
        self._limits = limits
        self._means = mean_completion_tokens
        self._refused = refused

    def add(self, raw: RawLine) -> None:
        match self._parsed(raw):
            case Line() as line:
                self._plan(line, raw)
            case BadLine() as bad:
                self._refused.add(bad)
            case None:
                self._blank += 1
        self._check_count()

    def _parsed(self, raw: RawLine) -> Line | BadLine | None:
        if raw.data is None:
            return too_long(raw.number, self._limits.max_line_bytes)
        return parse_line(raw.number, raw.data)

    def _plan(self, line: Line, raw: RawLine) -> None:
        model = self.rows.model_index(line.model)
        if model is None:
            message = f"the file asks for more than {MOST_MODELS} different models"
            self._refused.add(BadLine(line.number, "too_many_models", message, "body.model", line.custom_id))
            return
        self.count += 1
        prompt = prompt_tokens(line.prompt_chars)
        self.rows.add(
            line=line.number,
            offset=raw.offset,
            length=raw.length,
            model=model,
            prompt_tokens=prompt,
            asked_tokens=line.asked_tokens,
            cost_tokens=min(prompt + self._completion_tokens(line), _MOST_COST),
            prefix_key=line.prefix_key,
            id_hash=hash64(line.custom_id),
        )

    def _completion_tokens(self, line: Line) -> int:
        if not line.generates:
            return 0
        if line.asked_tokens is not None:
            return line.asked_tokens
        return round(self._means.get(line.model or "", DEFAULT_COMPLETION_TOKENS))

    def _check_count(self) -> None:
        most = self._limits.max_lines
        if self.count + self._refused.count > most:
            raise _TooMuch("too_many_lines", f"the file has more than {most} lines")
        if self._blank > most:
            raise _TooMuch("too_many_lines", f"the file has more than {most} blank lines")


def _problem(accepted: int, refused: _Refused) -> Problem | None:
    total = accepted + refused.count
    if not total:
        return Problem("empty_file", "the file holds no requests")
    if refused.count and not refused.skipping:
        return Problem("invalid_lines", f"{refused.count} of {total} lines are refused")
    if not accepted:
        return Problem("empty_file", f"none of the {total} lines is a valid request")
    return None
