"""Bytes to lines: cuts a stream at line feeds in bounded memory. What a line holds is `parse`'s subject."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class RawLine(NamedTuple):
    """A line without its line feed. `number` counts from 1, `offset` and `length` are bytes of the stream.

    `data` is None when the line is longer than the limit: it was passed over, not kept.
    """

    number: int
    offset: int
    length: int
    data: bytes | None


def split_lines(chunks: Iterable[bytes], longest: int) -> Iterator[RawLine]:
    r"""Cut at b"\n" only: U+2028, U+2029 and U+0085 are legal inside JSON strings.

    Holds one chunk and at most `longest` bytes of an unfinished line. What follows the last line feed is a
    line if it is not empty.
    """
    number, offset = 1, 0
    kept = b""  # the unfinished line, as long as it is not too long
    passed = 0  # bytes of an unfinished line that is too long, and therefore not kept
    for chunk in chunks:
        first, *rest = chunk.split(b"\n")
        kept, passed = _grow(kept, passed, first, longest)
        if not rest:
            continue
        length = passed or len(kept)
        yield RawLine(number, offset, length, None if passed else kept)
        number, offset = number + 1, offset + length + 1
        last = rest.pop()
        for data in rest:
            length = len(data)
            yield RawLine(number, offset, length, data if length <= longest else None)
            number, offset = number + 1, offset + length + 1
        kept, passed = _grow(b"", 0, last, longest)
    if kept or passed:
        yield RawLine(number, offset, passed or len(kept), None if passed else kept)


def _grow(kept: bytes, passed: int, more: bytes, longest: int) -> tuple[bytes, int]:
    """Add `more` to the unfinished line, letting go of it once it is too long."""
    length = (passed or len(kept)) + len(more)
    if passed or length > longest:
        return b"", length
    return kept + more if kept else more, 0
