"""A simulated engine as a process: its flags, its line, its signals."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading

import httpx
import psutil
import pytest

from forebay.simulator.faults import AnswerFault, CutBodyFault, RefuseFault, ResetFault
from forebay.simulator.process import EngineStartError, flags, start_engine
from forebay.simulator.settings import EngineSettings

pytestmark = pytest.mark.integration

CHAT = "/v1/chat/completions"
EVERYTHING_CHANGED = EngineSettings(
    runtime="sglang",
    host="localhost",
    model="other-model",
    name="-a name-",
    tokens_per_s=12.5,
    prefill_tokens_per_s=0.0,
    instant=True,
    slots=3,
    slowdown=0.25,
    max_queued=2,
    kv_tokens=5000,
    max_model_len=4000,
    seed=-7,
    answer_tokens_median=9.0,
    answer_tokens_sigma=0.0,
    embeddings=False,
    load_tracking=True,
    prefix_caching=True,
    api_key="-secret",
    keep_alive_s=1.5,
    shutdown_timeout_s=0.5,
    faults=(AnswerFault(status=503, requests=1, retry_after="2"), RefuseFault(after_s=1000.0, for_s=1.0)),
    log_requests=7,
)


def test_every_setting_reaches_the_process():
    untouched = EngineSettings()
    changed = EVERYTHING_CHANGED.model_dump()
    assert [name for name, value in changed.items() if value == getattr(untouched, name)] == ["port"]
    with start_engine(EVERYTHING_CHANGED) as engine:
        told = httpx.get(f"{engine.url}/_control/state", trust_env=False).json()["settings"]
    assert told == EVERYTHING_CHANGED.model_dump(mode="json", exclude={"api_key"})


def test_an_engine_answers_from_its_line_on_and_ends_on_sigterm():
    engine = start_engine(EngineSettings(instant=True))
    with httpx.Client(base_url=engine.url, trust_env=False) as client:
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
        assert client.post(CHAT, json=body).status_code == 200
        assert engine.terminate() == 0
        with pytest.raises(httpx.TransportError):
            client.get("/health")
    assert not psutil.pid_exists(engine.pid)


def test_a_killed_engine_breaks_the_requests_in_flight():
    engine = start_engine(EngineSettings(tokens_per_s=1e-6))
    failures: list[Exception] = []

    def ask() -> None:
        body = {"prompt": "x", "max_tokens": 3}
        try:
            httpx.post(f"{engine.url}/v1/completions", json=body, timeout=None, trust_env=False)
        except httpx.TransportError as error:
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    with httpx.Client(base_url=engine.url, trust_env=False) as client:
        while client.get("/_control/state").json()["running"] == 0:
            pass
    engine.kill()
    engine.kill()
    asking.join()
    assert len(failures) == 1


def test_resets_and_half_bodies_leave_a_process_as_they_should():
    faults = (CutBodyFault(requests=1), ResetFault(requests=1))
    body = b'{"prompt":"x","max_tokens":500}'
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with start_engine(EngineSettings(instant=True, faults=faults)) as engine:
        port = int(engine.url.rpartition(":")[2])
        received = [_received_until_reset(port, head + body) for _ in faults]
    head, _, half = received[0].partition(b"\r\n\r\n")
    promised = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
    assert len(half) == promised // 2
    assert received[1] == b""


def _received_until_reset(port: int, request: bytes) -> bytes:
    received = b""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request)
        try:
            while part := connection.recv(65536):
                received += part
        except ConnectionResetError:
            return received
    raise AssertionError("the connection was closed in order")


def test_whoever_sets_a_refusal_over_http_gets_its_answer_before_the_door_closes():
    with start_engine(EngineSettings(instant=True)) as engine:
        with httpx.Client(base_url=engine.url, trust_env=False) as client:
            answer = client.post("/_control/fault", json={"kind": "refuse", "for_s": 1000.0})
        assert answer.json() == {"number": 1}
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{engine.url}/health", trust_env=False)


def test_what_is_running_at_sigterm_is_finished_within_the_time_given_for_it():
    settings = EngineSettings(tokens_per_s=20.0, shutdown_timeout_s=30.0)
    engine = start_engine(settings)
    statuses: list[int] = []

    def ask() -> None:
        body = {"prompt": "x", "max_tokens": 10, "ignore_eos": True}
        answer = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=None, trust_env=False)
        statuses.append(answer.status_code)

    asking = threading.Thread(target=ask)
    asking.start()
    with httpx.Client(base_url=engine.url, trust_env=False) as client:
        while client.get("/_control/state").json()["running"] == 0:
            pass
    assert engine.terminate() == 0
    asking.join()
    assert statuses == [200]


def test_a_taken_port_and_a_wrong_flag_end_the_start_with_an_error():
    with start_engine(EngineSettings()) as engine:
        taken = EngineSettings(port=int(engine.url.rpartition(":")[2]))
        with pytest.raises(EngineStartError):
            start_engine(taken)
    command = [sys.executable, "-m", "forebay.simulator", "--kv-tokens=1"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "kv_tokens must hold" in ended.stderr


def test_an_interrupt_ends_it_as_well():
    engine = start_engine(EngineSettings(instant=True))
    engine.process.send_signal(signal.SIGINT)
    assert engine.process.wait() == 0
    assert engine.terminate() == 0  # of a process that has ended: its status, and no signal


def test_flags_are_words_that_a_person_would_type():
    assert flags(EngineSettings(runtime="sglang", instant=True, embeddings=False)) == [
        "--runtime=sglang",
        "--instant",
        "--no-embeddings",
    ]
