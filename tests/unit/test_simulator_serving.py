"""A simulated engine at work: answers, queueing, aborts, keys, connections, and what it remembers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import httpx
import pytest
from pydantic import ValidationError

from forebay.simulator import answers
from forebay.simulator.calls import prompt_head
from forebay.simulator.process import flags
from forebay.simulator.server import SimulatedEngine
from forebay.simulator.settings import EngineSettings

CHAT = "/v1/chat/completions"
DEEP = b"[" * 100_000
NO_REQUESTS = (b"[]", b'"x"', b"7", b"null", b"\xff\xfe", b'{"prompt":null}', b'{"n":NaN}')
STANDING = {"faults": ({"kind": "slow", "factor": 0.0},), "instant": True}


def chat(content: object = "hello", **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def start(**settings: object) -> SimulatedEngine:
    return SimulatedEngine(EngineSettings.model_validate({"instant": True, **settings}))


def connect(engine: SimulatedEngine, **headers: str) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    return httpx.AsyncClient(base_url=engine.url, trust_env=False, timeout=None, headers=headers)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # states of the engine have no event to wait for
        await asyncio.sleep(0)


async def test_the_same_seed_and_request_give_the_same_answer_on_every_engine():
    told = []
    for seed in (1, 1, 2):
        async with start(seed=seed) as engine, connect(engine) as client:
            answer = (await client.post(CHAT, json=chat("a question"))).json()
            told.append((answer["choices"], answer["usage"]))
    assert told[0] == told[1]
    assert told[0] != told[2]


async def test_usage_counts_a_quarter_of_the_characters_of_text_and_of_array_content():
    parts = [{"type": "text", "text": "x" * 30}, {"type": "image_url", "image_url": {"url": "data:"}}]
    async with start() as engine, connect(engine) as client:
        plain = (await client.post(CHAT, json=chat("x" * 30, max_tokens=5))).json()["usage"]
        array = (await client.post(CHAT, json=chat(parts, max_tokens=5))).json()["usage"]
    assert plain["prompt_tokens"] == array["prompt_tokens"] == 8
    assert plain["total_tokens"] == plain["prompt_tokens"] + plain["completion_tokens"]


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 300}])
async def test_ignoring_the_end_gives_exactly_the_tokens_asked_for(fields: dict[str, object]):
    async with start() as engine, connect(engine) as client:
        answer = (await client.post(CHAT, json=chat(max_completion_tokens=300, **fields))).json()
    assert answer["usage"]["completion_tokens"] == 300
    assert len(answer["choices"][0]["message"]["content"].split()) == 300
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_an_answer_that_ends_by_itself_says_stop_and_one_that_is_cut_says_length():
    async with start(answer_tokens_median=20, answer_tokens_sigma=0) as engine, connect(engine) as client:
        cut = (await client.post(CHAT, json=chat(max_tokens=5))).json()
        whole = (await client.post(CHAT, json=chat(max_tokens=50))).json()
    assert [
        (each["choices"][0]["finish_reason"], each["usage"]["completion_tokens"]) for each in (cut, whole)
    ] == [
        ("length", 5),
        ("stop", 20),
    ]
    assert engine.state()["load"]["finished"] == {"stop": 1, "length": 1, "abort": 0, "error": 0}


@pytest.mark.parametrize(
    "rewritten",
    [
        {"n": 1, "messages": [{"content": "hello", "role": "user", "name": None}], "stream": False},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}], "user": "somebody"},
    ],
)
async def test_a_request_whose_json_was_rewritten_on_the_way_gets_the_same_answer(
    rewritten: dict[str, object],
):
    async with start() as engine, connect(engine) as client:
        sent = (await client.post(CHAT, json=chat())).json()
        passed_on = (await client.post(CHAT, json=rewritten)).json()
    assert passed_on["choices"] == sent["choices"]


@pytest.mark.parametrize(
    "pair",
    [
        ({"prompt": "one"}, {"prompt": "two"}),
        ({"prompt": "one"}, {"prompt": "one", "seed": 1}),
        ({"prompt": [1, 2]}, {"prompt": [1, 3]}),
        ({"prompt": [[1], [2]]}, {"prompt": [[1], [3]]}),
        ({"prompt": ["ab", "c"]}, {"prompt": ["a", "bc"]}),
    ],
)
async def test_other_prompts_and_other_seeds_get_other_answers(
    pair: tuple[dict[str, object], dict[str, object]],
):
    async with start() as engine, connect(engine) as client:
        one, other = [(await client.post("/v1/completions", json=body)).json()["choices"] for body in pair]
    assert one != other


async def test_every_prompt_of_a_completion_gets_n_choices():
    async with start() as engine, connect(engine) as client:
        body = {"prompt": ["one", "two"], "n": 3, "max_tokens": 4, "ignore_eos": True}
        answer = (await client.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["usage"]["completion_tokens"] == 24


async def test_embeddings_are_of_unit_length_and_the_same_each_time():
    async with start() as engine, connect(engine) as client:
        body = {"input": ["one", "two"]}
        first, second = [(await client.post("/v1/embeddings", json=body)).json() for _ in range(2)]
    assert first["data"] == second["data"]
    assert [sum(x * x for x in each["embedding"]) for each in first["data"]] == pytest.approx([1.0, 1.0])
    assert first["usage"]["total_tokens"] == 2


async def test_never_more_than_the_slots_run_and_the_rest_waits():
    async with start(slots=2, **STANDING) as engine, connect(engine) as client:
        sent = [asyncio.create_task(client.post(CHAT, json=chat(max_tokens=2))) for _ in range(5)]
        await until(lambda: engine.load().running + engine.load().waiting == 5)
        assert (engine.load().running, engine.load().waiting) == (2, 3)
        page = (await client.get("/metrics")).text
        engine.clear()
        statuses = [(await each).status_code for each in sent]
    assert 'vllm:num_requests_running{engine="0",model_name="sim-model"} 2.0' in page
    assert 'vllm:num_requests_waiting{engine="0",model_name="sim-model"} 3.0' in page
    assert statuses == [200] * 5
    assert engine.state()["max_running_seen"] == 2


async def test_a_client_that_leaves_frees_its_slot_and_its_place_in_the_queue():
    async with start(slots=1, **STANDING) as engine, connect(engine) as client:
        sent = []
        for count in (1, 2, 3):
            sent.append(asyncio.create_task(client.post(CHAT, json=chat(f"number {count}"))))
            await until(lambda count=count: engine.stats.requests == count)
        sent[0].cancel()
        sent[1].cancel()
        await until(lambda: engine.stats.aborted == 2)
        assert (engine.load().running, engine.load().waiting) == (1, 0)
        engine.clear()
        assert (await sent[2]).status_code == 200
        page = (await client.get("/metrics")).text
    assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="sim-model"} 2.0' in page
    assert [each.outcome for each in engine.stats.log] == ["aborted", "aborted", "answered"]


async def test_requests_are_answered_at_the_time_that_the_batch_model_computes():
    async with (
        start(instant=False, tokens_per_s=1000.0, prefill_tokens_per_s=0.0) as engine,
        connect(engine) as client,
    ):
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        answer = await client.post(CHAT, json=chat(max_tokens=40, ignore_eos=True))
        assert loop.time() - began_s >= 0.04  # never earlier; later is the machine's business
    assert answer.status_code == 200


KEYED = {
    "vllm": {"/health": 200, "/metrics": 200, "/version": 200, "/v1/models": 401, "/v1/loads": 401},
    "sglang": {"/health": 200, "/metrics": 401, "/server_info": 401, "/v1/models": 401, "/v1/loads": 401},
}


@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
async def test_the_key_guards_what_the_runtime_guards(runtime: str):
    async with start(runtime=runtime, api_key="secret") as engine:
        async with connect(engine) as client:
            statuses = {path: (await client.get(path)).status_code for path in KEYED[runtime]}
            refused = await client.post(CHAT, json=chat())
        async with connect(engine, authorization="Bearer secret") as client:
            served = await client.post(CHAT, json=chat())
            loads = await client.get("/v1/loads")
    assert statuses == KEYED[runtime]
    assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
    assert served.status_code == 200
    assert loads.status_code == (404 if runtime == "vllm" else 200)


async def test_the_state_shows_a_hash_of_the_last_authorization_and_never_the_key():
    async with start(api_key="secret") as engine, connect(engine, authorization="Bearer secret") as client:
        await client.post(CHAT, json=chat())
        state = await client.get("/_control/state")
    digest = hashlib.sha256(b"Bearer secret").hexdigest()
    assert state.json()["stats"]["last_authorization_sha256"] == digest
    assert "secret" not in state.text


async def test_the_log_tells_requests_apart_and_forgets_the_oldest():
    async with start(log_requests=2) as engine, connect(engine) as client:
        for line in range(3):
            await client.post(CHAT, json=chat(f"line {line}"), headers={"x-request-id": f"r{line}"})
    assert [(each.prompt, each.request_id, each.status) for each in engine.stats.log] == [
        ("line 1", "r1", 200),
        ("line 2", "r2", 200),
    ]
    assert engine.stats.by_path[CHAT] == 3


async def test_load_says_zero_unless_vllm_tracks_it():
    for tracking, told in ((False, 0), (True, 1)):
        async with start(load_tracking=tracking, **STANDING) as engine, connect(engine) as client:
            held = asyncio.create_task(client.post(CHAT, json=chat()))
            await until(lambda engine=engine: engine.load().running == 1)
            assert (await client.get("/load")).json() == {"server_load": told}
            held.cancel()


async def test_an_idle_connection_is_closed_after_its_time_and_not_before_an_answer():
    async with start(keep_alive_s=0.05) as engine:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        received = await reader.read()  # until the engine closes
        writer.close()
        await writer.wait_closed()
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")


async def test_pipelined_requests_are_answered_in_their_order():
    async with start(**STANDING) as engine:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        body = b'{"prompt":"x","max_tokens":1}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        writer.write(head + body + b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        await until(lambda: engine.load().running == 1)
        engine.clear()
        received = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert received.index(b"text_completion") < received.index(b'{"version":"0.32.0"}')
    assert b"connection: close" in received


async def test_what_is_no_http_is_answered_400_and_closed():
    async with start() as engine:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        writer.write(b"nonsense\r\n\r\n")
        received = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert received.startswith(b"HTTP/1.1 400 Bad Request")


async def test_a_client_that_asks_first_is_told_to_continue():
    async with start() as engine:
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        body = b'{"prompt":"x","max_tokens":1}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\nconnection: close\r\n"
            + f"content-length: {len(body)}\r\n\r\n".encode()
        )
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        received = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert received.startswith(b"HTTP/1.1 200 OK")


async def test_leaving_finishes_what_runs_and_refuses_what_is_new():
    async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
        async with start(shutdown_timeout_s=30.0, **STANDING) as engine:
            url = f"{engine.url}{CHAT}"
            held = asyncio.create_task(client.post(url, json=chat()))
            await until(lambda: engine.load().running == 1)
            late = asyncio.create_task(_refused_then(client, url, engine.clear))
        assert (await held).status_code == 200
    assert await late == "cannot schedule new futures after shutdown"


async def _refused_then(client: httpx.AsyncClient, url: str, go_on: Callable[[int], object]) -> str:
    """Ask while the engine is shutting down, then let it finish."""
    answer = await client.post(url, json=chat())
    go_on(1)
    return str(answer.json()["error"]["message"])


def test_lengths_are_lognormal_around_the_median():
    drawn = sorted(
        answers.drawn_length(answers.fingerprint(0, str(n).encode()), 0, median=100.0, sigma=0.5)
        for n in range(4001)
    )
    assert 95 <= drawn[2000] <= 105
    assert 0.45 <= drawn[3366] / drawn[2000] - 1 <= 0.85  # one sigma up: e^0.5 = 1.65


@pytest.mark.parametrize("tokens", [1, 2, 4095, 4096, 4097, 10_000])
def test_as_many_words_are_said_as_tokens_were_asked_for(tokens: int):
    assert len(answers.words(answers.fingerprint(3, b"x"), 0, tokens).split()) == tokens


@pytest.mark.parametrize("raw", [b"", b"[]", b'"x"', b"{", b"\xff", b'{"messages":5}', b'{"messages":[]}'])
def test_a_request_without_a_readable_prompt_has_no_head(raw: bytes):
    assert prompt_head(raw) == ""


@pytest.mark.parametrize(
    "raw", [b"[]", b'"x"', b"7", b"null", b"\xff\xfe", b'{"prompt":null}', b'{"n":NaN}', DEEP]
)
@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/embeddings"])
async def test_no_body_brings_the_engine_down(runtime: str, path: str, raw: bytes):
    async with start(runtime=runtime) as engine, connect(engine) as client:
        refused = await client.post(path, content=raw)
        assert refused.status_code == 400
        assert refused.json()
        assert (await client.get("/health")).status_code == 200


async def test_a_model_name_that_is_no_text_is_refused():
    async with start(runtime="sglang") as engine, connect(engine) as client:
        body = b'{"model":"\\ud800","prompt":"x","max_tokens":1}'
        assert (await client.post("/v1/completions", content=body)).status_code == 400


def test_a_cache_smaller_than_one_sequence_is_refused():
    with pytest.raises(ValidationError, match="kv_tokens"):
        EngineSettings(kv_tokens=100, max_model_len=200)


def test_settings_at_their_defaults_need_no_flag():
    assert flags(EngineSettings()) == []


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_that_comes_while_the_engine_closes_is_closed_too(turns):
    async with SimulatedEngine(EngineSettings(instant=True)) as engine:
        client = socket.create_connection(("127.0.0.1", engine.port), timeout=10)
        for _ in range(turns):  # how far its acceptance has come by then
            await asyncio.sleep(0)
    with client:
        client.setblocking(False)
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
