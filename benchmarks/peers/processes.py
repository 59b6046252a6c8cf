"""Processes of one run, and what they and their descendants use.

Belongs here: starting so that nothing outlives us, CPU seconds, memory. Not: what is started.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import psutil

from forebay import tether

_CHECKOUT = Path(__file__).resolve().parents[2]
_LOOK_S = 0.2
_FAMILY_S = 1.0
_END_S = 10.0


def ended_children_cpu_s() -> float:
    """CPU seconds of all our children that have ended, and of those that they waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class Usage:
    """What a process and its descendants have used, looked at five times a second.

    ``peak_mib`` adds up resident memory, in which what processes share counts for each of them.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._family: list[psutil.Process] = [self._root]
        self._family_until_s = 0.0
        self._times_s: list[float] = []
        self._cpu_s: list[float] = []
        self.peak_mib = 0.0

    def look(self) -> float:
        """CPU seconds until now of those that still run."""
        cpu_s, rss = 0.0, 0
        for process in self._members():
            with contextlib.suppress(psutil.Error):
                cpu_s += sum(process.cpu_times()[:2])
                rss += process.memory_info().rss
        self._times_s.append(time.time())
        self._cpu_s.append(cpu_s)
        self.peak_mib = max(self.peak_mib, rss / 2**20)
        return cpu_s

    def _members(self) -> list[psutil.Process]:
        now_s = time.monotonic()
        if now_s >= self._family_until_s:
            with contextlib.suppress(psutil.Error):
                self._family = [self._root, *self._root.children(recursive=True)]
            self._family_until_s = now_s + _FAMILY_S
        return self._family

    def cpu_s_at(self, when_s: float) -> float:
        """CPU seconds at that Unix time, or at the last look before it; 0 before the first."""
        place = bisect_right(self._times_s, when_s)
        return self._cpu_s[place - 1] if place else 0.0

    async def watch(self) -> None:
        """Look until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_S)


@contextlib.asynccontextmanager
async def watched(pid: int) -> AsyncIterator[Usage]:
    """Look at a process while the block runs."""
    usage = Usage(pid)
    task = asyncio.create_task(usage.watch())
    try:
        yield usage
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def started(
    command: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    *,
    folder: Path = _CHECKOUT,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that dies with us, at the latest at the end of the block.

    Its standard output is ours to read, the rest goes to the log. ``environment`` is added to ours, of which
    what configures Forebay is left out: what is compared is configured alike on every machine.
    """
    tethered = [sys.executable, "-I", "-S", tether.__file__, str(os.getpid()), *command]
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *tethered,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env=_environment() | dict(environment or {}),
            cwd=folder,
            start_new_session=True,
            limit=2**26,
        )
        try:
            yield process
        finally:
            await end(process)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}


async def end(process: asyncio.subprocess.Process, *, patience_s: float = _END_S) -> bytes:
    """Ask it to end, and kill what is left of it and its descendants after that time.

    Returns what was left of its output; nothing if it had to be killed.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    try:
        left, _ = await asyncio.wait_for(process.communicate(), patience_s)
    except TimeoutError:
        left = b""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
    return left
