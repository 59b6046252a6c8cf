"""Which requests of a file give a custom_id that an earlier line has given.

A million ids are compared by sorted 64-bit hashes, and only where two hashes agree are the ids themselves
read again, so that a collision of hashes is no error and no id is kept in memory.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dispatcher.batches.parse import BadLine, read_custom_id
from dispatcher.batches.plan import Table
from dispatcher.batches.ranges import blocks
from dispatcher.batches.storage import INPUT, BatchFiles

_BLOCK_BYTES = 8 * 1024 * 1024
_BLOCK_LINES = 4096


def find_duplicates(files: BatchFiles, table: Table) -> Iterator[tuple[int, BadLine]]:
    """Give each later line with a custom_id that is taken, as the index of its row and why it is refused.

    `table` is in line order, its input stored. Groups of equal ids come in no order, each in line order.
    """
    suspects = _with_equal_hashes(table["id_hash"])
    group, first_lines = None, dict[str, int]()
    for row, custom_id in _read_ids(files, table, suspects):
        if (group_of_row := table["id_hash"][row]) != group:
            group, first_lines = group_of_row, {}
        line = int(table["line"][row])
        first = first_lines.setdefault(custom_id, line)
        if first != line:
            message = f"custom_id {_shown(custom_id)} of line {line} is already used by line {first}"
            yield row, BadLine(line, "duplicate_custom_id", message, "custom_id", custom_id)


def _with_equal_hashes(hashes: NDArray[np.uint64]) -> NDArray[np.intp]:
    """Rows whose hash another row has too, equal ones together, each group in line order."""
    if not len(hashes):
        return np.empty(0, np.intp)
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    same = np.concatenate(([False], ordered[1:] == ordered[:-1], [False]))
    return order[same[1:] | same[:-1]]


def _read_ids(files: BatchFiles, table: Table, rows: NDArray[np.intp]) -> Iterator[tuple[int, str]]:
    for block in blocks(table["length"][rows].tolist(), _BLOCK_BYTES, _BLOCK_LINES):
        some = rows[block]
        ranges = zip(table["offset"][some].tolist(), table["length"][some].tolist(), strict=True)
        for row, data in zip(some.tolist(), files.read_ranges(INPUT, ranges), strict=True):
            yield row, read_custom_id(data) or ""


def _shown(custom_id: str) -> str:
    return repr(custom_id if len(custom_id) <= 64 else f"{custom_id[:61]}...")
