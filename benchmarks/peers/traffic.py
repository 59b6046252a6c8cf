"""The interactive traffic beside one run: begun before its batch, and told of for the time of the batch.

Belongs here: the process and its report. What it asks is ``interactive``'s subject.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.peers import interactive, record
from benchmarks.peers.processes import end, started
from benchmarks.peers.record import Interactive
from benchmarks.peers.scenarios import Scenario

_AHEAD_S = 3.0
"""How long it flows before the batch begins."""


class _Report(msgspec.Struct):
    answered: list[tuple[float, float]]
    failed: int


class Traffic:
    """Interactive traffic that flows beside the batch; without a share of the capacity there is none."""

    def __init__(self, process: asyncio.subprocess.Process | None) -> None:
        self._process = process
        self._report: _Report | None = None

    async def stop(self) -> None:
        """Let it end, and take its report."""
        if self._process is not None:
            told = await end(self._process, patience_s=2 * interactive.LAST_WORDS_S)
            self._report = msgspec.json.decode(told, type=_Report)

    def during(self, began_s: float, ended_s: float) -> Interactive | None:
        """What was asked between two Unix times, once it has stopped; None: there was no traffic."""
        if self._report is None:
            return None
        return record.during(self._report.answered, self._report.failed, began_s, ended_s)


@contextlib.asynccontextmanager
async def flowing(scenario: Scenario, urls: Sequence[str], seed: int, folder: Path) -> AsyncIterator[Traffic]:
    """The traffic of a scenario, to engines at these URLs, while the block runs; most have none."""
    if not scenario.interactive:
        yield Traffic(None)
        return
    command = [sys.executable, "-m", "benchmarks.peers.interactive", "--seed", str(seed)]
    command += ["--tokens-per-s", str(scenario.interactive * scenario.capacity)]
    for url, engine in zip(urls, scenario.engines, strict=True):
        command += ["--to", f"{url}={engine.capacity}"]
    async with started(command, folder / "interactive.log") as process:
        await asyncio.sleep(_AHEAD_S)
        yield Traffic(process)
