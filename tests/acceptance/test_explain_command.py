"""`forebay explain` as a whole: a worker that fails at first, and why its requests went where they went."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dispatcher import queues
from dispatcher.archive import Archive
from forebay.embedded import find_program
from forebay.errors import NoServer
from forebay.simulator.faults import AnswerFault
from forebay.simulator.process import start_engine
from forebay.simulator.settings import EngineSettings
from tests.checkout import ROOT
from workers.spec import worker_id

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(120)]

MODEL = "sim-model"
LINES = 12


def row(number):
    body = {"model": MODEL, "prompt": f"secret word {number}", "max_tokens": 4}
    line = {"custom_id": f"l{number}", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line) + "\n"


def command(folder, *words, expect=0, **variables):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "forebay", *words],
        cwd=folder,
        env=clean | {"PYTHONPATH": str(ROOT)} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == expect, done.stderr
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture
def fleet():
    """One engine that fails its first two requests, and one that is sound."""
    try:
        find_program()
    except NoServer as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))  # no Valkey or Redis to start; it says which to install
    faults = (AnswerFault(status=500, requests=2),)
    with (
        start_engine(EngineSettings(runtime="vllm", model=MODEL, instant=True, faults=faults)) as faulty,
        start_engine(EngineSettings(runtime="vllm", model=MODEL, instant=True)) as sound,
    ):
        yield faulty.url, sound.url


def retried(folder):
    """The lines that were sent more than once."""
    results = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    return [result["custom_id"] for result in results if result["forebay"]["attempts"] > 1]


def test_a_retried_line_shows_both_attempts_whom_filters_set_aside_scores_and_outcomes(
    fleet, tmp_path, redis_url
):
    faulty, sound = fleet
    (tmp_path / "in.jsonl").write_text("".join(row(number) for number in range(LINES)))
    workers = ("--worker", faulty, "--worker", sound)
    command(tmp_path, "run", "in.jsonl", "-o", "out.jsonl", *workers, "--redis", redis_url, "--no-hedge")
    name = retried(tmp_path)[0]

    shown = json.loads(command(tmp_path, "explain", name, "--redis", redis_url, "--json").stdout)
    first, *_, last = shown["attempts"]
    assert (shown["custom_id"], first["attempt"], last["attempt"]) == (name, 1, len(shown["attempts"]))
    assert (first["worker"], first["outcome"], first["verdict"]) == (
        worker_id(faulty), "server_error", "failure",
    )  # fmt: skip
    assert (last["worker"], last["outcome"], last["verdict"]) == (worker_id(sound), "ok", "success")
    assert last["dropped"]["tried"] == {"count": 1, "workers": [worker_id(faulty)]}
    [scored] = last["candidates"]
    assert scored["scores"].keys() == last["weights"].keys()

    text = command(tmp_path, "explain", name, "--redis", redis_url).stdout
    assert f"attempt 1: sent to {worker_id(faulty)}, ended server_error (failure for the worker)" in text
    assert f"sent to {worker_id(sound)}, ended ok" in text
    assert f"tried 1 ({worker_id(faulty)})" in text
    assert "<- picked" in text
    assert "secret" not in text

    tried = command(tmp_path, "simulate-policy", "--recorded", "all", "--redis", redis_url, "--json")
    happened, replayed = json.loads(tried.stdout)
    assert happened["requests"] == replayed["requests"] == LINES
    assert {share["worker"] for share in happened["workers"]} <= {worker_id(faulty), worker_id(sound)}
    assert f"{LINES} answered requests are recorded" in tried.stderr
    one = command(tmp_path, "simulate-policy", "--recorded", shown["batch_id"], "--redis", redis_url)
    assert f"{LINES} answered requests are recorded" in one.stderr  # `run` has removed the batch, which told

    again = command(tmp_path, "explain", shown["request_id"], "--redis", redis_url, "--json").stdout
    assert json.loads(again) == shown
    said = command(tmp_path, "explain", "nobody", "--redis", redis_url, expect=2).stderr
    assert "no decision is recorded for nobody" in said


def test_a_run_with_a_redis_of_its_own_leaves_every_decision_in_a_file(fleet, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(row(number) for number in range(LINES)))
    workers = [word for url in fleet for word in ("--worker", url)]
    command(tmp_path, "run", "in.jsonl", "-o", "out.jsonl", *workers, "--explain", "why.jsonl")
    records = [json.loads(line) for line in (tmp_path / "why.jsonl").read_text().splitlines()]
    assert {record["custom_id"] for record in records} == {f"l{number}" for number in range(LINES)}
    name = retried(tmp_path)[0]
    shown = json.loads(command(tmp_path, "explain", name, "--from", "why.jsonl", "--json").stdout)
    assert [attempt["attempt"] for attempt in shown["attempts"]][:2] == [1, 2]
    assert "secret" not in (tmp_path / "why.jsonl").read_text()
    taken = command(
        tmp_path, "run", "in.jsonl", "-o", "other.jsonl", *workers, "--explain", "why.jsonl", expect=2
    )
    assert "why.jsonl exists already" in taken.stderr


async def test_an_inline_request_is_explained_by_its_job(rig, valkey):
    engine = await rig.engine()
    rig.monitor()
    rig.dispatcher("d1", explain_sample=1)
    await rig.ready()
    body = {"model": engine.settings.model, "prompt": "secret", "max_tokens": 2}
    job = queues.enqueue_request(rig.rq_redis, "default", body, url="/v1/completions", timeout_s=None)
    archive = Archive(valkey)
    [[record]] = await rig.until(lambda: archive.find(job), "its decision is recorded")
    assert (record.request_id, record.custom_id, record.batch_id) == (job, "", None)
    assert (record.worker, record.outcome, record.dispatcher) == (worker_id(engine.url), "ok", "d1")
