"""Storage in an object store, or in anything else that fsspec reaches.

A file becomes visible by one put, so it is whole or absent. What is written piece by piece waits in a local
temporary file until then; it needs as much room in the system's temporary folder.
"""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from tempfile import NamedTemporaryFile
from typing import Any, BinaryIO, cast

from dispatcher.batches.backend import Found, reader, translated
from dispatcher.batches.errors import StorageDeniedError, StorageExistsError
from dispatcher.batches.ranges import Range, read_joined

_BUFFER = 1024 * 1024


class Bucket:
    """A `Backend` over an fsspec file system (untyped: the library has no types)."""

    def __init__(self, filesystem: Any, root: str) -> None:
        """Keep all files below `root`, as the file system spells it."""
        self._fs = filesystem
        self._root = root.rstrip("/")

    def put(self, path: str, data: bytes, *, replace: bool) -> None:
        # Asking first is no guard against a race; names that may not be replaced have one writer each.
        if not replace and self.exists(path):
            raise StorageExistsError(f"{path}: exists already")
        with translated(path):
            self._fs.pipe_file(self._at(path), data)

    def create(self, path: str) -> "_BucketSink":
        return _BucketSink(self._fs, path, self._at(path))

    def get(self, path: str) -> bytes:
        with translated(path):
            return cast("bytes", self._fs.cat_file(self._at(path)))

    @contextmanager
    def open(self, path: str) -> Iterator[BinaryIO]:
        with translated(path):
            handle = reader(self._fs.open(self._at(path), "rb"), path, _BUFFER)
        with handle:
            yield handle

    def read_ranges(self, path: str, ranges: Sequence[Range]) -> list[bytes]:
        with translated(path):
            return read_joined(ranges, lambda span: self._read_range(path, span))

    def _read_range(self, path: str, span: Range) -> bytes:
        # By name: s3fs has another argument before these two.
        try:
            data = self._fs.cat_file(self._at(path), start=span.offset, end=span.offset + span.length)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return b""  # how S3 says that all of it lies behind the end
        return cast("bytes", data)

    def exists(self, path: str) -> bool:
        with translated(path):
            self._fs.invalidate_cache()
            return bool(self._fs.exists(self._at(path)))

    def walk(self, folder: str) -> list[Found]:
        # What another dispatcher has just put must be seen, and listings may be cached.
        with translated(folder), suppress(FileNotFoundError):
            self._fs.invalidate_cache()
            details = self._fs.find(self._at(folder), detail=True).values()
            return [Found(self._below(entry["name"]), entry["size"], _modified_s(entry)) for entry in details]
        return []

    def folders(self, folder: str) -> list[str]:
        with translated(folder):
            self._fs.invalidate_cache()
            if not self._fs.isdir(self._at(folder)):
                return []
            entries = self._fs.ls(self._at(folder), detail=True)
            return [
                entry["name"].rstrip("/").rpartition("/")[2]
                for entry in entries
                if entry["type"] == "directory"
            ]

    def may_be_elsewhere(self, folder: str) -> bool:  # noqa: ARG002 - a bucket that answers is where it is
        return False

    def remove(self, path: str) -> None:
        if not self.exists(path):
            return
        with translated(path):
            self._fs.rm(self._at(path), recursive=True)
        # S3 refuses keys of a bulk delete one by one, in an answer that says 200, and s3fs looks at none.
        if self.exists(path):
            raise StorageDeniedError(f"{path}: the bucket did not let it be deleted")

    def spool_folder(self, path: str) -> str | None:  # noqa: ARG002 - an object store has no folder to offer
        return None

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _below(self, name: str) -> str:
        # Implementations differ in whether a listed name starts with a slash.
        return name.lstrip("/").removeprefix(self._root.lstrip("/")).lstrip("/")


class _BucketSink:
    """A local temporary file that is put as one object in the end."""

    def __init__(self, filesystem: Any, path: str, target: str) -> None:
        self._fs = filesystem
        self._path = path
        self._target = target
        with translated(path):
            self._handle = NamedTemporaryFile(buffering=_BUFFER)  # noqa: SIM115 - lives until commit or abort

    def write(self, data: bytes, /) -> None:
        with translated(self._path):
            self._handle.write(data)

    def commit(self) -> None:
        with translated(self._path):
            self._handle.flush()
            self._fs.put_file(os.fspath(self._handle.name), self._target)
            self._handle.close()

    def abort(self) -> None:
        self._handle.close()


def _modified_s(entry: dict[str, Any]) -> float:
    """Read when an object was written; each implementation has its own word for it, and 0 stands for none."""
    for key in ("LastModified", "mtime", "updated", "last_modified", "created"):
        value = entry.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            return datetime.fromisoformat(value).timestamp()
    return 0.0
