"""Bytes to lines, and byte ranges to reads."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dispatcher.batches import ranges
from dispatcher.batches.lines import split_lines
from dispatcher.batches.ranges import Range, blocks, read_joined

texts = st.lists(st.sampled_from([b"\n", b"a", b"bb", b"\r", "\u2028\u0085".encode(), b"long" * 5])).map(
    b"".join
)


def chunked(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


@given(texts, st.integers(1, 9), st.integers(1, 25))
def test_lines_are_cut_at_line_feeds_whatever_the_chunks(data: bytes, size: int, longest: int) -> None:
    wanted = data.split(b"\n")
    if not wanted[-1]:
        wanted.pop()
    found = list(split_lines(chunked(data, size), longest))
    assert [line.number for line in found] == list(range(1, len(wanted) + 1))
    assert [data[line.offset : line.offset + line.length] for line in found] == wanted
    assert [line.data for line in found] == [text if len(text) <= longest else None for text in wanted]


def test_a_line_that_is_too_long_is_not_kept_while_it_is_read() -> None:
    held: list[int] = []

    def endless() -> list[bytes]:
        return [b"x" * 100 for _ in range(50)]

    for line in split_lines(endless(), 150):
        held.append(len(line.data or b""))
        assert line.length == 5000
    assert held == [0]


@given(st.binary(min_size=1, max_size=300), st.data())
def test_joined_reads_answer_every_range_in_the_order_asked(data: bytes, draw: st.DataObject) -> None:
    piece = st.tuples(st.integers(0, 310), st.integers(0, 40)).map(lambda pair: Range(*pair))
    wanted = draw.draw(st.lists(piece))

    def read(span: Range) -> bytes:
        return data[span.offset : span.offset + span.length]

    assert read_joined(wanted, read) == [read(piece) for piece in wanted]


def test_a_range_within_an_earlier_one_does_not_cut_it_short() -> None:
    data = bytes(range(50))
    wanted = [Range(0, 40), Range(5, 3), Range(45, 5)]
    assert read_joined(wanted[:2], lambda span: data[: span.length]) == [data[:40], data[5:8]]
    assert read_joined(wanted, lambda span: data[: span.length])[2] == data[45:]


def test_near_ranges_become_one_read_and_far_ones_do_not() -> None:
    reads: list[Range] = []

    def read(span: Range) -> bytes:
        reads.append(span)
        return bytes(span.length)

    far = 10 * ranges.WIDEST_GAP
    read_joined([Range(far, 5), Range(10, 5), Range(0, 10), Range(100, 7)], read)
    assert reads == [Range(0, 107), Range(far, 5)]


def test_a_joined_read_never_grows_beyond_its_limit() -> None:
    half = ranges.LARGEST_READ // 2
    reads: list[Range] = []

    def read(span: Range) -> bytes:
        reads.append(span)
        return b""

    read_joined([Range(index * half, half) for index in range(6)], read)
    assert [span.length for span in reads] == [ranges.LARGEST_READ] * 3


@given(st.lists(st.integers(0, 50)), st.integers(1, 60), st.integers(1, 5))
def test_blocks_cover_all_in_order_and_stay_small(lengths: list[int], most_bytes: int, most: int) -> None:
    cuts = list(blocks(lengths, most_bytes, most))
    assert [index for cut in cuts for index in range(cut.start, cut.stop)] == list(range(len(lengths)))
    assert all(left.stop == right.start for left, right in pairwise(cuts))
    for cut in cuts:
        size = cut.stop - cut.start
        assert 1 <= size <= most
        assert size == 1 or sum(lengths[cut]) <= most_bytes
