"""``forebay run`` as a whole: real processes, simulated engines, an embedded server, an exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from dispatcher.batches.parts import durable_results
from dispatcher.batches.storage import Storage
from forebay.embedded import find_program
from forebay.errors import NoServer
from forebay.simulator.process import start_engine
from forebay.simulator.settings import EngineSettings

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(120)]

MODEL = "sim-model"
LINES = 60


@pytest.fixture(autouse=True)
def _some_server():
    try:
        find_program()
    except NoServer as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))  # no Valkey or Redis to start; it says which to install


@pytest.fixture(scope="module")
def fast():
    """An engine that answers at once."""
    with start_engine(EngineSettings(runtime="vllm", model=MODEL, instant=True)) as engine:
        yield engine.url


@pytest.fixture(scope="module")
def slow():
    """An engine that takes half a minute for all lines."""
    settings = EngineSettings(
        runtime="sglang",
        model=MODEL,
        tokens_per_s=40,
        slots=4,
        slowdown=0,
        answer_tokens_median=4096,
        answer_tokens_sigma=0,
    )
    with start_engine(settings) as engine:
        yield engine.url


def a_file(folder, *, models=(MODEL,), lines=LINES):
    path = folder / "in.jsonl"
    with path.open("wb") as sink:
        for number in range(lines):
            body = {"model": models[number % len(models)], "prompt": f"word {number}", "max_tokens": 40}
            line = {"custom_id": f"l{number}", "method": "POST", "url": "/v1/completions", "body": body}
            sink.write(msgspec.json.encode(line) + b"\n")
    return path


def start(folder, *words):
    """The command, begun; its standard output is read by whoever asked for JSON."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    return subprocess.Popen(
        [sys.executable, "-m", "forebay", "run", "in.jsonl", "-o", "out.jsonl", *words],
        cwd=folder,
        env=environment | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder, *words):
    with start(folder, *words) as process:
        out, err = process.communicate()
    assert "Traceback" not in err
    return process.returncode, out, err


def results(path):
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def until_some_are_done(process):
    """Read events until a few lines have durable results; returns the process's children."""
    for text in process.stdout:
        event = msgspec.json.decode(text)
        if event["event"] == "progress" and event["request_counts"]["completed"] >= 4:
            return psutil.Process(process.pid).children(recursive=True)
    raise AssertionError(f"it ended before any line was done: {process.stderr.read()}")


def assert_whole(folder):
    done = results(folder / "out.jsonl")
    assert [result["custom_id"] for result in done] == [f"l{number}" for number in range(LINES)]


