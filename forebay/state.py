"""The folder beside an output file, by which an interrupted run is taken up again: ``OUT.jsonl.forebay/``.

    manifest.json    which input makes this output, as which batch; written when the batch's files are durable
    storage/         the batch's files, unless the user has a storage of their own
    logs/            what the services said
    lock             held while a run is on

What a run does is ``run``'s subject; here is what outlives it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from forebay.errors import RunRefused
from forebay.results import written_whole

_CHUNK = 1024 * 1024
_VERSION = 1


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file was when it was looked at: bytes, time of change, hash of its content."""

    size: int
    mtime_ns: int
    blake2b: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which input makes the output, as which batch, kept where. ``storage`` None: in the folder itself.
    ``targets``: the paths of the files that the run writes. ``replaces``: the batch that this run was started
    again in place of; its files went with the folder that it had to itself.
    """

    input: str
    fingerprint: Fingerprint
    batch_id: str
    storage: str | None = None
    targets: tuple[str, ...] = ()
    replaces: str | None = None
    version: int = _VERSION


class RunState:
    """The folder of one output. A context manager: it holds the lock, so one run at a time writes OUT."""

    def __init__(self, output: Path) -> None:
        """Make the folder and lock it. Raises RunRefused when another run or user holds it, OSError."""
        self.folder = output.with_name(output.name + ".forebay")
        self.made = not self.folder.exists()
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_ours(self.folder):
            raise RunRefused(f"{self.folder} is another user's; remove it, or name another output")
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise RunRefused(f"another `forebay run` is writing {output}") from None

    @property
    def storage(self) -> Path:
        """Where the batch's files are kept, unless the user has a storage."""
        return self.folder / "storage"

    @property
    def logs(self) -> Path:
        """Where the services' logs go."""
        return self.folder / "logs"

    def manifest(self) -> Manifest | None:
        """What an earlier run left to take up; None when it left nothing. Raises RunRefused when damaged."""
        try:
            manifest = msgspec.json.decode((self.folder / "manifest.json").read_bytes(), type=Manifest)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise RunRefused(f"{self.folder} is damaged ({error}); start again with --restart") from error
        if manifest.version != _VERSION:
            raise RunRefused(f"{self.folder} was left by another version; start again with --restart")
        return manifest

    def keep(self, manifest: Manifest) -> None:
        """Note what a later run can take up; durable when this returns."""
        with written_whole(self.folder / "manifest.json") as sink:
            sink.write(msgspec.json.encode(manifest))

    def clear(self) -> None:
        """Forget everything that an earlier run left."""
        (self.folder / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(self.storage, ignore_errors=True)
        shutil.rmtree(self.logs, ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder: the run is over, and there is nothing to take up."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        """Let go of the lock."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _is_ours(folder: Path) -> bool:
    """Whether nobody else could have put there what a run would take up, with our keys and our prompts."""
    return {folder.lstat().st_uid, folder.stat().st_uid} == {os.geteuid()}


def fingerprint(path: Path) -> Fingerprint:
    """Look at a file, all of it. Raises OSError."""
    digest = hashlib.blake2b(digest_size=20)
    with path.open("rb") as source:
        status = os.fstat(source.fileno())
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
    return Fingerprint(status.st_size, status.st_mtime_ns, digest.hexdigest())


def same_file(path: Path, then: Fingerprint) -> bool:
    """Whether a file's content is what it was; it is read only when its times do not tell. Raises OSError."""
    status = path.stat()
    if (status.st_size, status.st_mtime_ns) == (then.size, then.mtime_ns):
        return True
    return status.st_size == then.size and fingerprint(path).blake2b == then.blake2b
