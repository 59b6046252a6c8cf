"""A nameless temporary file: written from its start, then read in pieces, gone when closed.

Where it is, is `backend`'s subject: beside the batch's files, or where the system keeps such files. It may be
full there, too.
"""

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from dispatcher.batches.backend import translated
from dispatcher.batches.disk import read_at
from dispatcher.batches.ranges import Range, read_joined

_BUFFER = 1024 * 1024


class Spool:
    """A context manager. Its methods raise `StorageFullError` or `StorageError`, with the batch's folder."""

    def __init__(self, folder: str | None, name: str) -> None:
        """Make it in `folder`; None: where the system keeps temporary files. `name` is for messages."""
        self._name = name
        with translated(name):
            self._file = tempfile.TemporaryFile(dir=folder, buffering=_BUFFER)  # noqa: SIM115 - closed at exit

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # closing writes what is left, which fails again on a full disk
            self._file.close()

    def write(self, data: bytes) -> None:
        """Append."""
        with translated(self._name):
            self._file.write(data)

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """Read pieces of what was written; answers in the order asked."""
        with translated(self._name):
            self._file.flush()
            descriptor = self._file.fileno()
            return read_joined(ranges, lambda span: read_at(descriptor, span))
