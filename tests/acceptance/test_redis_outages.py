"""Batches while Redis is away, and comes back with its log, an older state, or nothing: no line is lost.

How long it is away is a few seconds; `FOREBAY_TEST_OUTAGE_S=60` makes it a minute.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis
from rq.serializers import JSONSerializer
from rq.worker import BaseWorker

from forebay.desk import Desk
from forebay.embedded import find_program
from forebay.settings import FrontSettings
from tests.acceptance.conftest import ROOT, Rig, rows
from workers.connection import connect

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.timeout(60 + 4 * float(os.environ.get("FOREBAY_TEST_OUTAGE_S", "0"))),
]

LONG = pytest.mark.skipif("FOREBAY_TEST_OUTAGE_S" not in os.environ, reason="wants FOREBAY_TEST_OUTAGE_S")
AWAY_S = float(os.environ.get("FOREBAY_TEST_OUTAGE_S", "2"))
LINES = 160


class OwnServer:
    """A Valkey with its data in a folder, which may be frozen, killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"unix://{folder}/v.sock"
        self.start("--appendonly", "yes", "--appendfsync", "always")

    def start(self, *options: str) -> None:
        """Start it with what its folder holds, and wait until it answers."""
        socket = self.folder / "v.sock"
        socket.unlink(missing_ok=True)
        given = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(self.folder)]
        with (self.folder / "server.txt").open("ab") as log:
            self.process = subprocess.Popen([find_program(), *given, *options], stdout=log, stderr=log)
        deadline_s = time.monotonic() + 20
        with redis.Redis(unix_socket_path=str(socket)) as client:
            while True:
                try:
                    client.ping()
                except (redis.exceptions.ConnectionError, redis.exceptions.BusyLoadingError):
                    assert time.monotonic() < deadline_s, "the server does not answer"
                    time.sleep(0.01)  # a poll of a process that cannot signal us
                else:
                    return

    def save(self) -> None:
        """Keep the state of this moment for `restart_as_saved`."""
        with redis.Redis.from_url(self.url) as client:
            client.save()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def restart_with_its_log(self) -> None:
        self.start("--appendonly", "yes", "--appendfsync", "always")

    def restart_as_saved(self) -> None:
        """What a failover to a replica does that was behind: the last writes are gone."""
        self.start("--appendonly", "no")

    def restart_empty(self) -> None:
        (self.folder / "dump.rdb").unlink(missing_ok=True)
        self.start("--appendonly", "no")


@pytest.fixture
def server(valkey_server: str, tmp_path_factory: pytest.TempPathFactory):
    """`valkey_server` knows what to do where there is no server's program."""
    own = OwnServer(tmp_path_factory.mktemp("v"))
    yield own
    own.thaw()
    own.kill()


@pytest.fixture
async def rig(server: OwnServer, tmp_path: Path) -> AsyncIterator[Rig]:
    client = connect(server.url)
    rig = Rig(server.url, tmp_path, client)
    yield rig
    await rig.close()
    await client.aclose()


