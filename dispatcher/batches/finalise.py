"""The parts of a batch become its two result files, and the counts are held against the plan.

Memory stays bounded: records are copied to one spool while an index of numbers remembers where each line's
is; then they are written in the wished order. Running it again gives the same bytes, and two that run at once
do no harm.
"""

import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dispatcher.batches.backend import Sink
from dispatcher.batches.errors import ChangedInputError, DamagedPartError, MissingLinesError
from dispatcher.batches.parse import read_custom_id
from dispatcher.batches.parts import (
    INVALID_PART,
    INVALID_SHARD,
    Entry,
    done_lines,
    first_entries,
    shard_entries,
)
from dispatcher.batches.plan import Plan
from dispatcher.batches.ranges import Range, blocks
from dispatcher.batches.results import Usage, error_line, record_id
from dispatcher.batches.spool import Spool
from dispatcher.batches.storage import ERRORS, INPUT, OUTPUT, BatchFiles

Fill = Callable[[int, str], bytes]
"""Line number and custom_id to the record of a line that has no result."""

_INDEX = np.dtype([("line", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("ok", "?")])
_PACKED = struct.Struct("<IQI?")
_BLOCK_BYTES = 8 * 1024 * 1024
_BLOCK_LINES = 4096
_NAMED_MISSING = 10
_NO_USAGE = Usage(None, None)


@dataclass(frozen=True, slots=True)
class Totals:
    """Lines of the output file, lines of the error file, and the tokens that engines counted.

    A file exists exactly when it has lines. What an engine did not count adds nothing.
    """

    completed: int
    failed: int
    prompt_tokens: int
    completion_tokens: int


def fill_with(batch_id: str, code: str, message: str) -> Fill:
    """Answer lines that have no result with an error line, as `batch_cancelled` and `batch_expired` do."""

    def fill(line: int, custom_id: str) -> bytes:
        return error_line(custom_id, code, message, None, record_id=record_id(batch_id, line))

    return fill


def finalise(
    files: BatchFiles, plan: Plan, *, order: Literal["input", "completed"], fill: Fill | None = None
) -> Totals:
    """Write output.jsonl and errors.jsonl from the parts; a file that would be empty is not made.

    Each line's first durable result counts. `order` is by line of the input, or as results became durable,
    filled lines last. Without `fill`, lines that have no result raise `MissingLinesError` and nothing is
    written. Raises `DamagedPartError` for a result of no line of the plan, and `StorageError`.
    """
    with files.spool() as spool:
        index = _Index(spool)
        for entry in first_entries(files):
            index.add(entry)
        for entry in _missing_entries(files, plan, index.lines(), fill):
            index.add(entry)
        table = index.table()
        rows = np.argsort(table["line"]) if order == "input" else np.arange(len(table))
        _write(files, spool, table[rows])
    completed = int(table["ok"].sum())
    return Totals(completed, len(table) - completed, index.prompt_tokens, index.completion_tokens)


def incomplete_shards(files: BatchFiles, plan: Plan) -> list[int]:
    """Number the shards of which a line has no durable result. Raises `DamagedPartError`, `StorageError`."""
    return [
        shard
        for shard in range(plan.shard_count)
        if {request.line for request in plan.shard(shard)} - done_lines(files, shard).keys()
    ]


class _Index:
    """Records in a spool, and where each one is: a few bytes a line."""

    def __init__(self, spool: Spool) -> None:
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self._spool = spool
        self._rows = bytearray()
        self._end = 0

    def add(self, entry: Entry) -> None:
        record = entry.record + b"\n"
        self._rows += _PACKED.pack(entry.line, self._end, len(record), entry.ok)
        self._spool.write(record)
        self._end += len(record)
        self.prompt_tokens += entry.usage.prompt_tokens or 0
        self.completion_tokens += entry.usage.completion_tokens or 0

    def lines(self) -> NDArray[np.uint32]:
        # A copy, since the buffer cannot grow while a view of it lives.
        return self.table()["line"].copy()

    def table(self) -> NDArray[np.void]:
        return np.frombuffer(self._rows, _INDEX)


def _missing_entries(
    files: BatchFiles, plan: Plan, answered: NDArray[np.uint32], fill: Fill | None
) -> Iterator[Entry]:
    """Hold the lines that have results against the plan, and fill those that have none."""
    planned = np.concatenate([block["line"] for block in plan.blocks()])
    _check_no_foreign_lines(files, plan, planned, answered)
    missing = np.setdiff1d(planned, answered)
    if not len(missing):
        return
    if fill is None:
        raise MissingLinesError(len(missing), tuple(missing[:_NAMED_MISSING].tolist()))
    for line, custom_id in _custom_ids(files, plan, missing):
        yield Entry(line, ok=False, usage=_NO_USAGE, record=fill(line, custom_id))


def _check_no_foreign_lines(
    files: BatchFiles, plan: Plan, planned: NDArray[np.uint32], answered: NDArray[np.uint32]
) -> None:
    refused = np.fromiter((entry.line for entry in shard_entries(files, INVALID_SHARD)), np.uint32)
    if len(refused) != plan.refused:
        raise DamagedPartError(
            f"{INVALID_PART} of {files.batch_id} holds {len(refused)} lines, and {plan.refused} were refused"
        )
    foreign = np.setdiff1d(answered, np.concatenate((planned, refused)))
    if len(foreign):
        raise DamagedPartError(
            f"the parts of {files.batch_id} hold line {foreign[0]}, which was never planned"
        )


def _custom_ids(files: BatchFiles, plan: Plan, lines: NDArray[np.uint32]) -> Iterator[tuple[int, str]]:
    for rows in plan.blocks():
        wanted = rows[np.isin(rows["line"], lines)]
        for block in blocks(wanted["length"].tolist(), _BLOCK_BYTES, _BLOCK_LINES):
            some = wanted[block]
            ranges = zip(some["offset"].tolist(), some["length"].tolist(), strict=True)
            for line, data in zip(some["line"].tolist(), files.read_ranges(INPUT, ranges), strict=True):
                if (custom_id := read_custom_id(data)) is None:
                    raise ChangedInputError(f"line {line} of {INPUT} no longer has the custom_id it had")
                yield line, custom_id


def _write(files: BatchFiles, spool: Spool, rows: NDArray[np.void]) -> None:
    """Write both files in the order of `rows`; neither appears before both are whole."""
    with ExitStack() as sinks:
        for name, mine in ((OUTPUT, rows[rows["ok"]]), (ERRORS, rows[~rows["ok"]])):
            if len(mine):
                _copy(spool, mine, sinks.enter_context(files.writing(name)))
            else:
                files.remove(name)


def _copy(spool: Spool, rows: NDArray[np.void], sink: Sink) -> None:
    for block in blocks(rows["length"].tolist(), _BLOCK_BYTES, _BLOCK_LINES):
        some = rows[block]
        ranges = [
            Range(*piece) for piece in zip(some["offset"].tolist(), some["length"].tolist(), strict=True)
        ]
        sink.write(b"".join(spool.read_ranges(ranges)))
