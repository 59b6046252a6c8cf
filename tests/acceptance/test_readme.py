"""Every command of the README does what the README says, in its order, on simulated engines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from typer.testing import CliRunner

from forebay.cli.main import app
from forebay.simulator.process import start_engine
from forebay.simulator.settings import EngineSettings
from tests.checkout import ROOT
from tests.commands import complaint
from tests.kustomize import render
from tests.readme import Step, blocks, steps
from workers.connection import connect_sync
from workers.spec import worker_id

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(150)]

README = ROOT / "README.md"
BATCH = "batch_0123456789abcdef01234567"
REDIS = "redis://redis:6379/0"
FAILS = "fails"
"""The custom_id of a line that every engine refuses: somebody has to be retried."""
LINES_FAIL = {"run", "wait", "retry"}
"""Commands whose exit code says that lines failed: one of ours does."""


class Reader:
    """Somebody who types what the README shows, in a folder of their own."""

    def __init__(self, redis_url: str, engines: Mapping[str, str], stack: ExitStack) -> None:
        self.names = {
            **{f"http://{name}": url for name, url in engines.items()},
            **{name: worker_id(url) for name, url in engines.items()},
            REDIS: redis_url,
            "/srv/forebay": str(Path.cwd() / "storage"),
            "--metrics-port 9101": "--metrics-port 0",
            "--metrics-port 9102": "--metrics-port 0",
        }
        self.environment: dict[str, str] = {"VLLM_API_KEY": "one", "SGLANG_KEY": "two"}
        self.said: dict[str, str] = {}
        """What each command printed, by its first words."""
        self._redis_url = redis_url
        self._stack = stack

    def type(self, step: Step) -> None:
        match step.words:
            case ("export", *pairs):
                self.environment |= dict(pair.split("=", 1) for pair in pairs)
            case ("forebay", *words) if step.behind:
                self._start(words)
            case ("forebay", *words):
                self._forebay(words)
            case ("redis-cli", *words):
                with connect_sync(self._redis_url) as client:
                    assert client.execute_command(*words), f"nothing there: {step}"
            case ("rq", *words):
                subprocess.run([Path(sys.executable).parent / "rq", *words], check=True, capture_output=True)
            case ("make", target):
                # Each runs by itself wherever all tests run; here it would run itself.
                assert f" make {target}\n" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
            case ("docker", "compose", *words):
                _check_compose(words)
            case ("kubectl", "apply", "-k", folder):
                assert render(ROOT / folder)
            case _:
                raise AssertionError(f"nobody tries this command: {step}")

    def _start(self, words: list[str]) -> None:
        process = self._stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "forebay", *words],
                env=os.environ | self.environment | {"PYTHONPATH": str(ROOT)},
                stderr=subprocess.DEVNULL,
            )
        )
        self._stack.callback(process.send_signal, signal.SIGTERM)

    def _forebay(self, words: list[str]) -> None:
        told = CliRunner().invoke(app, words, prog_name="forebay", env=self.environment)
        allowed = {0, 1} if words[0] in LINES_FAIL else {0}
        assert told.exit_code in allowed, (words, told.output)
        assert told.exception is None or isinstance(told.exception, SystemExit)
        self.said[" ".join(words[:2]) if words[0] == "workers" else words[0]] = told.stdout
        if words[0] == "submit":
            self.names[BATCH] = msgspec.json.decode(told.stdout)["id"]


def _check_compose(words: list[str]) -> None:
    """As far as it can be told without Docker: profiles, services, what a service is told to run."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
    services = compose["services"]
    profiles = [words[at + 1] for at, word in enumerate(words) if word == "--profile"]
    assert set(profiles) <= {name for service in services.values() for name in service.get("profiles", [])}
    scaled = [words[at + 1].split("=")[0] for at, word in enumerate(words) if word == "--scale"]
    assert set(scaled) <= services.keys()
    if "run" in words:
        name = next(word for word in words if word in services)
        assert complaint(words[words.index(name) + 1 :]) is None


def lines_of(path: str) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in Path(path).read_bytes().splitlines()]


@pytest.fixture
def reader(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
        monkeypatch.delenv(name)
    [shown] = blocks(README, "json")
    line = msgspec.json.decode(shown)
    good = [line | {"custom_id": name} for name in ("a", "b", "my-custom-id")]
    bad = line | {"custom_id": FAILS, "body": line["body"] | {"messages": []}}
    Path("body.json").write_bytes(msgspec.json.encode(line["body"]))
    Path("prompts.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in [*good, bad]))
    with ExitStack() as stack:
        vllm, sglang = (
            stack.enter_context(start_engine(EngineSettings(runtime=runtime, model="m", instant=True)))
            for runtime in ("vllm", "sglang")
        )
        yield Reader(redis_url, {"gpu-1:8000": vllm.url, "gpu-2:30000": sglang.url}, stack)


def test_every_command_does_what_it_says(reader: Reader, monkeypatch: pytest.MonkeyPatch):
    for block in blocks(README, "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            for step in steps(line, reader.names):
                reader.type(step)

    answered = {"a", "b", "my-custom-id"}
    assert {each["custom_id"] for each in lines_of("answers.jsonl")} == answered
    assert {each["custom_id"] for each in lines_of("failed.jsonl")} == {FAILS}
    assert msgspec.json.decode(reader.said["status"])["status"] == "completed"
    assert "waited" in reader.said["explain"]
    assert "over it" in reader.said["simulate-policy"]
    assert "limit_reason" in reader.said["workers show"]

    # What stands in the prose, and the program, on the same services.
    inline = "forebay enqueue body.json --wait"
    assert f"`{inline}`" in README.read_text(encoding="utf-8")
    reader.type(next(steps(inline, reader.names)))
    assert msgspec.json.decode(reader.said["enqueue"])["status_code"] == 200
    for variable, value in reader.environment.items():
        monkeypatch.setenv(variable, value)
    [program] = blocks(README, "python")
    told: list[str] = []
    exec(program.replace(REDIS, reader.names[REDIS]), {"print": lambda name, _: told.append(name)})
    assert answered <= set(told)
