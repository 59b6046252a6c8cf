"""A batch's results, from storage to where a person wants them. Blocks; no Redis is needed.

A batch that has ended has its two result files; one that runs has the parts that are durable so far.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from stat import S_IMODE, S_ISREG
from typing import BinaryIO

from dispatcher.batches.parts import first_entries
from dispatcher.batches.storage import ERRORS, OUTPUT, BatchFiles

_SYSTEM_FOLDERS = {("/", "dev"), ("/", "proc")}
"""Of these nothing is replaced: /dev/stdout is a link, which may lead to a plain file."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What was written. None: there were no such lines, so there is no such file."""

    output: Path | None
    errors: Path | None


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

    A file that is there already is replaced. Raises OSError, StorageError.
    """
    if final:
        return Saved(_copied(files, OUTPUT, output), _copied(files, ERRORS, errors))
    return _save_parts(files, output, errors)


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
    """
    if _is_no_plain_file(target):
        with target.open("wb") as sink:
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
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _is_no_plain_file(target: Path) -> bool:
    """Whether replacing it would take something away that is no file of results, as /dev/null."""
    try:
        return target.absolute().parts[:2] in _SYSTEM_FOLDERS or not S_ISREG(target.stat().st_mode)
    except FileNotFoundError:
        return False


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


def errors_path(output: Path) -> Path:
    """Where failed lines go unless it is said: ``OUT`` with ``.errors.jsonl`` in place of its suffix."""
    return output.with_suffix(".errors.jsonl")


def lines_of(path: Path) -> Iterable[bytes]:
    """The lines of a result file."""
    with path.open("rb") as lines:
        yield from lines
