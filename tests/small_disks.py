"""A file system that is really full: a small one in memory, which only root may mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class SmallDisk:
    """A mounted file system of a few hundred kilobytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Leave no room, not for a byte."""
        with self._ballast.open("ab", buffering=0) as ballast:
            size = 65536
            while size:
                try:
                    ballast.write(bytes(size))
                except OSError:
                    size //= 2

    def free(self) -> None:
        """Make room again."""
        self._ballast.unlink()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[SmallDisk]:
    """Mount one at a new folder. Skips the test where that is not allowed."""
    folder.mkdir()
    options = f"size={size},mode=0700,uid={os.getuid()}"
    try:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, check=False
        )
    except OSError as error:
        pytest.skip(f"nothing can be mounted here: {error}")  # there is no mount command; it says so
    if mounted.returncode:
        pytest.skip(f"nothing may be mounted here: {mounted.stderr.decode().strip()}")  # not root
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
