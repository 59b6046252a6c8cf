"""What lies in a batch's folder in the storage, as the checks want it: read here, and judged elsewhere."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec

from dispatcher.batches.storage import ERRORS, OUTPUT, PARTS
from tests.chaos.takeovers import Part, claimed_of


def durable_bytes(storage: Path) -> int:
    """Bytes of all results that are durable, of all batches."""
    return sum(part.stat().st_size for part in storage.glob(f"batches/*/{PARTS}/*/*.jsonl"))


class Folder:
    """The files of one batch."""

    def __init__(self, storage: Path, batch_id: str) -> None:
        self._path = storage / "batches" / batch_id

    @property
    def output(self) -> bytes | None:
        return self._read(OUTPUT)

    @property
    def errors(self) -> bytes | None:
        return self._read(ERRORS)

    def digest(self) -> str:
        """One word for both result files: another when either is."""
        return hashlib.sha256(repr((self.output, self.errors)).encode()).hexdigest()

    def parts(self) -> list[Part]:
        """All parts of shards."""
        found = (self._part(path) for path in self._path.glob(f"{PARTS}/*/*.jsonl"))
        return [part for part in found if part is not None]

    def _part(self, path: Path) -> Part | None:
        claimed = claimed_of(str(path.relative_to(self._path)))
        if claimed is None:
            return None
        entries = (msgspec.json.decode(line, type=dict[str, Any]) for line in path.read_bytes().splitlines())
        # The inode changed last when the whole file got its name.
        return Part(claimed, path.stat().st_ctime, frozenset(entry["line"] for entry in entries))

    def _read(self, name: str) -> bytes | None:
        path = self._path / name
        return path.read_bytes() if path.exists() else None
