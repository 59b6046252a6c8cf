"""A monitor process and its configuration file: workers, mappings, mistakes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from forebay.simulator.server import SimulatedEngine
from forebay.simulator.settings import EngineSettings
from tests.acceptance.conftest import ROOT
from workers.fleet import WorkerState
from workers.spec import worker_id

pytestmark = pytest.mark.acceptance


async def test_workers_of_the_file_are_watched_with_its_mappings_and_follow_it(rig, tmp_path):
    file = tmp_path / "forebay.toml"
    async with (
        SimulatedEngine(EngineSettings(runtime="vllm")) as first,
        SimulatedEngine(EngineSettings(runtime="vllm")) as second,
    ):
        table = '[[worker]]\nurl = "{}/v1"\n'
        mapping = '[monitor.mappings."{}".aliases]\nrunning = ["no:such_metric"]\n'
        listed = table.format(first.url) + table.format(second.url)
        file.write_text(listed + mapping.format(worker_id(second.url)), encoding="utf-8")
        rig._start("monitor", config=file, poll_interval_s=0.1)

        async def both_ready():
            workers = (await rig.store.view()).workers
            return len(workers) == 2 and all(worker.state is WorkerState.READY for worker in workers)

        async def first_read():
            return (await rig.worker(first.url)).load

        async def second_missing():
            return "lacks no:such_metric" in (await rig.worker(second.url)).reason

        await rig.until(both_ready, "both workers of the file are ready")
        await rig.until(first_read, "the first is read")
        await rig.until(second_missing, "the second lacks what its mapping names")
        file.write_text(table.format(first.url), encoding="utf-8")

        async def second_gone():
            return [worker.id for worker in (await rig.store.view()).workers] == [worker_id(first.url)]

        await rig.until(second_gone, "the worker that was taken out is drained and gone")


@pytest.mark.parametrize(
    ("text", "words", "named"),
    [
        ("[monitor]\ncolour = 1\n", (), "colour"),
        ('[[worker]]\nurl = "nonsense"\n', (), "worker 1"),
        ("", ("--worker", "nonsense"), "'nonsense' is not the URL of a worker"),
    ],
)
def test_a_mistake_is_told_at_the_start_in_one_line(redis_url, tmp_path, text, words, named):
    file = tmp_path / "forebay.toml"
    file.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "monitor", "--redis", redis_url, *words],
        cwd=ROOT,
        env=os.environ | {"FOREBAY_CONFIG": str(file)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
