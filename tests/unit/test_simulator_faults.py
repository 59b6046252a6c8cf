"""Every fault of the simulated engine, as a client sees it on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from pydantic import ValidationError

from forebay.simulator.faults import (
    AlternateFault,
    AnswerFault,
    BrokenMetricsFault,
    CutBodyFault,
    FaultBoard,
    FreezeFault,
    HangFault,
    LoadsFault,
    OddBodyFault,
    RefuseFault,
    ResetFault,
    ShutdownFault,
    SlowFault,
    ZeroLoadFault,
    parse_fault,
)
from forebay.simulator.server import SimulatedEngine
from forebay.simulator.settings import EngineSettings

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
ENDLESS = {"tokens_per_s": 1e-6}


@contextlib.asynccontextmanager
async def engine_and_client(
    **settings: object,
) -> AsyncIterator[tuple[SimulatedEngine, httpx.AsyncClient]]:
    async with (
        SimulatedEngine(EngineSettings.model_validate({"instant": True, **settings})) as engine,
        httpx.AsyncClient(base_url=engine.url, trust_env=False, timeout=None) as client,
    ):
        yield engine, client


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  # states of the engine have no event to wait for
        await asyncio.sleep(0)


async def raw_answer(engine: SimulatedEngine, body: bytes = b'{"prompt":"x","max_tokens":500}') -> bytes:
    """What arrives on a bare connection until it ends; raises ConnectionResetError when it is reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    received = b""
    try:
        writer.write(head.encode() + body)
        while part := await reader.read(65536):
            received += part
    except ConnectionResetError as error:
        error.args = (received,)
        raise
    finally:
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()
    return received


async def test_an_answer_fault_counts_its_requests_down_and_sends_its_retry_after():
    async with engine_and_client() as (engine, client):
        engine.control(AnswerFault(status=429, retry_after="Wed, 21 Oct 2099 07:28:00 GMT", requests=2))
        answers = [await client.post(CHAT, json=BODY) for _ in range(3)]
    assert [each.status_code for each in answers] == [429, 429, 200]
    assert answers[0].headers["retry-after"] == "Wed, 21 Oct 2099 07:28:00 GMT"
    assert answers[0].json()["error"]["code"] == 429


async def test_a_late_answer_comes_after_one_that_was_asked_for_later():
    async with engine_and_client() as (engine, client):
        engine.control(AnswerFault(status=429, delay_s=0.05, requests=1))
        late = asyncio.create_task(client.post(CHAT, json=BODY))
        await until(lambda: engine.stats.requests == 1)
        assert (await client.post(CHAT, json=BODY)).status_code == 200
        assert (await late).status_code == 429
        assert [record.status for record in engine.stats.log] == [429, 200]


async def test_a_late_answer_is_dropped_when_the_client_has_left():
    async with engine_and_client() as (engine, client):
        engine.control(AnswerFault(status=429, delay_s=0.01))
        leaving = asyncio.create_task(client.post(CHAT, json=BODY))
        await until(lambda: engine.stats.requests == 1)
        leaving.cancel()
        await until(lambda: engine.stats.aborted == 1)
        assert (await client.post(CHAT, json=BODY)).status_code == 429
        assert [record.outcome for record in engine.stats.log] == ["aborted", "answered"]


async def test_an_answer_fault_may_bring_its_own_body_or_the_words_of_a_full_queue():
    async with engine_and_client(runtime="sglang") as (engine, client):
        engine.control(AnswerFault(status=503, queue_full=True, requests=1))
        engine.control(AnswerFault(status=500, body="boom", content_type="text/plain", requests=1))
        full, own = await client.post(CHAT, json=BODY), await client.post(CHAT, json=BODY)
    assert full.json()["message"] == "The request queue is full."
    assert (own.status_code, own.text, own.headers["content-type"]) == (500, "boom", "text/plain")


async def test_an_alternate_fault_takes_its_statuses_in_turn():
    async with engine_and_client() as (engine, client):
        engine.control(AlternateFault(statuses=(500, 200, 503)))
        statuses = [(await client.post(CHAT, json=BODY)).status_code for _ in range(6)]
    assert statuses == [500, 200, 503, 500, 200, 503]


async def test_a_fault_leaves_other_paths_alone():
    async with engine_and_client() as (engine, client):
        engine.control(AnswerFault(status=500, paths=("/v1/completions",)))
        assert (await client.post(CHAT, json=BODY)).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 500


async def test_a_reset_comes_before_any_byte():
    async with engine_and_client() as (engine, _):
        engine.control(ResetFault(requests=1))
        with pytest.raises(ConnectionResetError) as reset:
            await raw_answer(engine)
    assert reset.value.args == (b"",)
    assert engine.stats.log[0].outcome == "reset"


