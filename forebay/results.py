"""A batch's results, from storage to where a person wants them. Blocks; no Redis is needed.

A batch that has ended has its two result files; one that runs has the parts that are durable so far.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_IMODE, S_ISREG
from typing import BinaryIO

from dispatcher.batches.errors import StorageMissingError
from dispatcher.batches.parts import first_entries
from dispatcher.batches.record import BatchRecord
from dispatcher.batches.storage import ERRORS, OUTPUT, SHARDS, BatchFiles, Storage
from workers.errors import SettingsError

_SYSTEM_FOLDERS = {("/", "dev"), ("/", "proc")}
"""Of these nothing is replaced: /dev/stdout is a link, which may lead to a plain file."""
_STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")


@dataclass(frozen=True, slots=True)
class Saved:
    """What was written. None: there were no such lines, so there is no such file."""

    output: Path | None
    errors: Path | None


def files_of(storage: Storage, record: BatchRecord) -> BatchFiles:
    """The files of a batch, with all that its results are read from.

    In a storage that is not the batch's nothing is found, which must not pass for a batch without results.
    Raises StorageMissingError where there is no plan of it, or not each result file that the record names.
    """
    files = storage.files(record.id)
    named = [(OUTPUT, record.output_file_id), (ERRORS, record.error_file_id)]
    wanted = [SHARDS, *(name for name, file_id in named if file_id is not None)]
    if not all(files.exists(name) for name in wanted):
        raise StorageMissingError(
            f"the files of {record.id} are not in {storage.url}; "
            "name the storage that its dispatchers have, with --storage"
        )
    return files


def records(files: BatchFiles, *, final: bool) -> Iterator[bytes]:
    """All results, as lines of JSON without line feeds: those of the output, then those of the error file."""
    if not final:
        yield from (entry.record for entry in first_entries(files))
        return
    for name in (OUTPUT, ERRORS):
        if files.exists(name):
            with files.open(name) as lines:
                yield from (line.rstrip(b"\n") for line in lines)


def save(files: BatchFiles, *, final: bool, output: Path, errors: Path) -> Saved:
    """Write the results to two files; each appears whole or not at all, and not when it would be empty.

    A file that is there already is replaced, and one that would be empty removed: it is of another batch.
    Raises OSError, StorageError.
    """
    if final:
        saved = Saved(_copied(files, OUTPUT, output), _copied(files, ERRORS, errors))
    else:
        saved = _save_parts(files, output, errors)
    for target, written in ((output, saved.output), (errors, saved.errors)):
        if written is None:
            _remove_old(target)
    return saved


def _copied(files: BatchFiles, name: str, target: Path) -> Path | None:
    if not files.exists(name):
        return None
    with files.open(name) as source, written_whole(target) as sink:
        shutil.copyfileobj(source, sink, 1024 * 1024)
    return target


def _save_parts(files: BatchFiles, output: Path, errors: Path) -> Saved:
    with ExitStack() as stack:
        sinks: dict[bool, BinaryIO] = {}
        targets = {True: output, False: errors}
        for entry in first_entries(files):
            if entry.ok not in sinks:
                sinks[entry.ok] = stack.enter_context(written_whole(targets[entry.ok]))
            sinks[entry.ok].write(entry.record + b"\n")
    return Saved(output if True in sinks else None, errors if False in sinks else None)


@contextmanager
def written_whole(target: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes the target's place, durable, when the block ends well.

    It has the permissions of the file that it replaces, else those that are usual for the user. A symbolic
    link is replaced, and what it points to left alone. A device, pipe or standard output is written as it is.
    Raises OSError, whose file name is the target's.
    """
    if not replaceable(target):
        with _opened_as_it_is(target) as sink:
            yield sink
        return
    # A name that nobody can foresee, and that must be new: nobody else's link is written through.
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.tmp")
    try:
        with _new_file(temporary, _mode_of(target)) as sink:
            yield sink
            sink.flush()
            os.fsync(sink.fileno())
        temporary.replace(target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        # Of a full disk, write and flush say that there is no room, and not for what.
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise


def replaceable(target: Path) -> bool:
    """Whether another file may take its place, or nothing: not that of a device or pipe, as /dev/null."""
    try:
        return target.absolute().parts[:2] not in _SYSTEM_FOLDERS and S_ISREG(target.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True


def _remove_old(target: Path) -> None:
    """Remove what an earlier run left at a place where this one has nothing to write."""
    if replaceable(target):
        target.unlink(missing_ok=True)


def _opened_as_it_is(target: Path) -> BinaryIO:
    """Open it for writing. What is open already, as /dev/stdout, goes on where it is: opened anew, a file
    behind it would be emptied.
    """
    descriptor = _STREAMS.get(str(target.absolute()))
    if descriptor is None and (match := _DESCRIPTOR.fullmatch(str(target.absolute()))):
        descriptor = int(match[1])
    return target.open("wb") if descriptor is None else os.fdopen(os.dup(descriptor), "wb")


def _mode_of(target: Path) -> int | None:
    try:
        status = target.lstat()
    except FileNotFoundError:
        return None
    return S_IMODE(status.st_mode) & 0o777 if S_ISREG(status.st_mode) else None


def _new_file(path: Path, mode: int | None) -> BinaryIO:
    """A file that nobody had before; ``mode`` None: as the user's umask says."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666 if mode is None else 0o600)
    if mode is not None:
        os.fchmod(descriptor, mode)
    return os.fdopen(descriptor, "wb")


def targets(output: Path, errors: Path | None) -> tuple[Path, Path]:
    """Where results and failed lines go; ``errors`` None: beside the output. Raises SettingsError for places
    where they cannot.
    """
    if errors is None and not replaceable(output):
        raise SettingsError(f"{output} is no ordinary file: say where failed lines go, with --errors FILE")
    errors = errors_path(output) if errors is None else errors
    if output.absolute() == errors.absolute():
        raise SettingsError(f"results and failed lines cannot both go to {output}")
    for target in (output, errors):
        if target.is_dir():
            raise SettingsError(f"{target} is a folder, not a file")
        if not target.absolute().parent.is_dir():
            raise SettingsError(f"{target}: there is no folder {target.parent} to write it in")
    return output, errors


def errors_path(output: Path) -> Path:
    """Where failed lines go unless it is said: ``OUT`` with ``.errors.jsonl`` in place of its suffix."""
    return output.with_suffix(".errors.jsonl")


def lines_of(path: Path) -> Iterable[bytes]:
    """The lines of a result file."""
    with path.open("rb") as lines:
        yield from lines
