"""The plain client that peers are driven with, and the processes of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import psutil
import pytest

from benchmarks.peers import client, workload
from benchmarks.peers.processes import Usage, started
from benchmarks.peers.scenarios import SCENARIOS
from forebay.simulator.faults import AnswerFault, ResetFault
from forebay.simulator.server import SimulatedEngine
from forebay.simulator.settings import EngineSettings

FAST = EngineSettings(model="bench-model", tokens_per_s=20_000, prefill_tokens_per_s=0, slots=64, slowdown=0)


def batch(folder: Path, count: int) -> Path:
    path = folder / "in.jsonl"
    workload.write(path, workload.requests(SCENARIOS["mixed"], count, 1, foretold=True))
    return path


async def results(source: Path, places: list[str], *, retries: int = 0) -> list[dict[str, Any]]:
    target = source.with_name("out.jsonl")
    report = await client.send(source, target, places, retries=retries, timeout_s=30.0)
    assert report.ended_s >= report.began_s
    return [json.loads(line) for line in target.read_bytes().splitlines()]


async def test_every_line_gets_one_result_with_its_answer(tmp_path: Path):
    async with SimulatedEngine(FAST) as engine:
        told = await results(batch(tmp_path, 40), [engine.url] * 40)
    assert sorted(line["custom_id"] for line in told) == sorted(f"r{number}" for number in range(40))
    assert {line["response"]["status_code"] for line in told} == {200}
    assert all(line["response"]["body"]["usage"]["completion_tokens"] for line in told)
    assert all(line["latency_s"] > 0 and line["tries"] == 1 for line in told)


async def test_never_more_requests_are_in_flight_than_the_window_has_places(tmp_path: Path):
    async with SimulatedEngine(FAST) as engine:
        await results(batch(tmp_path, 40), [engine.url] * 7)
        assert engine.state()["max_running_seen"] == 7


async def test_a_client_that_does_not_retry_keeps_the_first_word(tmp_path: Path):
    async with SimulatedEngine(FAST) as engine:
        engine.control(AnswerFault(status=503, requests=2))
        engine.control(ResetFault(requests=1))
        told = await results(batch(tmp_path, 10), [engine.url])
    assert [line["response"] and line["response"]["status_code"] for line in told] == [503, 503, None] + [
        200
    ] * 7
    assert issubclass(getattr(aiohttp, told[2]["error"]), aiohttp.ClientError)


async def test_a_client_that_retries_tries_again_where_it_may_help(tmp_path: Path):
    async with SimulatedEngine(FAST) as engine:
        engine.control(AnswerFault(status=429, requests=1))
        engine.control(AnswerFault(status=400, requests=1))
        told = await results(batch(tmp_path, 5), [engine.url], retries=4)
    ends = sorted((line["response"]["status_code"], line["tries"]) for line in told)
    assert ends == [(200, 1), (200, 1), (200, 1), (200, 1), (400, 2)]


async def test_a_client_gives_up_after_its_last_try(tmp_path: Path):
    async with SimulatedEngine(FAST) as engine:
        engine.control(AnswerFault(status=503))
        (line,) = await results(batch(tmp_path, 1), [engine.url], retries=1)
    assert (line["response"]["status_code"], line["tries"]) == (503, 2)


async def test_a_client_that_knows_the_engines_gives_what_failed_to_another(tmp_path: Path):
    async with SimulatedEngine(FAST) as broken, SimulatedEngine(FAST) as working:
        broken.control(AnswerFault(status=503))
        told = await results(batch(tmp_path, 30), [broken.url, *[working.url] * 4], retries=4)
    assert len(told) == 30
    assert {line["response"]["status_code"] for line in told} == {200}


@pytest.mark.parametrize(
    ("status", "worth"), [(None, True), (200, False), (400, False), (408, True), (429, True), (503, True)]
)
def test_what_is_worth_retrying(status: int | None, *, worth: bool):
    assert client.worth_retrying(status) is worth


def test_an_answer_that_is_no_json_is_kept_as_text(tmp_path: Path):
    source = batch(tmp_path, 1)
    (work,) = client.read(source)
    assert json.loads(work.body)["ignore_eos"] is True
    assert client.target("http://127.0.0.1:1=8") == ("http://127.0.0.1:1", 8)


async def test_a_process_and_its_children_end_with_the_block_and_are_counted(tmp_path: Path):
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1)"
    script = f"{child}; print(p.pid, flush=True); p.wait()"
    async with started([sys.executable, "-c", script], tmp_path / "log") as process:
        assert process.stdout is not None
        grandchild = int(await process.stdout.readline())
        usage = Usage(process.pid)
        assert usage.look() > 0
        assert usage.cpu_s_at(0.0) == 0.0
        alone_mib = psutil.Process(process.pid).memory_info().rss / 2**20
        assert usage.peak_mib > alone_mib
    with anyio.fail_after(10):
        while _lives(grandchild):  # noqa: ASYNC110 - a process that is not ours to wait for
            await anyio.sleep(0.01)


def _lives(pid: int) -> bool:
    """Whether it runs; what nobody has waited for yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
