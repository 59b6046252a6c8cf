"""Durable results of a running batch: part files that are written once, whole, and never again.

A part is named by its shard, by the claim that wrote it and by a number within the claim. Two claims of one
shard may both answer a line; whoever reads keeps the first, in the order in which parts became durable.

One entry a line: {"line": 7, "ok": true, "tokens": [prompt, completion], "record": {a line of a file}}.
What a record holds is `results`; putting parts together is `finalise`.
"""

from collections.abc import Iterable, Iterator

import msgspec

from dispatcher.batches.errors import DamagedPartError
from dispatcher.batches.results import Usage
from dispatcher.batches.storage import PARTS, BatchFiles, checked_name

INVALID_SHARD = "invalid"
"""The shard of lines that were refused at intake and still get a line in the error file."""

INVALID_PART = f"{PARTS}/{INVALID_SHARD}/0-0.jsonl"
_HIGHEST_LINE = 2**32 - 1


class Entry(msgspec.Struct, frozen=True, gc=False):
    """The final result of one line: `ok` sends its record to the output file, else to the error file.

    `record` is one line of JSON without a line feed.
    """

    line: int
    ok: bool
    usage: Usage
    record: bytes


class _Stored(msgspec.Struct):
    line: int
    ok: bool
    tokens: tuple[int | None, int | None]
    record: msgspec.Raw


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Stored).decode


class PartWriter:
    """Collects the results of one claim on a shard. Not for use by several threads at once."""

    def __init__(self, files: BatchFiles, shard: int | str, claim: str) -> None:
        """`claim` is never used again for this shard. Raises `InvalidNameError`."""
        self._files = files
        self._stem = f"{_folder(shard)}/{checked_name(claim, 'claim')}"
        self._sequence = 0
        self._waiting: list[bytes] = []

    @property
    def buffered(self) -> int:
        """How many results are not durable yet."""
        return len(self._waiting)

    def add(self, entry: Entry) -> None:
        """Hold a result until the next flush."""
        self._waiting.append(encode_entry(entry))

    def flush(self) -> int:
        """Make all that is held durable as one part; gives its bytes, 0 when nothing was held.

        When it raises, the results are held still, and the next flush writes them under the next number: the
        failed attempt may have been stored all the same.
        """
        if not self._waiting:
            return 0
        data = b"".join(self._waiting)
        name = f"{self._stem}-{self._sequence}.jsonl"
        self._sequence += 1
        self._files.write(name, data, replace=False)
        self._waiting.clear()
        return len(data)


def encode_entry(entry: Entry) -> bytes:
    """Write an entry as one line of a part, line feed included."""
    tokens = (entry.usage.prompt_tokens, entry.usage.completion_tokens)
    ok = b"true" if entry.ok else b"false"
    return b'{"line":%d,"ok":%b,"tokens":%b,"record":%b}\n' % (entry.line, ok, _encode(tokens), entry.record)


def done_lines(files: BatchFiles, shard: int | str) -> dict[int, bool]:
    """Read which lines of a shard have a durable result, and whether it is ok.

    Raises `DamagedPartError`.
    """
    done: dict[int, bool] = {}
    for entry in shard_entries(files, shard):
        done.setdefault(entry.line, entry.ok)
    return done


def shard_entries(files: BatchFiles, shard: int | str) -> Iterator[Entry]:
    """Read all entries of a shard, oldest part first, several for a line too. Raises `DamagedPartError`."""
    return _read_all(files, _folder(shard))


def durable_results(files: BatchFiles) -> Iterator[bytes]:
    """Give the results that are durable by now, each line's first, in the order in which they became so.

    Records without a line feed, good and bad ones alike. Raises `DamagedPartError`.
    """
    return (entry.record for entry in first_entries(files))


def first_entries(files: BatchFiles) -> Iterator[Entry]:
    """Read all parts and keep each line's first entry. Raises `DamagedPartError`."""
    seen = _Seen()
    return (entry for entry in _read_all(files, PARTS) if seen.add(entry.line))


class _Seen:
    """A growing set of small numbers, a byte each."""

    def __init__(self) -> None:
        self._flags = bytearray()

    def add(self, number: int) -> bool:
        """Add, and tell whether it is new."""
        if number >= len(self._flags):
            self._flags.extend(bytes(number + 65536 - len(self._flags)))
        new = not self._flags[number]
        self._flags[number] = 1
        return new


def _folder(shard: int | str) -> str:
    return f"{PARTS}/{checked_name(str(shard), 'shard')}"


def _read_all(files: BatchFiles, folder: str) -> Iterator[Entry]:
    for part in files.walk(folder):
        with files.open(part.path) as lines:
            yield from _read(part.path, lines)


def _read(path: str, lines: Iterable[bytes]) -> Iterator[Entry]:
    for number, data in enumerate(lines, 1):
        try:
            stored = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DamagedPartError(f"{path}, line {number}: no result of a batch ({error})") from error
        if not data.endswith(b"\n") or not 1 <= stored.line <= _HIGHEST_LINE:
            raise DamagedPartError(f"{path}, line {number}: cut off, or of no line of a file")
        yield Entry(stored.line, stored.ok, Usage(*stored.tokens), bytes(stored.record))
