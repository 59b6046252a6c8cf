"""Fixtures of the tests against real engines: the model, the engines (once a session), the services."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.children import end_all
from forebay.client import Forebay
from forebay.embedded import find_program
from forebay.errors import NoServer
from forebay.local import LocalServices, LocalSettings
from forebay.settings import FrontSettings
from tests.engines.environment import LLAMACPP, PYTHON, VLLM, Kit
from tests.engines.servers import GRACE_S, Server, Vllms, start_llama_server, start_vllm


def _needs(kit: Kit) -> None:
    if kit.missing:
        pytest.skip(kit.missing)  # the engine cannot be installed here; it says why


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model's files."""
    _needs(VLLM)  # its environment has what makes the model
    folder = tmp_path_factory.mktemp("tiny-llama")
    script = Path(__file__).with_name("tiny_model.py")
    made = subprocess.run(
        [str(PYTHON), str(script), str(folder)],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="session")
def vllms(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllms]:
    """All three, started together: each takes half a minute to come up."""
    logs = tmp_path_factory.mktemp("vllm")
    started: list[Server] = []
    try:
        started.append(start_vllm(tiny_model, logs, slots=8))
        started.append(start_vllm(tiny_model, logs, slots=2))
        started.append(start_vllm(tiny_model, logs, slots=2, more=["--max-num-queued-reqs", "4"]))
        for server in started:
            server.wait_until_it_serves()
        yield Vllms(*started)
    finally:
        end_all([server.child for server in started], grace_s=GRACE_S)


@pytest.fixture(scope="session")
def llama_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A llama.cpp with four slots."""
    _needs(LLAMACPP)
    server = start_llama_server(tiny_model, tmp_path_factory.mktemp("llamacpp"), slots=4)
    try:
        server.wait_until_it_serves()
        yield server
    finally:
        end_all([server.child], grace_s=GRACE_S)


@pytest.fixture
def forebay(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Forebay]:
    """A client of services of its own: an embedded Valkey, a monitor and a dispatcher, as processes.

    A test that wants settings of its own gives them as this fixture's parameter: environment variables.
    """
    try:
        find_program()
    except NoServer as error:
        pytest.skip(str(error))  # no Valkey or Redis to start; it says which to install
    for name in [name for name in os.environ if name.startswith("FOREBAY_")]:
        monkeypatch.delenv(name)
    for name, value in getattr(request, "param", {}).items():
        monkeypatch.setenv(name, value)
    storage = str(tmp_path / "storage")
    settings = LocalSettings(redis_url=None, storage=storage, logs=tmp_path / "logs")
    with LocalServices(settings) as services:
        front = FrontSettings(redis_url=services.redis_url, storage=storage)
        with Forebay(settings=front) as client:
            yield client


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Print a line for whoever runs the tests."""

    def line(text: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n  {text}")

    return line