async def test_a_cut_body_promises_all_and_sends_half_and_resets():
    async with engine_and_client() as (engine, _):
        engine.control(CutBodyFault(requests=1))
        with pytest.raises(ConnectionResetError) as reset:
            await raw_answer(engine)
    head, _, body = reset.value.args[0].partition(b"\r\n\r\n")
    promised = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert len(body) == promised // 2
    assert engine.stats.log[0].outcome == "cut"


async def test_a_hanging_request_is_never_answered_and_others_are():
    async with engine_and_client() as (engine, client):
        engine.control(HangFault(requests=1))
        hanging = asyncio.create_task(client.post(CHAT, json=BODY))
        await until(lambda: engine.stats.requests == 1)
        assert (await client.post(CHAT, json=BODY)).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert not hanging.done()
        hanging.cancel()
        await until(lambda: engine.stats.aborted == 1)
    assert engine.stats.log[0].outcome == "aborted"


@pytest.mark.parametrize(
    ("form", "content_type", "start"),
    [
        ("empty", None, b""),
        ("html", "text/html; charset=utf-8", b"<html>"),
        ("invalid_json", "application/json", b'{"id":'),
        ("error_object", "application/json", b'{"error":{'),
    ],
)
async def test_an_odd_body_comes_with_200(form: str, content_type: str | None, start: bytes):
    async with engine_and_client() as (engine, client):
        engine.control(OddBodyFault(form=form))
        answer = await client.post(CHAT, json=BODY)
    assert answer.status_code == 200
    assert answer.headers.get("content-type") == content_type
    assert answer.content.startswith(start)
    assert bool(answer.content) == bool(start)


async def test_a_refusing_engine_resets_what_is_open_and_listens_again_on_its_port():
    async with engine_and_client(instant=False, **ENDLESS) as (engine, client):
        running = asyncio.create_task(client.post(CHAT, json=BODY))
        await until(lambda: engine.load().running == 1)
        number = engine.control(RefuseFault(for_s=1000.0))
        with pytest.raises(httpx.ReadError):
            await running
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", engine.port)
        assert engine.load().running == 0
        engine.clear(number)
        await until(lambda: engine.listening)
        assert (await client.get("/health")).status_code == 200


async def test_a_fault_ends_by_itself_after_its_time():
    async with engine_and_client() as (engine, client):
        engine.control(RefuseFault(for_s=0.05))
        assert not engine.listening
        await until(lambda: engine.listening)
        assert (await client.get("/health")).status_code == 200


async def test_frozen_gauges_keep_the_moment_of_the_freeze_while_the_engine_works():
    async with engine_and_client(runtime="sglang", instant=False, **ENDLESS) as (engine, client):
        engine.control(FreezeFault())
        first = (await client.get("/v1/loads")).json()
        held = asyncio.create_task(client.post(CHAT, json=BODY))
        await until(lambda: engine.load().running == 1)
        second = (await client.get("/v1/loads")).json()
        page = (await client.get("/metrics")).text
        held.cancel()
        assert second["loads"] == first["loads"]
        assert second["timestamp"] > first["timestamp"]
        assert second["loads"][0]["num_running_reqs"] == 0
        assert 'sglang:num_running_reqs{engine_type="unified",model_name="sim-model"' in page
        engine.clear()
        assert (await client.get("/v1/loads")).json()["loads"][0]["timestamp"] > first["loads"][0][
            "timestamp"
        ]


@pytest.mark.parametrize("runtime", ["vllm", "sglang"])
async def test_a_zero_load_hides_what_runs(runtime: str):
    async with engine_and_client(runtime=runtime, instant=False, load_tracking=True, **ENDLESS) as (
        engine,
        client,
    ):
        held = asyncio.create_task(client.post(CHAT, json=BODY))
        await until(lambda: engine.load().running == 1)
        page, number = "/load" if runtime == "vllm" else "/v1/loads", engine.control(ZeroLoadFault())
        hidden = (await client.get(page)).json()
        engine.clear(number)
        told = (await client.get(page)).json()
        held.cancel()
    counts = [
        each["server_load"] if runtime == "vllm" else each["loads"][0]["num_running_reqs"]
        for each in (hidden, told)
    ]
    assert counts == [0, 1]


async def test_loads_may_vanish_from_sglang_and_appear_on_vllm():
    for runtime, served in (("sglang", False), ("vllm", True)):
        async with engine_and_client(runtime=runtime) as (engine, client):
            before = await client.get("/v1/loads")
            engine.control(LoadsFault(served=served))
            after = await client.get("/v1/loads")
        assert [each.status_code for each in (before, after)] == ([404, 200] if served else [200, 404])
        assert (after if served else before).json()["loads"][0]["num_running_reqs"] == 0


