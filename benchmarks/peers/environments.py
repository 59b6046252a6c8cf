"""The peers' own virtual environments: one each, from hash-checked pins, in a folder that git ignores.

Belongs here: installing, and the versions that are installed. What pip says goes into a log beside the
environment, for it names folders of this machine.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE = CHECKOUT / ".cache" / "peers"
REQUIREMENTS = Path(__file__).resolve().parent / "requirements"


class Unavailable(Exception):
    """A peer cannot take part; the words say why, and name no folder of this machine."""


def requirements(package: str) -> Path:
    """The pins of a peer and of all that it needs."""
    return REQUIREMENTS / f"{package}.txt"


def environment(package: str) -> Path:
    """The folder of a peer's environment, installed if it is not, or not from these pins.

    Raises Unavailable.
    """
    folder = CACHE / package
    stamp = folder / ".installed"
    wanted = hashlib.sha256(requirements(package).read_bytes()).hexdigest()
    if not stamp.exists() or stamp.read_text() != wanted:
        _install(package, folder)
        stamp.write_text(wanted)
    return folder


def _install(package: str, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    log = CACHE / f"{package}.log"
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-input", "--require-hashes"]
    with log.open("wb") as output:
        for step in (
            [sys.executable, "-m", "venv", str(folder)],
            [*pip, "--disable-pip-version-check", "-r", str(requirements(package))],
        ):
            status = subprocess.run(step, stdout=output, stderr=output, check=False).returncode
            if status != 0:
                where = log.relative_to(CHECKOUT)
                raise Unavailable(f"could not be installed: status {status}, see {where}")


def version(package: str) -> str | None:
    """What is installed of a peer; None: nothing is."""
    return _version(package, map(str, (CACHE / package).glob("lib/python*/site-packages")))


def _version(package: str, path: Iterable[str]) -> str | None:
    found = next(iter(metadata.distributions(name=package, path=list(path))), None)
    return found.version if found is not None else None
