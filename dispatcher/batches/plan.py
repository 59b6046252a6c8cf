"""The plan of a batch: one row for each accepted line, in the order of sending, cut into shards.

Order: by cost, dearest first, in buckets that are powers of two; within a bucket by prefix, so that
neighbours share a beginning that an engine has cached; then by line. The dearest come first because a long
request that starts last decides when the batch ends.

`intake` fills the rows, `shards` says where to cut; a dispatcher reads one shard at a time, whose cost does
not depend on the size of the file. `plan.npy` is an ordinary NumPy file.
"""

import io
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dispatcher.batches.errors import ChangedInputError, DamagedPlanError
from dispatcher.batches.parse import Line, parse_line
from dispatcher.batches.shards import cost_steps, cut
from dispatcher.batches.storage import INPUT, PLAN, SHARDS, BatchFiles

Table = NDArray[np.void]
"""Rows of the plan."""

ROW = np.dtype(
    [
        ("line", "<u4"),
        ("offset", "<u8"),
        ("length", "<u4"),
        ("model", "<u2"),  # index into the plan's models
        ("prompt_tokens", "<u4"),
        ("asked_tokens", "<i4"),  # -1: the line sets no ceiling
        ("cost_tokens", "<u4"),
        ("prefix_key", "<u8"),
        ("id_hash", "<u8"),  # of the custom_id
    ]
)
_PACKED = struct.Struct("<IQIHIiIQQ")  # the same, since packing is much faster than assigning a NumPy row
MOST_MODELS = 1024
_VERSION = 1
_BLOCK_ROWS = 65_536
_LARGEST_HEADER = 4096


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One row. `offset` and `length` are the line's bytes in the input, without its line feed.

    `model` is None when any worker may take it, `asked_tokens` when the line sets no ceiling. `cost_tokens`
    estimates all tokens, read and written. `prefix_key` is an unsigned 64-bit hash.
    """

    line: int
    offset: int
    length: int
    model: str | None
    prompt_tokens: int
    asked_tokens: int | None
    cost_tokens: int
    prefix_key: int


class Rows:
    """Rows being collected: one growing buffer, no object for a row."""

    def __init__(self) -> None:
        """Begin with none."""
        self._buffer = bytearray()
        self._models: dict[str | None, int] = {}

    def model_index(self, model: str | None) -> int | None:
        """Number a model in order of appearance; None when there are too many different ones."""
        index = self._models.get(model)
        if index is None and len(self._models) < MOST_MODELS:
            index = self._models[model] = len(self._models)
        return index

    def add(
        self,
        line: int,
        offset: int,
        length: int,
        model: int,
        prompt_tokens: int,
        asked_tokens: int | None,
        cost_tokens: int,
        prefix_key: int,
        id_hash: int,
    ) -> None:
        """Append a row; rows come in the order of their lines."""
        asked = -1 if asked_tokens is None else asked_tokens
        self._buffer += _PACKED.pack(
            line, offset, length, model, prompt_tokens, asked, cost_tokens, prefix_key, id_hash
        )

    def table(self) -> Table:
        """View the rows as a table; none may be added afterwards."""
        return np.frombuffer(self._buffer, ROW)

    @property
    def models(self) -> list[str | None]:
        """The models by index."""
        return list(self._models)


class _Shards(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What shards.json holds, so that it can be read by people too."""

    version: int
    total: int
    refused: int
    cost_tokens: int
    models: list[str | None]
    sizes: list[int]
    cost_steps: list[tuple[int, int]] = []


def write_plan(
    files: BatchFiles,
    table: Table,
    keep: NDArray[np.bool_],
    models: list[str | None],
    *,
    slots: int,
    refused: int,
) -> "Plan":
    """Order the rows that `keep` marks, cut them for a fleet of `slots` and store the plan.

    `table` is in line order. `refused` counts the lines that are no requests and have an error line instead.
    """
    order = sending_order(table)
    order = with_scouts(order[keep[order]], slots)
    with files.writing(PLAN) as sink:
        sink.write(_header(len(order)))
        for start in range(0, len(order), _BLOCK_ROWS):
            sink.write(table[order[start : start + _BLOCK_ROWS]].tobytes())
    cost = int(table["cost_tokens"][keep].sum(dtype=np.uint64))
    sizes = cut(len(order), slots)
    steps = cost_steps(_costs(table["cost_tokens"][order], sizes))
    shards = _Shards(_VERSION, len(order), refused, cost, models, sizes, steps)
    # Written last: a plan exists from here on.
    files.write(SHARDS, msgspec.json.encode(shards))
    return open_plan(files)


def _costs(costs: NDArray[np.uint32], sizes: Sequence[int]) -> list[int]:
    """What each shard costs, of the costs of its rows."""
    if not sizes:
        return []
    starts = np.concatenate(([0], np.cumsum(sizes[:-1], dtype=np.int64)))
    return [int(cost) for cost in np.add.reduceat(costs, starts, dtype=np.int64)]


def sending_order(table: Table) -> NDArray[np.intp]:
    """Sort rows for sending: cost bucket descending, then prefix, then line."""
    bucket = np.frexp(table["cost_tokens"].astype(np.float64))[1].astype(np.int8)
    # lexsort is stable and its last key counts most; the rows are in line order already.
    return np.lexsort((table["prefix_key"], -bucket))


