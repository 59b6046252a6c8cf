"""Storage in a local folder, durable and private: a file appears whole or not at all, and survives a crash.

It is written under a temporary name in its own folder, synced, renamed, and the folder synced. Folders are
0o700 and files 0o600: prompts are nobody else's business.
"""

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from dispatcher.batches.backend import Found, reader, translated
from dispatcher.batches.ranges import Range, read_joined

_FOLDER_MODE = 0o700
_FILE_MODE = 0o600
_BUFFER = 256 * 1024
_TEMPORARY = ".tmp"


class Disk:
    """A `Backend` over a folder, which is made when the first file is."""

    def __init__(self, root: Path) -> None:
        """Use `root`, absolute."""
        self._root = root

    def put(self, path: str, data: bytes, *, replace: bool) -> None:
        sink = _DiskSink(path, self._root / path, replace=replace)
        try:
            sink.write(data)
            sink.commit()
        except BaseException:
            sink.abort()
            raise

    def create(self, path: str) -> "_DiskSink":
        return _DiskSink(path, self._root / path, replace=True)

    def get(self, path: str) -> bytes:
        with translated(path):
            return (self._root / path).read_bytes()

    @contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        with translated(path):
            handle = reader((self._root / path).open("rb", buffering=0), path, _BUFFER)
        with handle:
            yield handle

    def read_ranges(self, path: str, ranges: Sequence[Range]) -> list[bytes]:
        with translated(path):
            descriptor = os.open(self._root / path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return read_joined(ranges, lambda span: read_at(descriptor, span))
            finally:
                os.close(descriptor)

    def exists(self, path: str) -> bool:
        with translated(path):
            return (self._root / path).exists()

    def walk(self, folder: str) -> list[Found]:
        with translated(folder):
            return [
                Found(str(Path(top, name).relative_to(self._root)), status.st_size, status.st_mtime)
                for top, _, names in os.walk(self._root / folder, onerror=_unless_missing)
                for name in names
                if not name.endswith(_TEMPORARY)
                for status in [Path(top, name).stat()]
            ]

    def folders(self, folder: str) -> list[str]:
        with translated(folder), suppress(FileNotFoundError):
            return [entry.name for entry in os.scandir(self._root / folder) if entry.is_dir()]
        return []

    def may_be_elsewhere(self, folder: str) -> bool:
        return not (self._root / folder).is_dir()

    def remove(self, path: str) -> None:
        target = self._root / path
        with translated(path), suppress(FileNotFoundError):
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink()

    def spool_folder(self, path: str) -> str | None:
        with translated(path):
            _make_folder((self._root / path).parent)
        return str((self._root / path).parent)


class _DiskSink:
    """A temporary file beside its target."""

    def __init__(self, path: str, target: Path, *, replace: bool) -> None:
        self._path = path
        self._target = target
        self._replace = replace
        self._temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}{_TEMPORARY}")
        with translated(path):
            _make_folder(target.parent)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = os.open(self._temporary, flags, _FILE_MODE)
            self._handle = os.fdopen(descriptor, "wb", buffering=_BUFFER)

    def write(self, data: bytes, /) -> None:
        with translated(self._path):
            self._handle.write(data)

    def commit(self) -> None:
        with translated(self._path):
            self._handle.flush()
            os.fsync(self._handle.fileno())
            self._handle.close()
            if self._replace:
                self._temporary.replace(self._target)
            else:
                # Unlike a rename, a link never takes the place of a file that exists.
                os.link(self._temporary, self._target)
                self._temporary.unlink()
            _sync_folder(self._target.parent)

    def abort(self) -> None:
        # Closing flushes, which fails again on a full disk; the file goes in any case.
        with suppress(OSError):
            self._handle.close()
        with suppress(OSError):
            self._temporary.unlink()


def read_at(descriptor: int, span: Range) -> bytes:
    """Read a range of an open file; short only at its end."""
    pieces = []
    offset, left = span
    # One call returns at most 2 GiB, and may return less at any time.
    while left and (piece := os.pread(descriptor, left, offset)):
        pieces.append(piece)
        offset, left = offset + len(piece), left - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _unless_missing(error: OSError) -> None:
    """Refuse to take a folder that cannot be listed for an empty one."""
    if not isinstance(error, FileNotFoundError):
        raise error


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    with suppress(FileExistsError):  # another process may make it at the same moment
        folder.mkdir(_FOLDER_MODE)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