async def test_broken_metrics_leave_inference_alone():
    async with engine_and_client() as (engine, client):
        engine.control(BrokenMetricsFault())
        assert (await client.get("/metrics")).status_code == 500
        assert (await client.post(CHAT, json=BODY)).status_code == 200


async def test_a_stalled_engine_runs_and_counts_nothing_and_goes_on_when_cleared():
    async with engine_and_client() as (engine, client):
        engine.control(SlowFault(factor=0.0))
        held = asyncio.create_task(client.post(CHAT, json=BODY))
        await until(lambda: engine.load().running == 1)
        assert (await client.get("/health")).status_code == 200
        assert engine.load().generation_tokens_total == 0
        engine.clear()
        assert (await held).status_code == 200
        assert engine.load().generation_tokens_total == 3


async def test_a_slow_engine_generates_at_the_factor_of_its_pace():
    async with engine_and_client(instant=False, tokens_per_s=1e-6, prefill_tokens_per_s=0) as (
        engine,
        client,
    ):
        held = asyncio.create_task(client.post(CHAT, json=BODY))
        await until(lambda: engine.load().running == 1)
        engine.control(SlowFault(factor=0.25))
        assert engine.load().gen_tokens_per_s == pytest.approx(0.25e-6)
        held.cancel()


async def test_vllm_in_shutdown_refuses_new_requests_and_finishes_its_own():
    async with engine_and_client() as (engine, client):
        stall = engine.control(SlowFault(factor=0.0))
        held = asyncio.create_task(client.post(CHAT, json=BODY))
        await until(lambda: engine.load().running == 1)
        engine.control(ShutdownFault())
        refused = await client.post(CHAT, json=BODY)
        assert (await client.get("/health")).status_code == 200
        engine.clear(stall)
        assert (await held).status_code == 200
    assert refused.status_code == 500
    assert refused.json()["error"]["message"] == "cannot schedule new futures after shutdown"


async def test_sglang_in_shutdown_serves_on_while_its_health_says_503():
    async with engine_and_client(runtime="sglang") as (engine, client):
        engine.control(ShutdownFault())
        assert (await client.get("/health")).status_code == 503
        assert (await client.post(CHAT, json=BODY)).status_code == 200


async def test_faults_are_set_shown_and_cleared_over_http():
    async with engine_and_client() as (_, client):
        wrong = await client.post("/_control/fault", json={"kind": "answer", "nonsense": 1})
        made = await client.post("/_control/fault", json={"kind": "answer", "status": 503})
        assert (await client.post(CHAT, json=BODY)).status_code == 503
        shown = (await client.get("/_control/state")).json()["faults"]
        number = made.json()["number"]
        cleared = await client.delete("/_control/fault", params={"number": number})
        assert (await client.post(CHAT, json=BODY)).status_code == 200
    assert wrong.status_code == 422
    assert [(each["number"], each["hits"], each["fault"]["status"]) for each in shown] == [(number, 1, 503)]
    assert cleared.json() == {"cleared": 1}


async def test_faults_given_at_the_start_are_at_work_from_the_first_request():
    faults = ({"kind": "answer", "status": 500, "requests": 1},)
    async with engine_and_client(faults=faults) as (_, client):
        statuses = [(await client.post(CHAT, json=BODY)).status_code for _ in range(2)]
    assert statuses == [500, 200]


def test_a_fault_works_only_between_its_start_and_its_end():
    board = FaultBoard()
    board.add(AnswerFault(after_s=5.0, for_s=10.0), now_s=100.0)
    met = [board.meet(CHAT, now_s) is not None for now_s in (104.9, 105.0, 114.9, 115.0)]
    assert met == [False, True, True, False]
    assert [board.next_change_s(now_s) for now_s in (100.0, 105.0, 115.0)] == [105.0, 115.0, None]


def test_the_first_fault_set_is_the_one_that_is_met_until_it_is_spent():
    board = FaultBoard()
    first = board.add(AnswerFault(requests=1), 0.0)
    second = board.add(ResetFault(), 0.0)
    assert [board.meet(CHAT, 0.0), board.meet(CHAT, 0.0)] == [first, second]


@pytest.mark.parametrize(
    "text",
    ['{"kind":"refuse"}', '{"kind":"nothing"}', '{"kind":"slow"}', '{"kind":"answer","status":9}', "{"],
)
def test_what_is_no_fault_is_refused(text: str):
    with pytest.raises(ValidationError):
        parse_fault(text)
