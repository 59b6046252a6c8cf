"""The simulated engine answers as captured real ones do: status, content type, keys, order, error bodies."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.simulator.server import SimulatedEngine
from forebay.simulator.settings import EngineSettings

CAPTURES = Path(__file__).parents[1] / "data" / "simulator"
SETTINGS = {"model": "tiny-llama", "max_model_len": 2048, "instant": True, "embeddings": False}
EXACT = (
    "chat_bad_role",
    "chat_empty_body",
    "chat_empty_messages",
    "chat_malformed_json",
    "chat_max_tokens_neg",
    "chat_missing_messages",
    "chat_temperature_bad",
    "chat_unknown_model",
    "embeddings",
    "get_on_chat",
    "idle_health",
    "idle_load",
    "idle_version",
)
SAME_SHAPE = ("chat_ok", "chat_no_model", "completions_ok", "idle_v1_models")
LOADS = ("idle_v1_loads", "idle_v1_loads_Q_include_core")


@dataclass
class Capture:
    method: str
    path: str
    body: bytes
    status: int
    headers: httpx.Headers
    answer: bytes


def capture(runtime: str, name: str) -> Capture:
    text = (CAPTURES / runtime / f"{name}.txt").read_bytes().decode()
    head, _, answer = text.partition("\n\n")
    lines = head.split("\n")
    method, path = lines[0].split(" ") if not lines[0].startswith("->") else ("POST", "")
    body = lines[1].removeprefix("request-body: ") if lines[1].startswith("request-body") else ""
    at = next(index for index, line in enumerate(lines) if line.startswith("-> HTTP"))
    headers = httpx.Headers([tuple(line.split(": ", 1)) for line in lines[at + 1 :]])
    status = int(lines[at].split()[2])
    return Capture(method, path, body.encode(), status, headers, answer.strip("\n").encode())


def captured(*names: str) -> list[tuple[str, str]]:
    return [
        (runtime, name)
        for runtime in ("vllm", "sglang")
        for name in names
        if (CAPTURES / runtime / f"{name}.txt").exists()
    ]


def shape(value: Any) -> Any:
    """Keys in their order and the kinds of values; lists by their first element."""
    match value:
        case dict():
            return [(key, shape(inner)) for key, inner in value.items()]
        case list():
            return [shape(value[0])] if value else []
        case bool() | None:
            return value
        case _:
            return type(value).__name__


@pytest.fixture(params=["vllm", "sglang"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[SimulatedEngine]:
    async with SimulatedEngine(EngineSettings(runtime=request.param, **SETTINGS)) as engine:
        yield engine


@pytest.fixture
async def client(engine: SimulatedEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=engine.url, trust_env=False) as client:
        yield client


async def replay(runtime: str, name: str) -> tuple[Capture, httpx.Response]:
    expected = capture(runtime, name)
    async with (
        SimulatedEngine(EngineSettings(runtime=runtime, **SETTINGS)) as engine,
        httpx.AsyncClient(base_url=engine.url, trust_env=False) as client,
    ):
        answer = await client.request(expected.method, expected.path, content=expected.body)
    return expected, answer


def assert_same_head(expected: Capture, answer: httpx.Response) -> None:
    assert answer.status_code == expected.status
    sent = [name for name in answer.headers if name != "connection"]
    assert sent == [name.lower() for name in expected.headers]
    for name in ("content-type", "server", "allow", "vary"):
        assert answer.headers.get(name) == expected.headers.get(name)


@pytest.mark.parametrize(("runtime", "name"), captured(*EXACT))
async def test_an_error_or_a_constant_page_is_the_captured_one(runtime: str, name: str):
    expected, answer = await replay(runtime, name)
    assert_same_head(expected, answer)
    assert answer.content == expected.answer


@pytest.mark.parametrize(("runtime", "name"), captured(*SAME_SHAPE, *LOADS))
async def test_an_answer_has_the_captured_keys_in_the_captured_order(runtime: str, name: str):
    expected, answer = await replay(runtime, name)
    assert_same_head(expected, answer)
    assert shape(answer.json()) == shape(msgspec.json.decode(expected.answer))


@pytest.mark.parametrize(("runtime", "name"), captured("chat_max_tokens_over"))
async def test_a_ceiling_beyond_the_context_is_refused_in_the_captured_words(runtime: str, name: str):
    expected, answer = await replay(runtime, name)
    assert_same_head(expected, answer)
    counts = re.compile(
        r"\b\d+ tokens"
    )  # the real ones counted tokens, the simulated one a quarter of the characters
    assert counts.sub("N tokens", answer.text) == counts.sub("N tokens", expected.answer.decode())


async def test_a_prompt_beyond_the_context_is_refused_in_the_captured_words(engine, client):
    words = "bacade " * 2000
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": words}]}),
        ("/v1/completions", {"prompt": words}),
    ):
        answer = await client.post(path, json=body)
        expected = capture(engine.settings.runtime, "chat_prompt_overlong")
        told = expected.answer.decode().replace("6004 tokens", "3500 tokens")
        assert (answer.status_code, answer.text) == (400, told)


async def test_prompt_and_ceiling_over_the_context_are_cut_by_vllm_and_refused_by_sglang(engine, client):
    body = {"messages": [{"role": "user", "content": "x" * 4000}], "max_tokens": 1500, "ignore_eos": True}
    answer = await client.post("/v1/chat/completions", json=body)
    if engine.settings.runtime == "vllm":
        assert answer.json()["usage"]["total_tokens"] == 2048
    else:
        assert answer.status_code == 400
        assert "a total of 2500 tokens: 1000 tokens from the input" in answer.json()["message"]


@pytest.mark.parametrize(("runtime", "name"), [("vllm", "admission_503"), ("sglang", "admission_reject")])
async def test_a_full_queue_is_answered_in_the_captured_words_without_retry_after(runtime: str, name: str):
    settings = EngineSettings(runtime=runtime, slots=1, max_queued=0, tokens_per_s=1e-6)
    expected = capture(runtime, name)
    async with (
        SimulatedEngine(settings) as engine,
        httpx.AsyncClient(base_url=engine.url, trust_env=False, timeout=None) as client,
    ):
        body = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}
        held = asyncio.create_task(client.post("/v1/completions", json=body))
        while engine.load().running == 0:  # noqa: ASYNC110  # no event tells that it runs
            await asyncio.sleep(0)
        answer = await client.post("/v1/completions", json=body)
        held.cancel()
    assert_same_head(expected, answer)
    assert answer.content == expected.answer
    assert engine.stats.rejected == 1


async def test_streaming_is_refused_in_the_runtimes_shape(engine, client):
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"] if engine.settings.runtime == "vllm" else answer.json()
    assert "Streaming" in error["message"]
    assert error["code"] == 400


async def test_only_sglang_answers_a_model_that_it_does_not_serve(engine, client):
    body = {"model": "nope", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    answer = await client.post("/v1/chat/completions", json=body)
    if engine.settings.runtime == "vllm":
        assert answer.status_code == 404
    else:
        assert (answer.status_code, answer.json()["model"]) == (200, "nope")


async def test_an_unknown_path_and_a_wrong_method_are_answered_as_fastapi_does(client):
    missing = await client.get("/nothing")
    assert (missing.status_code, missing.json()) == (404, {"detail": "Not Found"})
    wrong = await client.post("/v1/models", content=b"{}")
    assert (wrong.status_code, wrong.json()) == (405, {"detail": "Method Not Allowed"})
    assert wrong.headers["allow"] == "GET"


@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
async def test_the_metrics_page_has_the_captured_series_types_and_help_texts(runtime: str):
    expected = capture(runtime, "load_metrics")
    answer = await _metrics(runtime)
    assert answer.headers["content-type"] == expected.headers["content-type"]
    ours = set(answer.text.split("\n"))
    for line in expected.answer.decode().split("\n"):
        if line.startswith("#"):
            assert line in ours
    assert series(expected.answer.decode()) <= series(answer.text)


@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
async def test_every_line_of_the_metrics_page_can_be_parsed(runtime: str):
    families = list(text_string_to_metric_families((await _metrics(runtime)).text))
    assert len(families) > 10
    assert all(family.samples for family in families)


async def test_sglang_prints_underscores_for_whoever_accepts_openmetrics():
    answer = await _metrics("sglang", accept="application/openmetrics-text; version=1.0.0")
    assert "sglang_num_running_reqs{" in answer.text
    assert "sglang:" not in answer.text


async def test_sglang_compresses_its_page_only_for_whoever_accepts_it():
    assert (await _metrics("sglang")).headers["content-encoding"] == "gzip"
    plain = await _metrics("sglang", **{"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.text.startswith("# HELP ")


async def test_unknown_sections_of_the_loads_are_refused():
    async with (
        SimulatedEngine(EngineSettings(runtime="sglang", **SETTINGS)) as engine,
        httpx.AsyncClient(base_url=engine.url, trust_env=False) as client,
    ):
        known = await client.get("/v1/loads", params={"include": "core,disagg,queues"})
        unknown = await client.get("/v1/loads", params={"include": "nonsense"})
    assert list(known.json()["loads"][0])[-2:] == ["disaggregation", "queues"]
    assert unknown.status_code == 400


def series(page: str) -> set[tuple[str, ...]]:
    """Names of all samples with the names of their labels, and the values of those that tell series apart."""
    found = set()
    for line in page.split("\n"):
        if line and not line.startswith("#"):
            name, _, rest = line.partition("{")
            labels = re.findall(r'(\w+)="([^"]*)"', rest)
            told = [
                f"{key}={value}" for key, value in labels if key in {"reason", "source", "finished_reason"}
            ]
            found.add((name.split(" ")[0], *[key for key, _ in labels], *told))
    return found


async def _metrics(runtime: str, **headers: str) -> httpx.Response:
    async with (
        SimulatedEngine(EngineSettings(runtime=runtime, **SETTINGS)) as engine,
        httpx.AsyncClient(base_url=engine.url, trust_env=False) as client,
    ):
        return await client.get("/metrics", headers=headers)