def with_scouts(order: NDArray[np.intp], slots: int) -> NDArray[np.intp]:
    """Move a few of the cheapest rows to the front: they show how fast the workers are.

    The longest requests come next, and shall not go to a slow worker because nobody has seen it work. A
    sixteenth of the rows at most, a quarter of the slots at most.
    """
    count = min(slots // 4, len(order) // 16)
    return np.concatenate([order[len(order) - count :], order[: len(order) - count]])


def open_plan(files: BatchFiles) -> "Plan":
    """Open a stored plan. Raises `DamagedPlanError`, `StorageMissingError` when there is none."""
    try:
        shards = msgspec.json.decode(files.read(SHARDS), type=_Shards)
    except msgspec.DecodeError as error:
        raise DamagedPlanError(f"{SHARDS} of {files.batch_id}: {error}") from error
    if shards.version != _VERSION or sum(shards.sizes) != shards.total:
        raise DamagedPlanError(f"{SHARDS} of {files.batch_id}: of another version, or it does not add up")
    [head] = files.read_ranges(PLAN, [(0, _LARGEST_HEADER)])
    return Plan(files, shards, _rows_start(files.batch_id, head, shards.total))


class Plan:
    """A stored plan. Only what is asked for is read, from storage each time."""

    def __init__(self, files: BatchFiles, shards: _Shards, rows_start: int) -> None:
        """Use `open_plan` instead."""
        self._files = files
        self._shards = shards
        self._rows_start = rows_start
        self._starts = np.concatenate(([0], np.cumsum(shards.sizes, dtype=np.int64)))

    @property
    def total(self) -> int:
        """How many lines are requests."""
        return self._shards.total

    @property
    def refused(self) -> int:
        """How many lines are no requests and have an error line instead."""
        return self._shards.refused

    @property
    def shard_count(self) -> int:
        """How many shards there are, numbered from 0."""
        return len(self._shards.sizes)

    @property
    def models(self) -> tuple[str | None, ...]:
        """All models asked for, in order of appearance; None stands for lines that name none."""
        return tuple(self._shards.models)

    @property
    def cost_total(self) -> int:
        """Estimated tokens of all requests, read and written."""
        return self._shards.cost_tokens

    @property
    def cost_steps(self) -> list[tuple[int, int]]:
        """What shards cost, in estimated tokens: (first shard, mean cost from there on), a few steps."""
        return self._shards.cost_steps

    def shard(self, number: int) -> list[PlannedRequest]:
        """Read a shard's requests in the order of sending. Raises IndexError when there is no such shard."""
        if not 0 <= number < self.shard_count:
            raise IndexError(f"no shard {number} of {self.shard_count}")
        return self.requests(self._rows(int(self._starts[number]), self._shards.sizes[number]))

    def requests(self, table: Table) -> list[PlannedRequest]:
        """Turn rows into requests."""
        return [self._request(row) for row in table.tolist()]

    def blocks(self) -> Iterator[Table]:
        """Read all rows in the order of sending, in pieces of bounded size."""
        for start in range(0, self.total, _BLOCK_ROWS):
            yield self._rows(start, min(_BLOCK_ROWS, self.total - start))

    def _rows(self, first: int, count: int) -> Table:
        wanted = (self._rows_start + first * ROW.itemsize, count * ROW.itemsize)
        [data] = self._files.read_ranges(PLAN, [wanted])
        if len(data) != wanted[1]:
            raise DamagedPlanError(f"{PLAN} of {self._files.batch_id} is cut off")
        return np.frombuffer(data, ROW)

    def _request(self, row: tuple[Any, ...]) -> PlannedRequest:
        line, offset, length, model, prompt_tokens, asked, cost, prefix_key, _ = row
        return PlannedRequest(
            line=line,
            offset=offset,
            length=length,
            model=self._shards.models[model],
            prompt_tokens=prompt_tokens,
            asked_tokens=asked if asked >= 0 else None,
            cost_tokens=cost,
            prefix_key=prefix_key,
        )


def read_lines(files: BatchFiles, planned: Sequence[PlannedRequest]) -> list[Line]:
    """Read the lines of planned requests, in their order; all bodies are held at once.

    Raises `ChangedInputError` when the stored input no longer holds what was planned.
    """
    found = files.read_ranges(INPUT, [(request.offset, request.length) for request in planned])
    return [_reread(request, data) for request, data in zip(planned, found, strict=True)]


def _reread(request: PlannedRequest, data: bytes) -> Line:
    line = parse_line(request.line, data)
    if not isinstance(line, Line) or len(data) != request.length:
        raise ChangedInputError(f"line {request.line} of {INPUT} is no longer the request that was planned")
    return line


def _header(rows: int) -> bytes:
    header = io.BytesIO()
    description = {"descr": np.lib.format.dtype_to_descr(ROW), "fortran_order": False, "shape": (rows,)}
    np.lib.format.write_array_header_1_0(header, description)
    return header.getvalue()


def _rows_start(batch_id: str, head: bytes, total: int) -> int:
    """Read the NumPy header and give the offset of the first row."""
    stream = io.BytesIO(head)
    try:
        np.lib.format.read_magic(stream)
        shape, _, row = np.lib.format.read_array_header_1_0(stream)
    except ValueError as error:
        raise DamagedPlanError(f"{PLAN} of {batch_id}: {error}") from error
    if row != ROW or shape != (total,):
        raise DamagedPlanError(f"{PLAN} of {batch_id} does not fit {SHARDS}")
    return stream.tell()
