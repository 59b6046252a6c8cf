"""The failed lines of a batch that has ended: which they are, and their text as it stands in the input.

Read from the error file, the plan and the input; what a new batch is made of them is not decided here. Memory
takes some thirty bytes a line. All of it blocks: call it from a thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from dispatcher.batches.errors import ChangedInputError, DamagedFileError
from dispatcher.batches.plan import Plan
from dispatcher.batches.ranges import blocks
from dispatcher.batches.results import INVALID_LINE, record_id
from dispatcher.batches.storage import ERRORS, INPUT, BatchFiles

_BLOCK_BYTES = 8 * 1024 * 1024
_BLOCK_LINES = 4096
_DIGEST = "S12"
"""What tells one result's id from another: 24 hexadecimal digits, as bytes."""


@dataclass(frozen=True, slots=True)
class FailedLines:
    """`rows`: of the plan, in the order of the input. `left_out` counts failed lines that are no requests."""

    rows: NDArray[np.void]
    left_out: int


class _Error(msgspec.Struct):
    code: str


class _Record(msgspec.Struct):
    id: str
    error: _Error | None = None


_decode = msgspec.json.Decoder(_Record).decode


def failed_lines(files: BatchFiles, plan: Plan) -> FailedLines:
    """Find the requests of the error file in the plan.

    Raises `DamagedFileError` when they are not all there, `StorageMissingError` without an error file.
    """
    digests, left_out = _read_errors(files)
    found = [block[np.isin(_digests(files.batch_id, block), digests)] for block in plan.blocks()]
    rows = np.concatenate(found)
    if len(rows) != len(digests):
        raise DamagedFileError(f"{ERRORS} of {files.batch_id} does not fit its plan")
    return FailedLines(rows[np.argsort(rows["line"])], left_out)


def read_inputs(files: BatchFiles, rows: NDArray[np.void]) -> Iterator[bytes]:
    """Read the lines of some rows as they were written, each with a line feed.

    Raises `ChangedInputError` when the input is shorter than it was, `StorageMissingError` without one.
    """
    for block in blocks(rows["length"].tolist(), _BLOCK_BYTES, _BLOCK_LINES):
        some = rows[block]
        lengths = some["length"].tolist()
        ranges = zip(some["offset"].tolist(), lengths, strict=True)
        for data, length in zip(files.read_ranges(INPUT, ranges), lengths, strict=True):
            if len(data) != length:
                raise ChangedInputError(f"{INPUT} of {files.batch_id} is cut off")
            yield data + b"\n"


def _read_errors(files: BatchFiles) -> tuple[NDArray[np.bytes_], int]:
    digests, left_out = bytearray(), 0
    with files.open(ERRORS) as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = _decode(line)
                digest = _digest(record.id)
            except (msgspec.DecodeError, ValueError) as error:
                raise DamagedFileError(f"{ERRORS} of {files.batch_id}, line {number}: {error}") from error
            if record.error is not None and record.error.code == INVALID_LINE:
                left_out += 1
            else:
                digests += digest
    return np.frombuffer(digests, _DIGEST), left_out


def _digests(batch_id: str, block: NDArray[np.void]) -> NDArray[np.bytes_]:
    names = (_digest(record_id(batch_id, line)) for line in block["line"].tolist())
    return np.frombuffer(b"".join(names), _DIGEST)


def _digest(name: str) -> bytes:
    digest = bytes.fromhex(name.rpartition("_")[2])
    if len(digest) != np.dtype(_DIGEST).itemsize:
        raise ValueError(f"{name[:64]!r} is no id of a result")
    return digest
