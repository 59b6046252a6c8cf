"""Where a batch's files are: the layout of its folder, and which ids may become paths.

    batches/<batch>/
        input.jsonl          the user's file, byte for byte
        plan.npy             one row per accepted line, in the order of sending (`plan`)
        shards.json          how the plan is cut (`plan`)
        batch.json           a copy of the record, so that the batch can be resumed from its files alone
        parts/<shard>/<claim>-<seq>.jsonl    durable results, never rewritten (`parts`)
        output.jsonl  errors.jsonl           the two result files (`finalise`)

How bytes get there is the subject of `disk` and `bucket`. All of it blocks: call it from a thread.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO

import fsspec

from dispatcher.batches.backend import Backend, Found, Sink
from dispatcher.batches.bucket import Bucket
from dispatcher.batches.disk import Disk
from dispatcher.batches.errors import InvalidNameError, StorageUrlError
from dispatcher.batches.ranges import Range
from dispatcher.batches.spool import Spool

INPUT = "input.jsonl"
PLAN = "plan.npy"
SHARDS = "shards.json"
RECORD = "batch.json"
OUTPUT = "output.jsonl"
ERRORS = "errors.jsonl"
PARTS = "parts"

_BATCHES = "batches"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def checked_name(name: str, what: str) -> str:
    """Give back an id that may become one step of a path.

    Letters, digits, `_`, `.`, `-`, at most 128 of them, the first a letter or digit; so neither `..` nor a
    slash. Raises `InvalidNameError` naming `what` it was meant to be.
    """
    if _NAME.fullmatch(name) is None:
        raise InvalidNameError(f"{name!r} is no valid {what}")
    return name


class Storage:
    """All batches below one URL: a local folder (plain path or `file://`), or any URL that fsspec knows.

    Nothing is touched before the first file is written or read.
    """

    def __init__(self, url: str) -> None:
        """Raise `StorageUrlError` when the URL's scheme is unknown or its library is not installed."""
        self.url = url
        self._backend = _backend(url)

    def files(self, batch_id: str) -> "BatchFiles":
        """Name the files of a batch, which need not exist. Raises `InvalidNameError`."""
        return BatchFiles(self._backend, batch_id)

    def batch_ids(self) -> list[str]:
        """List the batches that have files here, sorted."""
        return sorted(name for name in self._backend.folders(_BATCHES) if _NAME.fullmatch(name))

    def may_be_elsewhere(self) -> bool:
        """Whether there never was a batch here: a share may not be mounted, so nothing follows from a file
        that is missing.
        """
        return self._backend.may_be_elsewhere(_BATCHES)


def _backend(url: str) -> Backend:
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in {"file", "local"}:
        return Disk(Path(rest if separator else url).expanduser().absolute())
    try:
        filesystem, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise StorageUrlError(f"{scheme}:// needs more packages: {error}") from error
    except ValueError as error:
        raise StorageUrlError(f"{url!r} is no storage URL: {error}") from error
    return Bucket(filesystem, root)


class BatchFiles:
    """The files of one batch, by name within its folder. Every method raises below `StorageError`."""

    def __init__(self, backend: Backend, batch_id: str) -> None:
        """Use `Storage.files` instead."""
        self.batch_id = checked_name(batch_id, "batch id")
        self._backend = backend
        self._folder = f"{_BATCHES}/{batch_id}"

    def file_id(self, name: str) -> str:
        """The file's path below the storage's URL, by which records name it."""
        return self._at(name)

    def write(self, name: str, data: bytes, *, replace: bool = True) -> None:
        """Store a whole file atomically and durably; it is there when this returns.

        `StorageExistsError` when it exists and `replace` is false.
        """
        self._backend.put(self._at(name), data, replace=replace)

    @contextmanager
    def writing(self, name: str) -> Iterator[Sink]:
        """Write a file piece by piece: it appears, durable, when the block ends, and never if that raises."""
        sink = self._backend.create(self._at(name))
        try:
            yield sink
            sink.commit()
        except BaseException:
            sink.abort()
            raise

    def read(self, name: str) -> bytes:
        """Read a whole file."""
        return self._backend.get(self._at(name))

    def open(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a file for reading from its start."""
        return self._backend.open(self._at(name))

    def read_ranges(self, name: str, ranges: Iterable[tuple[int, int]]) -> list[bytes]:
        """Read many pieces (offset, length) of a file, near ones together; answers in the order asked.

        A piece that reaches behind the end comes back short. All of them are held at once.
        """
        return self._backend.read_ranges(self._at(name), [Range(*piece) for piece in ranges])

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        return self._backend.exists(self._at(name))

    def walk(self, folder: str = "") -> list[Found]:
        """List the files below a folder of the batch, oldest first; equally old ones by name."""
        found = self._backend.walk(self._at(folder).rstrip("/"))
        below = len(self._folder) + 1
        mine = [entry._replace(path=entry.path[below:]) for entry in found]
        return sorted(mine, key=lambda entry: (entry.modified_s, entry.path))

    def remove(self, name: str) -> None:
        """Remove a file or folder of the batch; nothing happens when it is not there."""
        self._backend.remove(self._at(name))

    def remove_all(self) -> None:
        """Remove the batch's whole folder."""
        self._backend.remove(self._folder)

    def spool(self) -> Spool:
        """Open a nameless temporary file, gone when closed; beside the batch's files when they are local."""
        return Spool(self._backend.spool_folder(self._at(INPUT)), f"{self._folder}: a temporary file")

    def _at(self, name: str) -> str:
        for step in name.split("/") if name else ():
            checked_name(step, "file name")
        return f"{self._folder}/{name}"
