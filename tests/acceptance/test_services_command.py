"""The commands against one Redis that services and people share: register, submit, wait, results, cancel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from forebay.cli.main import app
from forebay.simulator.process import start_engine
from forebay.simulator.settings import EngineSettings

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(120)]

ROOT = Path(__file__).resolve().parents[2]


class Command:
    """The command line in one folder, with a Redis and a storage from the environment."""

    def __init__(self, folder, redis_url):
        self.folder = folder
        clean = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
        self.environment = clean | {
            "PYTHONPATH": str(ROOT),
            "FOREBAY_REDIS_URL": redis_url,
            "FOREBAY_STORAGE": str(folder / "storage"),
        }

    def start(self, *words):
        with (self.folder / f"{words[0]}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "forebay", *words],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
            )

    def __call__(self, *words, expect=0):
        done = subprocess.run(
            [sys.executable, "-m", "forebay", *words],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == expect, done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout

    def here(self, *words, expect=0):
        """The same without a process of its own: for what ends at once."""
        result = CliRunner().invoke(app, list(words), prog_name="forebay", env=self.environment)
        assert result.exit_code == expect, result.output
        assert result.exception is None or isinstance(result.exception, SystemExit)
        return result.stdout

    def json(self, *words, expect=0):
        return msgspec.json.decode(self(*words, "--json", expect=expect).splitlines()[-1])


@pytest.fixture
def forebay(tmp_path, redis_url):
    return Command(tmp_path, redis_url)


@pytest.fixture
def services(forebay):
    """A monitor and a dispatcher, ended as an init system would."""
    with ExitStack() as stack:
        for name in ("monitor", "dispatcher"):
            process = stack.enter_context(forebay.start(name))
            stack.callback(process.send_signal, signal.SIGTERM)
        yield


def a_file(folder, *, lines=20, tokens=8):
    path = folder / "in.jsonl"
    with path.open("wb") as sink:
        for number in range(lines):
            body = {"prompt": f"word {number}", "max_tokens": tokens}
            line = {"custom_id": f"l{number}", "method": "POST", "url": "/v1/completions", "body": body}
            sink.write(msgspec.json.encode(line) + b"\n")
    return path


@pytest.mark.usefixtures("services")
def test_a_batch_goes_through_the_services(forebay, tmp_path):
    a_file(tmp_path)
    with start_engine(EngineSettings(runtime="sglang", instant=True)) as engine:
        added = forebay.json("workers", "add", engine.url)
        assert added["outcome"] == "created"
        submitted = forebay.json("submit", "in.jsonl", "--window", "7d")
        assert submitted["object"] == "batch"
        assert submitted["completion_window"] == "7d"
        waited = forebay.json("wait", submitted["id"])
        assert waited["status"] == "completed"
        assert waited["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        assert forebay.json("status")["id"] == submitted["id"]
        assert [found["id"] for found in forebay.json("batches")] == [submitted["id"]]
        assert submitted["id"] in forebay("batches")
        saved = forebay.json("results", submitted["id"], "-o", "out.jsonl")
        assert (saved["output"], saved["errors"]) == ("out.jsonl", None)
        assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 20

        [worker] = forebay.json("workers", "list")
        assert (worker["id"], worker["state"], worker["runtime"]) == (added["id"], "ready", "sglang")
        assert forebay.json("workers", "show", engine.url)["limit"] == worker["limit"]
        [loads] = forebay.json("workers", "loads")
        assert (loads["id"], loads["source"], loads["running"]) == (added["id"], "native", 0)

        (tmp_path / "body.json").write_text(
            '{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}'
        )
        answer = forebay.json("enqueue", "body.json", "--wait")
        assert answer["status_code"] == 200
        assert answer["body"]["usage"]["completion_tokens"] <= 4
        (tmp_path / "body.json").write_text('{"messages": "none", "stream": true}')
        assert forebay("enqueue", "body.json", "--wait", expect=2) == ""
        (tmp_path / "body.json").write_text('{"messages": "none"}')
        refused = forebay.json("enqueue", "body.json", "--wait", expect=1)
        assert refused["status_code"] == 400


@pytest.mark.usefixtures("services")
def test_a_cancelled_batch_accounts_for_every_line(forebay, tmp_path):
    a_file(tmp_path, tokens=400)
    slow = EngineSettings(tokens_per_s=10, slots=2, answer_tokens_median=4096, answer_tokens_sigma=0)
    with start_engine(slow) as engine:
        forebay("workers", "add", engine.url)
        batch_id = forebay.json("submit", "in.jsonl")["id"]
        assert forebay.json("cancel", batch_id)["status"] in ("cancelling", "cancelled")
        assert forebay.json("wait", batch_id, expect=3)["status"] == "cancelled"
        forebay("results", batch_id, "-o", "out.jsonl", "--errors", "errors.jsonl")
    written = [
        line
        for name in ("out.jsonl", "errors.jsonl")
        if (tmp_path / name).exists()
        for line in (tmp_path / name).read_bytes().splitlines()
    ]
    assert sorted(msgspec.json.decode(line)["custom_id"] for line in written) == sorted(
        f"l{number}" for number in range(20)
    )


@pytest.mark.usefixtures("services")
def test_what_a_cancelled_batch_left_is_done_by_a_retry(forebay, tmp_path):
    source = a_file(tmp_path, lines=5)
    old = msgspec.json.decode(forebay.here("submit", str(source), "--json"))["id"]
    assert forebay.here("retry", old, expect=2) == ""
    forebay.here("cancel", old)
    assert forebay.json("wait", old, expect=3)["request_counts"]["failed"] == 5
    assert forebay.here("retry", old, "--errors", "e.jsonl", expect=2) == ""
    with start_engine(EngineSettings(instant=True)) as engine:
        forebay.here("workers", "add", engine.url)
        retried = forebay.json("retry", old, "-o", "again.jsonl")
    assert (retried["status"], retried["request_counts"]["completed"]) == ("completed", 5)
    assert msgspec.json.decode(forebay.here("status", "--json"))["metadata"]["retry_of"] == old
    written = (tmp_path / "again.jsonl").read_bytes().splitlines()
    names = [msgspec.json.decode(line)["custom_id"] for line in written]
    assert names == [f"l{number}" for number in range(5)]


def test_a_bad_file_is_refused_by_submit(forebay, tmp_path):
    (tmp_path / "in.jsonl").write_bytes(b"no json\n")
    assert forebay("submit", "in.jsonl", expect=2) == ""
    assert forebay.json("batches") == []


def test_what_is_not_known_is_said_so(forebay):
    forebay.here("status", "batch_none", expect=2)
    forebay.here("status", expect=2)
    forebay.here("wait", "batch_none", expect=2)
    forebay.here("results", "../../etc", "-o", "out.jsonl", expect=2)
    forebay.here("workers", "show", "gpu-9:1", expect=2)
    forebay.here("workers", "remove", "gpu-9:1", expect=2)
    assert forebay.here("workers", "list") == "no workers; see: forebay workers add\n"
    assert forebay.here("workers", "list", "--json") == "[]\n"


def test_a_redis_user_who_may_not_is_told(forebay, redis_url):
    import redis

    with redis.Redis.from_url(redis_url) as server:
        server.execute_command(
            "ACL", "SETUSER", "ann", "on", ">pw", "~*", "+ping", "+info", "+client", "+hello"
        )
        try:
            url = redis_url.replace("unix://", "unix://ann:pw@")
            assert forebay("batches", "--redis", url, expect=4) == ""
        finally:
            server.execute_command("ACL", "DELUSER", "ann")


def test_waiting_ends_with_the_time_that_was_given(forebay, tmp_path):
    a_file(tmp_path)
    batch_id = forebay.json("submit", "in.jsonl")["id"]
    forebay("wait", batch_id, "--timeout", "1s", "--quiet", expect=4)
    assert '"status": "in_progress"' in forebay("status", batch_id)
