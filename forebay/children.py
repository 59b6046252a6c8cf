"""Processes that are started here and never outlive us: services, an embedded server, demo engines.

What they are is their starter's subject. Each has a log file and a session of its own, so that Ctrl-C at a
terminal reaches us only and we end them in order.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from forebay import tether
from forebay.errors import ChildDied

_LAST_LINES = 12
_LAST_BYTES = 8192


class Child:
    """A running process, ended at the latest when this process ends."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        """Use ``start_child`` instead."""
        self.name = name
        self.log = log
        self._process = process

    @property
    def pid(self) -> int:
        """The id of the process itself: the tether has become the command."""
        return self._process.pid

    def check(self) -> None:
        """Raise ChildDied when it has ended."""
        status = self._process.poll()
        if status is not None:
            raise ChildDied(self.name, status, self.last_lines())

    def last_lines(self) -> str:
        """The end of its log, for a person."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - _LAST_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-_LAST_LINES:])

    def terminate(self) -> None:
        """Ask it to end (SIGTERM); a second time is a second signal."""
        with suppress(ProcessLookupError):
            self._process.terminate()

    def ended(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for its end."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def strike(self) -> None:
        """End it now, with all that it started, and do not wait for that."""
        # Once it was waited for, its id may be another's.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End it now, and wait for that. Doing it twice does nothing."""
        self.strike()
        self._process.wait()


def start_child(
    name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None
) -> Child:
    """Start a process that dies with this one. ``environment`` is all of its environment; None: ours.

    Only from the main thread: the kernel kills such a child when the thread that started it ends.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("children are started from the main thread only")
    tethered = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *command]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - the command is our caller's, never a user's text
            tethered,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return Child(name, process, log)


def end_all(children: Sequence[Child], *, grace_s: float) -> None:
    """Ask all to end, together, and kill those that have not after ``grace_s`` seconds."""
    for child in children:
        child.terminate()
    for child in children:
        child.ended(grace_s)
        child.kill()
