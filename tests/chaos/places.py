"""Places in which one process lives after the other: a service, an engine, a client, a Valkey with its AOF.

Belongs here: starting, stopping and ending the processes that were started here, by their ids. Does not
belong here: why (``actor``) and how many (``installation``).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import httpx

from forebay.children import Child, start_child
from forebay.embedded import find_program
from forebay.errors import ChildDied
from forebay.simulator.command import LISTENING
from forebay.simulator.control import FAULT_PATH
from forebay.simulator.faults import BaseFault
from forebay.simulator.process import flags
from forebay.simulator.settings import EngineSettings

_LOOK_S = 0.05
"""From one look at a process to the next: processes have no event for us."""
_PATIENCE_S = 60.0
_REMEMBERED_S = 3.0


class Place:
    """A service, or a client: a command, and the process that runs it now."""

    def __init__(self, name: str, command: Sequence[str], logs: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.lives = 0
        self.children: list[Child] = []
        """All that ever lived here, the present one last."""
        self._command = command
        self._logs = logs
        self._environment = environment

    @property
    def child(self) -> Child:
        return self.children[-1]

    @property
    def life(self) -> str:
        """The name of the present life, which no other has."""
        return f"{self.name}-{self.lives}"

    def start(self) -> None:
        """Begin the next life."""
        self.lives += 1
        environment = os.environ | self._environment | {"FOREBAY_NAME": self.life}
        log = self._logs / f"{self.life}.log"
        self.children.append(start_child(self.life, self._command, log=log, environment=environment))

    def kill(self) -> None:
        """SIGKILL, and its end."""
        self.child.kill()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it lives."""
        if not self.child.ended(0):
            os.kill(self.child.pid, number)

    def end_all(self) -> None:
        """Nothing that ever lived here lives on."""
        for child in self.children:
            child.kill()


async def has_ended(child: Child, timeout_s: float) -> bool:
    """Wait for a process' end without holding up anybody else; False: it goes on."""
    deadline_s = time.monotonic() + timeout_s
    while not child.ended(0):
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(_LOOK_S)
    return True


def status_of(child: Child) -> int:
    """The exit status of a process that has ended."""
    try:
        child.check()
    except ChildDied as died:
        return died.status
    raise AssertionError(f"{child.name} still runs")


def ended_badly(child: Child) -> str | None:
    """Why the end of a service that was asked for with SIGTERM was not as it must be; None: it was."""
    status, said = status_of(child), child.log.read_text(errors="replace")
    begun = "dispatcher is ready" in said or "monitor starts" in said
    if status == 0 or (status == -signal.SIGTERM and not begun):  # it was still being imported
        return None
    return f"{child.name} ended with status {status} at SIGTERM"


class EnginePlace(Place):
    """A simulated engine: every life has the address of the first."""

    def __init__(self, name: str, settings: EngineSettings, logs: Path) -> None:
        self._settings = settings
        super().__init__(name, _engine_command(settings), logs, {})
        self.url = ""

    async def begin(self) -> None:
        """Begin a life, and return when it listens. Another one begins if its port was taken meanwhile."""
        self.start()
        async with asyncio.timeout(_PATIENCE_S):
            while (url := _announced(self.child)) is None:
                await asyncio.sleep(_LOOK_S)
                if self.child.ended(0):
                    self.start()
        if not self.url:
            self.url = url
            port = int(url.rpartition(":")[2])
            self._command = _engine_command(self._settings.model_copy(update={"port": port}))

    async def suffer(self, client: httpx.AsyncClient, fault: BaseFault) -> None:
        """Set a fault; nothing happens to an engine that does not answer."""
        with suppress(httpx.HTTPError):
            await client.post(self.url + FAULT_PATH, content=fault.model_dump_json())


def _engine_command(settings: EngineSettings) -> list[str]:
    return [sys.executable, "-m", "forebay.simulator", *flags(settings)]


def _announced(child: Child) -> str | None:
    lines = (line for line in child.last_lines().splitlines() if line.startswith(LISTENING))
    return next((line.removeprefix(LISTENING).strip() for line in lines), None)


class RedisPlace(Place):
    """A Valkey on a unix socket, whose data outlive it in an append-only file that is synced every second."""

    def __init__(self, folder: Path, logs: Path) -> None:
        """``folder``: its data and its socket, so its path must be short."""
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._folder = folder
        self._sizes: deque[tuple[float, int]] = deque()
        """When the file had which size, for as long as may be lost."""
        super().__init__("valkey", _valkey_command(self.socket, folder), logs, {})

    async def begin(self) -> None:
        """Begin a life, and return when it listens."""
        self.socket.unlink(missing_ok=True)
        self.start()
        async with asyncio.timeout(_PATIENCE_S):
            while not _listens(self.socket):
                await asyncio.sleep(_LOOK_S)
                self.child.check()

    def remember_size(self) -> None:
        """Note how much is written by now; `lose` can go back to what was noted."""
        now_s = time.monotonic()
        self._sizes.append((now_s, self._file.stat().st_size))
        while self._sizes[0][0] < now_s - _REMEMBERED_S:
            self._sizes.popleft()

    def lose(self, lost_s: float) -> int:
        """Cut off what was written in the last seconds before now, as a lost power supply may.

        Returns how many bytes that was. Only while no process lives here.
        """
        file, before_s = self._file, time.monotonic() - lost_s
        size = file.stat().st_size
        kept = next((noted for at_s, noted in reversed(self._sizes) if at_s <= before_s), size)
        self._sizes.clear()
        os.truncate(file, kept)
        return size - kept

    @property
    def _file(self) -> Path:
        [file] = (self._folder / "appendonlydir").glob("*.incr.aof")
        return file


def _valkey_command(socket_path: Path, folder: Path) -> list[str]:
    options = {
        "--port": "0",
        "--unixsocket": str(socket_path),
        "--dir": str(folder),
        "--save": "",
        "--appendonly": "yes",
        "--appendfsync": "everysec",
        "--auto-aof-rewrite-percentage": "0",  # one file, so that its end can be cut off
        "--maxmemory-policy": "noeviction",
    }
    return [find_program(), *(word for option in options.items() for word in option)]


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
