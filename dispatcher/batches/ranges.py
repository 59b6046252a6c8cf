"""Byte ranges of a file, joined so that many small reads become few large ones. Reading is a callback."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

WIDEST_GAP = 64 * 1024
LARGEST_READ = 4 * 1024 * 1024


class Range(NamedTuple):
    """`length` bytes from `offset` on."""

    offset: int
    length: int


def read_joined(ranges: Sequence[Range], read: Callable[[Range], bytes]) -> list[bytes]:
    """Read all ranges, in ascending order and joined where they are near; answers come in the order asked."""
    answers: list[bytes] = [b""] * len(ranges)
    for span, members in _join(ranges):
        data = read(span)
        for index in members:
            start = ranges[index].offset - span.offset
            answers[index] = data[start : start + ranges[index].length]
    return answers


def _join(ranges: Sequence[Range]) -> Iterator[tuple[Range, list[int]]]:
    """Group ranges that lie near each other, up to the largest read or one range larger than it."""
    start, end, members = 0, 0, list[int]()
    for index in sorted(range(len(ranges)), key=ranges.__getitem__):
        offset, length = ranges[index]
        reach = max(end, offset + length)
        if members and (offset - end > WIDEST_GAP or reach - start > LARGEST_READ):
            yield Range(start, end - start), members
            members = []
        if not members:
            start, reach = offset, offset + length
        end = reach
        members.append(index)
    if members:
        yield Range(start, end - start), members


def blocks(lengths: Sequence[int], most_bytes: int, most: int) -> Iterator[slice]:
    """Cut a list of lengths into runs of at most `most` items and `most_bytes`, or of one larger item."""
    start = total = 0
    for index, length in enumerate(lengths):
        if index > start and (total + length > most_bytes or index - start == most):
            yield slice(start, index)
            start, total = index, 0
        total += length
    if start < len(lengths):
        yield slice(start, len(lengths))
