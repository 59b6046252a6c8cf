"""What a simulated vLLM answers about prompts without generating."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from forebay.simulator.server import SimulatedEngine
from forebay.simulator.settings import EngineSettings, Runtime

RENDER = "/v1/chat/completions/render"
MESSAGES = [{"role": "user", "content": "a question of some length"}]


@pytest.fixture
async def vllm() -> AsyncIterator[httpx.AsyncClient]:
    async with (
        SimulatedEngine(EngineSettings(instant=True)) as engine,
        httpx.AsyncClient(base_url=engine.url) as client,
    ):
        yield client


async def test_a_chat_is_rendered_to_as_many_tokens_as_its_answer_counts(vllm: httpx.AsyncClient):
    body = {"messages": MESSAGES, "max_tokens": 7, "ignore_eos": True}
    rendered = (await vllm.post(RENDER, json=body)).json()
    answer = (await vllm.post("/v1/chat/completions", json=body)).json()
    assert len(rendered["token_ids"]) == answer["usage"]["prompt_tokens"] == 7
    assert rendered["sampling_params"] == {
        "max_tokens": 7,
        "output_kind": 2,
        "skip_clone": True,
        "ignore_eos": True,
    }
    assert (rendered["model"], rendered["priority"], rendered["stream"]) == ("sim-model", 0, False)


async def test_tokenizing_gives_the_ids_that_rendering_gives(vllm: httpx.AsyncClient):
    rendered = (await vllm.post(RENDER, json={"messages": MESSAGES})).json()
    tokenized = (await vllm.post("/tokenize", json={"messages": MESSAGES})).json()
    assert tokenized == {
        "count": 7,
        "max_model_len": 8192,
        "tokens": rendered["token_ids"],
        "token_strs": None,
    }


async def test_prompts_that_begin_alike_have_the_same_first_tokens_and_then_others(vllm: httpx.AsyncClient):
    one, other = [
        (await vllm.post("/tokenize", json={"prompt": "the same beginning, " + end})).json()["tokens"]
        for end in ("yes", "no")
    ]
    assert one[:-1] == other[:-1]
    assert one[-1] != other[-1]


async def test_every_prompt_of_a_completion_is_rendered(vllm: httpx.AsyncClient):
    answer = await vllm.post("/v1/completions/render", json={"prompt": ["one", "twotwo"]})
    assert [len(each["token_ids"]) for each in answer.json()] == [1, 2]
    answer = await vllm.post("/v1/completions/render", json={"prompt": [5, 6, 7]})
    assert [each["token_ids"] for each in answer.json()] == [[5, 6, 7]]


@pytest.mark.parametrize("path", [RENDER, "/tokenize"])
async def test_what_would_be_refused_is_refused_in_the_same_words(vllm: httpx.AsyncClient, path: str):
    bad = {"messages": [{"role": "nobody"}]}
    refused = await vllm.post(path, json=bad)
    assert refused.status_code == 400
    assert refused.json() == (await vllm.post("/v1/chat/completions", json=bad)).json()


@pytest.mark.parametrize(("runtime", "method", "status"), [("sglang", "POST", 404), ("vllm", "GET", 405)])
async def test_only_a_post_to_vllm_is_answered(runtime: Runtime, method: str, status: int):
    async with (
        SimulatedEngine(EngineSettings(runtime=runtime, instant=True)) as engine,
        httpx.AsyncClient(base_url=engine.url) as client,
    ):
        answer = await client.request(method, RENDER, json={"messages": MESSAGES})
    assert answer.status_code == status