def test_a_run_leaves_its_results_and_nothing_else(tmp_path, fast):
    a_file(tmp_path)
    code, out, err = run(tmp_path, "--worker", fast, "--worker", f"{fast}/v1/")
    assert code == 0, err
    assert_whole(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert f"completed: {LINES} done, 0 failed of {LINES}" in out
    assert "\x1b" not in out + err
    [result] = [each for each in results(tmp_path / "out.jsonl") if each["custom_id"] == "l7"]
    assert result["response"]["status_code"] == 200
    assert result["forebay"]["worker"] == fast.removeprefix("http://")


def test_failed_lines_go_to_a_file_of_their_own_and_the_exit_code_tells(tmp_path, fast):
    source = a_file(tmp_path, lines=4)
    with source.open("ab") as more:
        more.write(b"no json\n")
    code, out, err = run(tmp_path, "--worker", fast, "--bad-lines", "skip", "--no-detail")
    assert code == 1, err
    assert "4 done, 1 failed of 5" in out
    assert [result["custom_id"] for result in results(tmp_path / "out.jsonl")] == ["l0", "l1", "l2", "l3"]
    assert all("forebay" not in result for result in results(tmp_path / "out.jsonl"))
    [failed] = results(tmp_path / "out.errors.jsonl")
    assert failed["error"]["code"] == "invalid_line"


def test_json_is_events_and_one_last_line(tmp_path, fast):
    a_file(tmp_path)
    code, out, err = run(tmp_path, "--worker", fast, "--json", "--errors", "bad.jsonl", "--keep-state")
    assert code == 0, err
    *events, last = [msgspec.json.decode(line) for line in out.splitlines()]
    assert events[0]["event"] == "started"
    assert events[-1] == {"event": "finished", "batch_id": last["batch_id"]}
    assert {event["event"] for event in events} <= {"started", "waiting", "progress", "finished"}
    assert last["status"] == "completed"
    assert last["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    assert (last["output"], last["errors"]) == ("out.jsonl", None)
    assert last["elapsed_s"] > 0
    assert (tmp_path / "out.jsonl.forebay" / "manifest.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_taken_up_again(tmp_path, slow, fast, number):
    a_file(tmp_path)
    with start(tmp_path, "--worker", slow, "--json") as process:
        children = until_some_are_done(process)
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == 3, err
    assert "run the same command again to resume" in err
    assert "Traceback" not in err
    assert msgspec.json.decode(out.splitlines()[-1])["output"] is None
    assert not any(child.is_running() for child in children)
    assert not (tmp_path / "out.jsonl").exists()
    kept = kept_results(tmp_path)
    assert len(kept) >= 4

    code, out, err = run(tmp_path, "--worker", fast)
    assert code == 0, err
    assert "lines taken up again" in err
    assert_whole(tmp_path)
    assert kept <= {msgspec.json.encode(result) for result in results(tmp_path / "out.jsonl")}
    assert not (tmp_path / "out.jsonl.forebay").exists()


def kept_results(folder):
    storage = Storage(str(folder / "out.jsonl.forebay" / "storage"))
    [batch_id] = storage.batch_ids()
    records = durable_results(storage.files(batch_id))
    return {msgspec.json.encode(msgspec.json.decode(record)) for record in records}


def test_a_killed_run_leaves_no_process_and_is_taken_up_again(tmp_path, slow, fast):
    a_file(tmp_path)
    with start(tmp_path, "--worker", slow, "--json") as process:
        children = until_some_are_done(process)
        assert len(children) == 3
        process.kill()
        _, alive = psutil.wait_procs(children, timeout=20)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []
    kept = kept_results(tmp_path)
    code, _, err = run(tmp_path, "--worker", fast)
    assert code == 0, err
    assert_whole(tmp_path)
    assert kept <= {msgspec.json.encode(result) for result in results(tmp_path / "out.jsonl")}


@pytest.mark.parametrize(
    ("command", "name", "said"),
    [
        ("dispatcher", "dispatcher", "dispatcher is ready"),
        ("valkey", "embedded Valkey", "Ready to accept connections"),
    ],
)
def test_a_service_that_dies_ends_the_run_with_its_last_words(tmp_path, slow, command, name, said):
    a_file(tmp_path)
    with start(tmp_path, "--worker", slow, "--json") as process:
        children = until_some_are_done(process)
        [victim] = [child for child in children if command in " ".join(child.cmdline())]
        victim.kill()
        _, err = process.communicate()
    assert process.returncode == 4, err
    assert f"the {name} ended with status -9; its last words:" in err
    assert said in err
    assert not any(child.is_running() for child in children)
    assert (tmp_path / "out.jsonl.forebay" / "manifest.json").exists()


def test_a_fleet_that_never_gets_ready_is_named_and_nothing_is_left(tmp_path):
    a_file(tmp_path)
    code, out, err = run(tmp_path, "--worker", "http://127.0.0.1:1", "--wait-ready", "1")
    assert code == 4
    assert out == ""
    assert "no worker became ready within 1 s:\n  127.0.0.1:1 (starting): " in err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_batch_that_is_late_expires_and_accounts_for_every_line(tmp_path, slow):
    a_file(tmp_path)
    code, _, err = run(tmp_path, "--worker", slow, "--window", "3s")
    assert code == 3, err
    lines = results(tmp_path / "out.jsonl") if (tmp_path / "out.jsonl").exists() else []
    late = results(tmp_path / "out.errors.jsonl")
    assert len(lines) + len(late) == LINES
    assert {result["error"]["code"] for result in late} == {"batch_expired"}


def test_a_model_that_nobody_serves_is_named_while_its_lines_wait(tmp_path, fast):
    a_file(tmp_path, models=(MODEL, "misspelt"))
    code, _, err = run(tmp_path, "--worker", fast, "--window", "3s")
    assert code == 3, err
    assert "no worker serves misspelt, its lines wait (they serve sim-model)" in err
    assert len(results(tmp_path / "out.jsonl")) == LINES // 2


def test_a_run_on_somebodys_redis_leaves_it_as_it_was(tmp_path, fast, redis_url):
    import redis

    a_file(tmp_path)
    code, _, err = run(tmp_path, "--worker", fast, "--redis", redis_url)
    assert code == 0, err
    assert_whole(tmp_path)
    with redis.Redis.from_url(redis_url, decode_responses=True) as server:
        assert server.smembers("forebay:v1:workers") == set()
        assert server.zrange("forebay:v1:batches", 0, -1) == []
        assert list(server.scan_iter("*run-batch*")) == []
        assert list(server.scan_iter("rq:job:*")) == []
        assert server.smembers("rq:queues") == set()


def test_the_demonstration_ends_well(tmp_path):
    code = (
        "import forebay.demo as demo, typer\n"
        "faster = {'tokens_per_s': 4000.0, 'prefill_tokens_per_s': 400000.0}\n"
        "demo.ENGINES = tuple(each.model_copy(update=faster) for each in demo.ENGINES)\n"
        "typer.run(demo.demo)\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "500 done, 0 failed of 500" in done.stdout
    assert "time over the lower bound: " in done.stdout
    assert ", known)" in done.stdout
    assert len(results(tmp_path / "demo-output" / "results.jsonl")) == 500
