"""``forebay run`` on a Redis whose fleet is somebody's: what is theirs stays as it was."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from tests.acceptance.conftest import ROOT, rows
from workers.fleet import WorkerState
from workers.leases import Ask, Grant, lease_id
from workers.spec import WorkerSpec

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(120)]


async def begun(rig, *words, lines):
    """The command on the rig's Redis, begun."""
    (rig.folder / "in.jsonl").write_text("".join(f"{row}\n" for row in rows(lines)))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    command = ["run", "in.jsonl", "-o", "out.jsonl", "--redis", rig.redis_url, *words]
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "forebay", *command),
        cwd=rig.folder,
        env=clean | {"PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def run(rig, *words, lines=20):
    """Run the command on the rig's Redis; returns its exit code and all that it said."""
    process = await begun(rig, *words, lines=lines)
    said, _ = await process.communicate()
    return process.returncode, said.decode()


async def test_a_fleet_with_a_monitor_gets_no_second_one(rig, monkeypatch):
    """Which would take workers over whose keys this machine does not have, and call them unready."""
    theirs, ours = await rig.engine(), await rig.engine()
    await rig.store.register(WorkerSpec(url=theirs.url, api_key_env="FLEET_KEY"), replace=True)
    await rig.store.remove((await rig.worker(ours.url)).id)
    monkeypatch.setenv("FLEET_KEY", "sk-fleet")
    rig.monitor(name="theirs")
    monkeypatch.delenv("FLEET_KEY")
    await rig.ready()
    code, said = await run(rig, "--worker", ours.url)
    assert code == 0, said
    assert await rig.store.live_monitors(ttl_s=60) == ("theirs",)
    view = await rig.store.view()
    assert [(worker.url, worker.state) for worker in view.workers] == [(theirs.url, WorkerState.READY)]


async def test_a_fleet_that_lost_its_monitor_gets_one_for_the_run(rig):
    engine = await rig.engine()
    theirs = rig.monitor(name="theirs")
    await rig.until(lambda: rig.store.live_monitors(ttl_s=60), "their monitor is live")
    theirs.kill()
    code, said = await run(rig, "--worker", engine.url)
    assert code == 0, said
    assert len((rig.folder / "out.jsonl").read_bytes().splitlines()) == 20


async def test_a_worker_that_others_came_to_use_stays_when_the_run_ends(rig):
    engine = await rig.engine()
    worker = (await rig.worker(engine.url)).id
    await rig.store.remove(worker)
    running = asyncio.create_task(run(rig, "--worker", engine.url, lines=1000))

    async def taken():
        [answer] = await rig.store.acquire([Ask(lease_id("others", 1, 8), (worker,))])
        return isinstance(answer, Grant)

    await rig.until(taken, "others get a lease on it")
    code, said = await running
    assert code == 0, said
    assert f"{worker} stays registered: others use it" in said
    assert (await rig.worker(engine.url)).state is WorkerState.READY


async def test_a_run_that_sent_nothing_leaves_nothing_in_somebodys_storage(rig):
    folder = rig.folder / "storage-of-theirs"
    words = ("--worker", "http://127.0.0.1:9", "--storage", str(folder), "--wait-ready", "1s")
    code, said = await run(rig, *words)
    assert (code, "no worker became ready within 1 s" in said) == (4, True), said
    assert not list(folder.glob("batches/*"))


async def test_a_run_that_is_started_again_leaves_nothing_of_the_first_in_somebodys_redis(rig):
    engine = await rig.engine(tokens_per_s=1.0)
    first = await begun(rig, "--worker", engine.url, lines=5)
    await rig.until(lambda: engine.stats.by_path["/v1/chat/completions"], "its requests run")
    [entry] = await rig.ledger.recent()
    first.send_signal(signal.SIGINT)
    said, _ = await first.communicate()
    assert first.returncode == 3, said
    await rig.store.remove((await rig.worker(engine.url)).id)
    fast = await rig.engine()
    await rig.store.remove((await rig.worker(fast.url)).id)
    code, said = await run(rig, "--worker", fast.url, "--restart", lines=5)
    assert code == 0, said
    assert await rig.ledger.recent() == []
    assert not [key for key in await rig.store.client.keys("*") if entry.id in key]
