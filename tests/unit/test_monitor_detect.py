"""Runtime detection and readiness, on what real engines answer."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from monitor.detect import Detection, detect, identify
from monitor.http import Answer, NoAnswer, Silence, Target
from monitor.readiness import Readiness, check, judge_models
from tests.monitored import Engine, page, reply
from workers.spec import Runtime

NOT_FOUND = Answer(404, {}, b"")
LATE = NoAnswer(Silence.LATE, "late")


def answer(body: str, status: int = 200) -> Answer:
    return Answer(status, {}, body.encode())


def owned_by(owner: str) -> Answer:
    return answer(f'{{"data":[{{"id":"m","owned_by":"{owner}"}}]}}')


@pytest.mark.parametrize(
    ("models", "version", "info", "expected"),
    [
        (page("vllm_models.json"), page("vllm_version.json"), None, Detection(Runtime.VLLM, "0.32.0")),
        (page("llamacpp_models.json"), None, None, Detection(Runtime.LLAMACPP)),
        (
            page("sglang_models.json"),
            None,
            page("sglang_server_info.json"),
            Detection(Runtime.SGLANG, "0.5.23"),
        ),
    ],
)
def test_a_real_engine_is_known_by_its_answers(
    models: str, version: str | None, info: str | None, expected: Detection
) -> None:
    other = [NOT_FOUND if text is None else answer(text) for text in (version, info)]
    assert identify(answer(models), *other) == expected


@pytest.mark.parametrize(
    ("owner", "runtime"),
    [("tensorrt_llm", Runtime.TRTLLM), ("lmdeploy", Runtime.LMDEPLOY), ("tokenspeed", Runtime.TOKENSPEED)],
)
def test_the_owner_of_the_models_names_the_runtime(owner: str, runtime: Runtime) -> None:
    assert identify(owned_by(owner), NOT_FOUND, NOT_FOUND).runtime is runtime


def test_server_info_with_its_arguments_is_sglang_whoever_owns_the_models() -> None:
    found = identify(owned_by("acme"), answer('{"version":"9"}'), answer(page("sglang_server_info.json")))
    assert found.runtime is Runtime.SGLANG


def test_a_version_alone_is_vllm() -> None:
    assert identify(owned_by("acme"), answer('{"version":"0.9"}'), NOT_FOUND) == Detection(
        Runtime.VLLM, "0.9"
    )


@pytest.mark.parametrize("status", [408, 429, 500, 503])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_whoever_is_in_trouble_is_not_called_generic_for_it(status: int, place: int) -> None:
    answers: list[Answer] = [owned_by("acme"), NOT_FOUND, NOT_FOUND]
    answers[place] = Answer(status, {}, b"")
    assert identify(*answers).runtime is None


def test_whoever_answers_and_is_none_of_them_is_generic() -> None:
    assert identify(owned_by("acme"), NOT_FOUND, answer("[]")).runtime is Runtime.GENERIC


def test_a_worker_that_did_not_answer_is_not_detected_yet() -> None:
    assert identify(owned_by("acme"), NOT_FOUND, LATE).runtime is None


async def test_a_known_owner_spares_the_question_for_server_info() -> None:
    engine = Engine({"/version": reply({"version": "1"})})
    async with engine.client() as client:
        deadline = asyncio.get_running_loop().time() + 5
        found = await detect(client, Target("http://e"), owned_by("vllm"), deadline=deadline)
    assert found == Detection(Runtime.VLLM, "1")
    assert engine.asked == ["/version"]


def test_every_model_counts_lora_adapters_too_and_the_smallest_context() -> None:
    body = '{"data":[{"id":"base","max_model_len":4096},{"id":"lora","parent":"base","max_model_len":2048}]}'
    found = judge_models(answer(body))
    assert (found.ready, found.models, found.max_model_len) == (True, ("base", "lora"), 2048)


def test_the_context_of_a_llamacpp_slot_stands_in_meta() -> None:
    found = judge_models(answer(page("llamacpp_models.json")))
    assert (found.models, found.max_model_len) == (("tiny-llama",), 2048)


@pytest.mark.parametrize("body", ["", "[]", "{}", '{"data":null}', '{"data":[1,{"id":3}]}', "<html>"])
def test_a_list_of_models_that_says_nothing_is_ready_with_models_unknown(body: str) -> None:
    found = judge_models(answer(body))
    assert (found.ready, found.models, found.max_model_len) == (True, None, None)


async def looked_at(engine: Engine) -> Readiness:
    async with engine.client() as client:
        deadline = asyncio.get_running_loop().time() + 5
        return await check(client, Target("http://e"), deadline=deadline)


async def test_health_decides_for_a_worker_without_a_list_of_models() -> None:
    engine = Engine({"/health": reply()})
    found = await looked_at(engine)
    assert found.ready is True
    assert engine.asked == ["/v1/models", "/health"]


async def test_a_worker_that_refuses_both_is_not_ready_and_the_first_answer_says_why() -> None:
    found = await looked_at(Engine({"/v1/models": reply(status=401), "/health": reply(status=503)}))
    assert (found.ready, found.reason) == (False, "/v1/models: status 401")


@pytest.mark.parametrize("status", [401, 403])
async def test_a_worker_that_refuses_our_key_is_not_ready_however_healthy(status: int) -> None:
    found = await looked_at(Engine({"/v1/models": reply(status=status), "/health": reply()}))
    assert (found.ready, found.reason) == (False, f"/v1/models: status {status}")


async def test_a_refused_connection_is_not_ready_and_not_asked_twice() -> None:
    engine = Engine({"/v1/models": httpx.ConnectError("refused")})
    found = await looked_at(engine)
    assert found.ready is False
    assert engine.asked == ["/v1/models"]


async def test_a_slow_answer_teaches_nothing() -> None:
    found = await looked_at(Engine({"/v1/models": httpx.ReadTimeout("slow")}))
    assert found.ready is None
