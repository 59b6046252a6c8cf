"""An engine in a process of its own, for tests and benchmarks that kill it or need its core for themselves.

Belongs here: starting, the wait for its address, ending. Does not belong here: talking to it.
"""

from __future__ import annotations

import selectors
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Self

from forebay.simulator.command import LISTENING

if TYPE_CHECKING:
    from types import TracebackType

    from forebay.simulator.settings import EngineSettings


class EngineStartError(RuntimeError):
    """The process ended, or said nothing in time, before it listened. Its own words are on stderr."""


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running engine; as a context manager it is terminated at the end."""

    url: str
    process: subprocess.Popen[str]

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL, and wait for the end: every open connection breaks. Doing it twice does nothing."""
        self.process.kill()
        self._reap()

    def terminate(self) -> int:
        """SIGTERM, and wait for the end; returns the exit status."""
        self.process.terminate()
        return self._reap()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.terminate()

    def _reap(self) -> int:
        status = self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status


def start_engine(settings: EngineSettings, *, timeout_s: float = 30.0) -> EngineProcess:
    """Start an engine and return once it listens. Raises EngineStartError when it does not within
    ``timeout_s``.
    """
    command = [sys.executable, "-m", "forebay.simulator", *flags(settings)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: S603  # our own module
    try:
        line = _first_line(process, timeout_s)
    except BaseException:
        EngineProcess("", process).kill()
        raise
    return EngineProcess(line.removeprefix(LISTENING), process)


def flags(settings: EngineSettings) -> list[str]:
    """The command line that means these settings; what is at its default is left out."""
    given = settings.model_dump(exclude_defaults=True, exclude={"faults"})
    words = [word for name, value in given.items() for word in _flag(name, value)]
    faults = [word for fault in settings.faults for word in ("--fault", fault.model_dump_json())]
    return words + faults


def _flag(name: str, value: object) -> list[str]:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [f"--{option}={value}"]  # one word, so that a value may begin with a dash


def _first_line(process: subprocess.Popen[str], timeout_s: float) -> str:
    stdout = process.stdout
    if stdout is None:
        raise EngineStartError("the engine has no standard output")
    if not _readable(stdout, time.monotonic() + timeout_s):
        raise EngineStartError(f"the engine did not listen within {timeout_s} s")
    line = stdout.readline().strip()
    if not line.startswith(LISTENING):
        raise EngineStartError(f"the engine ended before it listened: {line!r}")
    return line


def _readable(stream: IO[str], deadline_s: float) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        return bool(selector.select(max(0.0, deadline_s - time.monotonic())))