def command(rig: Rig, *words: str, redis: bool = True) -> subprocess.Popen[str]:
    """`forebay ...` on the rig's Redis and storage, or on neither."""
    ours = {"FOREBAY_REDIS_URL": rig.redis_url, "FOREBAY_STORAGE": rig.storage.url}
    environ = os.environ | (ours if redis else {})
    return subprocess.Popen(
        [sys.executable, "-m", "forebay", *words],
        cwd=ROOT, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


async def said(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = await asyncio.to_thread(process.communicate, timeout=50)
    return process.returncode, out, err


async def two_engines(rig: Rig) -> None:
    for runtime in ("vllm", "sglang"):
        await rig.engine(runtime, slots=8, tokens_per_s=100.0)


async def resume(rig: Rig, batch: str) -> tuple[bool, int]:
    """What `forebay resume` does: whether the batch was known, and how many jobs were queued."""
    desk = Desk(FrontSettings(redis_url=rig.redis_url, storage=rig.storage.url))
    resumed = await desk.resume(batch)
    await desk.close()
    return resumed.known, resumed.queued


def durable(rig: Rig, batch: str) -> set[str]:
    """The lines that have durable results now."""
    parts = (Path(rig.storage.url) / "batches" / batch / "parts").rglob("*.jsonl")
    return {
        json.loads(line)["record"]["custom_id"] for part in parts for line in part.read_bytes().splitlines()
    }


def in_rq_info(rig: Rig) -> list[str]:
    return [one.name for one in BaseWorker.all(connection=rig.rq_redis, serializer=JSONSerializer)]


async def test_redis_away_in_the_middle_costs_no_line_and_ends_nobody(rig: Rig, server: OwnServer):
    """Killed, and back with its log: services and a `forebay wait` live through it."""
    await two_engines(rig)
    services = [rig.monitor(), rig.dispatcher("d1", part_lines=8)]
    batch = await rig.submit(rows(LINES, tokens=10), slots=16)
    waits = command(rig, "wait", batch, "--json")
    assert '"progress"' in await asyncio.to_thread(waits.stdout.readline)
    await rig.some_done(batch, 10)
    server.kill()
    await asyncio.sleep(AWAY_S)  # the outage itself
    server.restart_with_its_log()
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", [f"c{number}" for number in range(LINES)])
    assert [service.poll() for service in services] == [None, None]
    assert (await said(waits))[0] == 0


@LONG
async def test_a_run_survives_that_its_embedded_server_stands_still(rig: Rig):
    await two_engines(rig)
    source, output = rig.folder / "in.jsonl", rig.folder / "out.jsonl"
    source.write_text("\n".join(rows(LINES, tokens=10)) + "\n")
    workers = [word for engine in rig.engines for word in ("--worker", engine.url)]
    run = command(rig, "run", str(source), "-o", str(output), "--json", *workers, redis=False)
    await rig.until(lambda: len(rig.sent) > 20, "some lines are sent")
    embedded = server_of(run)
    os.kill(embedded, signal.SIGSTOP)
    await asyncio.sleep(AWAY_S)  # the outage itself
    os.kill(embedded, signal.SIGCONT)
    code, _, err = await said(run)
    assert (code, len(output.read_bytes().splitlines())) == (0, LINES), err


def server_of(run: subprocess.Popen[str]) -> int:
    """The process of the embedded server that a run has started."""
    for children in Path("/proc").glob("[0-9]*/stat"):
        name, _, rest = children.read_text().partition("(")[2].rpartition(")")
        if name == "valkey-server" and int(rest.split()[1]) == run.pid:
            return int(children.parent.name)
    raise AssertionError("the run has no server")


@LONG
async def test_redis_frozen_for_long_in_the_middle_costs_no_line_and_ends_nobody(rig: Rig, server: OwnServer):
    await two_engines(rig)
    services = [rig.monitor(), rig.dispatcher("d1", part_lines=8), rig.dispatcher("d2", part_lines=8)]
    batch = await rig.submit(rows(LINES, tokens=10), slots=16)
    await rig.some_done(batch, 10)
    server.freeze()
    await asyncio.sleep(AWAY_S)  # the outage itself
    server.thaw()
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", [f"c{number}" for number in range(LINES)])
    assert [service.poll() for service in services] == [None, None, None]


async def test_a_batch_goes_on_from_its_files_after_redis_came_back_empty(rig: Rig, server: OwnServer):
    await two_engines(rig)
    config = rig.folder / "forebay.toml"
    config.write_text("".join(f'[[worker]]\nurl = "{engine.url}"\n' for engine in rig.engines))
    monitor = rig.monitor(config=config)
    dispatcher = rig.dispatcher("d1", part_lines=4)
    batch = await rig.submit(rows(LINES, tokens=10), slots=16)
    await rig.some_done(batch, 20)
    shards = (await rig.entry(batch)).shards
    server.kill()
    kept = durable(rig, batch)
    server.restart_empty()
    before = Counter(rig.sent)
    assert await resume(rig, batch) == (False, shards)
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", [f"c{number}" for number in range(LINES)])
    assert (monitor.poll(), dispatcher.poll()) == (None, None)
    assert len(kept) >= 20
    assert not {f"say {name}" for name in kept} & (Counter(rig.sent) - before).keys()
    await rig.until(lambda: in_rq_info(rig) == ["d1"], "the dispatcher is in `rq info`")


async def test_what_redis_forgot_of_its_last_moments_is_found_durable_and_the_batch_ends(
    rig: Rig, server: OwnServer
):
    """Shards were claimed, reported, done and acknowledged, and of all that nothing is known any more."""
    await two_engines(rig)
    monitor = rig.monitor()
    dispatcher = rig.dispatcher("d1", part_lines=4)
    batch = await rig.submit(rows(LINES, tokens=10), slots=16)
    await rig.some_done(batch, 10)
    server.save()
    saved = (await rig.entry(batch)).completed
    await rig.some_done(batch, LINES // 2)
    server.kill()
    server.restart_as_saved()
    assert (await rig.entry(batch)).completed <= saved + LINES // 4
    rig.let_claims_run_out("d1")
    status, results = await rig.ended(batch)
    assert (status, results.names) == ("completed", [f"c{number}" for number in range(LINES)])
    assert (monitor.poll(), dispatcher.poll()) == (None, None)
