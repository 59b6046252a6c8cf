"""What a storage must be able to do, and how its failures become ours. One of these per kind of storage:
`disk` for a local folder, `bucket` for everything that fsspec reaches. Paths are strings below the root.
"""

import errno
import io
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, BinaryIO, NamedTuple, Protocol

from dispatcher.batches.errors import (
    BatchError,
    StorageDeniedError,
    StorageError,
    StorageExistsError,
    StorageFullError,
    StorageMissingError,
)
from dispatcher.batches.ranges import Range

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


class Found(NamedTuple):
    """A stored file: path below the root, bytes, and when it became durable (seconds since 1970)."""

    path: str
    size: int
    modified_s: float


class Sink(Protocol):
    """A file being written: invisible until `commit`, gone after `abort`."""

    def write(self, data: bytes, /) -> None:
        """Append."""

    def commit(self) -> None:
        """Make the whole file durable and visible at once, replacing an older one."""

    def abort(self) -> None:
        """Leave no trace."""


class Backend(Protocol):
    """A flat store of files. Every method raises `StorageError` or one below it, with its cause."""

    def put(self, path: str, data: bytes, *, replace: bool) -> None:
        """Store one whole file atomically; `StorageExistsError` when it exists and may not be replaced."""

    def create(self, path: str) -> Sink:
        """Begin a file that is written piece by piece."""

    def get(self, path: str) -> bytes:
        """Read one whole file."""

    def open(self, path: str) -> AbstractContextManager[BinaryIO]:
        """Open for reading from the start, buffered."""

    def read_ranges(self, path: str, ranges: Sequence[Range]) -> list[bytes]:
        """Read pieces of one file; a piece that lies behind its end comes back short."""

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""

    def walk(self, folder: str) -> list[Found]:
        """List all files below a folder, in no order; empty when there is no such folder."""

    def folders(self, folder: str) -> list[str]:
        """Names of the folders directly in a folder; empty when there is no such folder."""

    def may_be_elsewhere(self, folder: str) -> bool:
        """Whether this looks like a place where a share is not mounted: there is no such folder."""

    def remove(self, path: str) -> None:
        """Remove a file or a whole folder; nothing happens when it is not there."""

    def spool_folder(self, path: str) -> str | None:
        """Where temporary files for this path are best kept; None for the system's choice."""


@contextmanager
def translated(path: str) -> Iterator[None]:
    """Turn whatever a storage library raises into a `StorageError` that names the path, with its cause."""
    try:
        yield
    except BatchError:
        raise
    except Exception as error:  # every fsspec implementation has errors of its own
        kind = _kind(error)
        raise kind(f"{path}: {_reason(error)}") from error


def reader(raw: io.RawIOBase, path: str, buffer: int) -> BinaryIO:
    """A buffered file over one that is open, whose reads fail with a `StorageError`."""
    return io.BufferedReader(_Reads(raw, path), buffer)


class _Reads(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, path: str) -> None:
        self._raw = raw
        self._path = path

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int | None:
        with translated(self._path):
            return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _kind(error: Exception) -> type[StorageError]:
    code = error.errno if isinstance(error, OSError) else None
    if code in _FULL:
        return StorageFullError
    if code in _DENIED or isinstance(error, PermissionError):
        return StorageDeniedError
    if isinstance(error, FileNotFoundError):
        return StorageMissingError
    if isinstance(error, FileExistsError):
        return StorageExistsError
    return StorageError


def _reason(error: Exception) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or str(error) or type(error).__name__
