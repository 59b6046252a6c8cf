"""A batch through a failover: three Valkey servers under three sentinels, and the master is killed."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
from rq.serializers import JSONSerializer
from rq.worker import BaseWorker

from forebay import Forebay
from forebay.embedded import find_program
from tests.acceptance.conftest import Rig, rows
from workers.connection import connect, connect_sync
from workers.store import FleetStore

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(180)]

SERVICE = "fleet"
PATIENCE_S = 30.0


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now."""
    ports: list[int] = []
    with contextlib.ExitStack() as held:
        for _ in range(count):
            one = held.enter_context(socket.socket())
            one.bind(("127.0.0.1", 0))
            ports.append(one.getsockname()[1])
    return ports


async def until(holds, what: str) -> None:
    """Look until it holds: other processes have no event for us."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(redis.exceptions.RedisError):
            if holds():
                return
        assert time.monotonic() < deadline_s, f"in vain: {what}"
        await asyncio.sleep(0.05)


class Replicated:
    """A master, two replicas, and three sentinels over them; all of them end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = free_ports(3)
        self.sentinels = free_ports(3)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        sentinels = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        return f"redis+sentinel://{sentinels}/{SERVICE}/0"

    async def start(self) -> None:
        master = self.ports[0]
        for port in self.ports:
            follows = [] if port == master else ["--replicaof", f"127.0.0.1 {master}"]
            self._run(port, "--save", "", "--repl-diskless-sync-delay", "0", *follows)
        await until(lambda: self.replicas_online(master) == 2, "both replicas follow")
        for port in self.sentinels:
            config = self.folder / f"sentinel-{port}.conf"
            config.write_text(
                f"sentinel monitor {SERVICE} 127.0.0.1 {master} 2\n"
                f"sentinel down-after-milliseconds {SERVICE} 3000\n"
                f"sentinel failover-timeout {SERVICE} 5000\n"
            )
            self._run(port, "--sentinel", config=config)
        for port in self.sentinels:
            await until(lambda port=port: self.sees_all(port), "each sentinel sees everybody")

    def _run(self, port: int, *options: str, config: Path | None = None) -> None:
        first = [str(config)] if config else []
        common = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        with (self.folder / f"{port}.txt").open("wb") as log:
            self.processes[port] = subprocess.Popen(
                [find_program(), *first, *common, *options], stdout=log, stderr=log
            )

    def replicas_online(self, port: int) -> int:
        with redis.Redis(port=port, decode_responses=True) as client:
            told = client.info("replication")
        return sum(told.get(f"slave{number}", {}).get("state") == "online" for number in range(2))

    def sees_all(self, sentinel: int) -> bool:
        with redis.Redis(port=sentinel, decode_responses=True) as client:
            told = client.execute_command("SENTINEL", "MASTERS")
        seen = dict(zip(told[0][::2], told[0][1::2], strict=True)) if isinstance(told[0], list) else told[0]
        return (int(seen["num-slaves"]), int(seen["num-other-sentinels"])) == (2, 2)

    def master(self) -> int:
        with redis.Redis(port=self.sentinels[0], decode_responses=True) as client:
            return int(client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])

    def kill_master(self) -> None:
        self.processes[self.ports[0]].kill()

    def freeze_master(self) -> None:
        self.processes[self.ports[0]].send_signal(signal.SIGSTOP)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


@pytest.fixture
async def replicated(valkey_server: str, tmp_path: Path) -> AsyncIterator[Replicated]:
    servers = Replicated(tmp_path)
    try:
        await servers.start()
        yield servers
    finally:
        servers.end()


@pytest.fixture
async def rig(replicated: Replicated, tmp_path: Path) -> AsyncIterator[Rig]:
    client = connect(replicated.url)
    rig = Rig(replicated.url, tmp_path, client)
    yield rig
    await rig.close()
    await client.aclose()


async def test_a_killed_master_costs_no_line_and_ends_nobody(rig, replicated):
    for _ in range(2):
        await rig.engine(slots=8, tokens_per_s=100.0)
    monitor = rig.monitor()
    dispatcher = rig.dispatcher("d1", part_lines=8, lease_ttl_s=5)
    batch = await rig.submit(rows(240, tokens=20), slots=16)
    await rig.some_done(batch, 20)
    replicated.kill_master()
    await until(lambda: replicated.master() != replicated.ports[0], "the sentinels name another master")
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", [f"c{number}" for number in range(240)])
    assert (monitor.poll(), dispatcher.poll()) == (None, None)
    with redis.Redis(port=replicated.master()) as master:  # what `rq info --url` would look at
        seen = BaseWorker.all(connection=master, serializer=JSONSerializer)
    assert [one.name for one in seen] == ["d1"]
    with Forebay(replicated.url, rig.storage.url) as forebay:
        # On a busy machine a second failover may follow, to a server that is behind: then it ends once more.
        await rig.until(
            lambda: forebay.status(batch).request_counts.completed == 240, "the new master knows it"
        )
        resumed = await asyncio.to_thread(forebay.resume, batch)
    assert (resumed.known, resumed.queued) == (True, 0)


async def test_a_command_to_a_master_that_stands_still_goes_to_the_next_master(replicated, monkeypatch):
    monkeypatch.setattr("workers.connection.SOCKET_TIMEOUT_S", 0.5)
    client, connection = connect(replicated.url), connect_sync(replicated.url)
    assert await FleetStore(client).now()
    assert connection.set("key", "before")
    replicated.freeze_master()
    await until(lambda: replicated.master() != replicated.ports[0], "the sentinels name another master")
    assert await FleetStore(client).generation() == 0
    assert await asyncio.to_thread(connection.set, "key", "after")
    with redis.Redis(port=replicated.master()) as master:
        assert master.get("key") == b"after"
    await client.aclose()
    connection.close()
