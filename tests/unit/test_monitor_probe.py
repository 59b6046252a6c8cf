"""What an answer of ``/v1/loads`` proves, and how it is asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from monitor.http import Target
from monitor.probe import Form, Probed, Verdict, judge, probe
from tests.monitored import Engine, cases, page, reply, sglang_loads

SECTIONS = "/v1/loads?include=core,disagg,queues"


@pytest.mark.parametrize("case", cases("loads"), ids=lambda case: case["name"])
def test_an_answer_is_judged_as_the_table_says(case: dict[str, Any]) -> None:
    found = judge(case["status"], case["headers"], case["body"].encode())
    assert found.verdict == case["verdict"]
    assert (found.load is None) == (case["load"] is None)
    for name, value in (case["load"] or {}).items():
        assert getattr(found.load, name) == value, name
    assert bool(found.reason) == (found.verdict is not Verdict.AVAILABLE)


def one_rank(**fields: Any) -> bytes:
    return httpx.Response(200, json={"loads": [fields]}).content


def test_a_real_page_is_read_in_full() -> None:
    found = judge(200, {}, page("sglang_loads.json").encode())
    load = found.load
    assert load is not None
    assert (load.running, load.waiting, load.max_running, load.version) == (8, 32, 8, "0.5.23")
    assert (load.used_tokens, load.capacity_tokens, load.waiting_uncached_tokens) == (1218, 65536, 3810)
    assert (load.generation_tokens_total, load.prompt_tokens_total) == (3151, 1254)
    assert load.disagg_mode is None
    assert load.sampled_at == 1796054397.3760335
    assert found.sample_age_s == pytest.approx(0.038, abs=0.001)


def test_a_total_of_older_engines_counts_the_waiting_in() -> None:
    found = judge(200, {}, one_rank(num_total_reqs=5, num_waiting_reqs=2))
    assert found.load is not None
    assert (found.load.running, found.load.waiting) == (3, 2)


def test_a_flat_disaggregation_is_read_too() -> None:
    found = judge(200, {}, one_rank(num_running_reqs=1, disaggregation_mode="decode"))
    assert found.load is not None
    assert found.load.disagg_mode == "decode"


def test_the_oldest_rank_dates_the_load() -> None:
    ranks = [{"num_running_reqs": 1, "timestamp": stamp} for stamp in (1000.0, 940.0)]
    body = httpx.Response(200, json={"timestamp": "1970-01-01T00:16:41Z", "loads": ranks}).content
    found = judge(200, {}, body)
    assert found.load is not None
    assert found.load.sampled_at == 940.0
    assert found.sample_age_s == 61.0


def test_the_date_header_stands_in_for_the_time_of_the_answer() -> None:
    headers = httpx.Headers({"date": "Thu, 01 Jan 1970 00:16:40 GMT"})
    assert judge(200, headers, one_rank(num_running_reqs=1, timestamp=970.0)).sample_age_s == 30.0


def test_a_worker_that_stamps_nothing_is_as_old_as_the_question() -> None:
    found = judge(200, {}, one_rank(num_running_reqs=1), sent_s=7.0)
    assert found.load is not None
    assert (found.load.sampled_at, found.sample_age_s) == (7.0, None)


def test_a_silent_rank_counts_for_nothing_beside_one_that_speaks() -> None:
    body = httpx.Response(200, json={"loads": [{}, {"num_running_reqs": 3}, "odd"]}).content
    found = judge(200, {}, body)
    assert found.load is not None
    assert (found.load.running, found.load.rank_count) == (3, 1)


def test_a_sum_with_an_unknown_part_is_unknown() -> None:
    ranks = [
        {"num_running_reqs": 3, "num_waiting_reqs": 1},
        {"num_running_reqs": None, "num_waiting_reqs": 1},
    ]
    found = judge(200, {}, httpx.Response(200, json={"loads": ranks}).content)
    assert found.load is not None
    assert (found.load.running, found.load.waiting) == (None, 2)


@pytest.mark.parametrize("odd", ["1e999", "1e300", "9" * 400, "-1", "true", '"many"', "null"])
def test_what_is_no_number_is_unknown_in_a_load_that_is_read_all_the_same(odd: str) -> None:
    rank = (
        f'{{"num_running_reqs": 1, "num_used_tokens": {odd}, "gen_throughput": {odd}, "token_usage": {odd}}}'
    )
    load = judge(200, {}, f'{{"loads": [{rank}]}}'.encode()).load
    assert load is not None
    assert (load.running, load.used_tokens, load.gen_throughput, load.kv_usage_max) == (1, None, None, None)


def test_moments_of_no_step_are_no_counter() -> None:
    found = judge(200, {}, one_rank(num_running_reqs=1, decode_moments=[0.0] * 6))
    assert found.load is not None
    assert found.load.generation_tokens_total is None


@pytest.mark.parametrize(
    ("headers", "body", "verdict"),
    [
        ({"content-type": "application/json"}, b"", Verdict.INCONCLUSIVE),
        ({"content-type": "application/json", "content-length": "0"}, b"", Verdict.ABSENT),
        ({"content-type": "text/plain"}, b"", Verdict.ABSENT),
        ({"content-type": "application/json"}, b"\xff\xfe", Verdict.ABSENT),
        ({}, b'{"loads": null}', Verdict.ABSENT),
        ({}, b'{"loads": {}}', Verdict.ABSENT),
    ],
)
def test_a_body_without_loads_is_absent_only_when_it_is_complete(
    headers: dict[str, str], body: bytes, verdict: Verdict
) -> None:
    assert judge(200, headers, body).verdict is verdict


@pytest.mark.parametrize("status", [201, 206, 301, 307, 402, 422, 502, 599])
def test_any_other_status_proves_nothing(status: int) -> None:
    assert judge(status, {}, b"").verdict is Verdict.INCONCLUSIVE


async def ask(engine: Engine, form: Form = Form.SECTIONS, key: str | None = None) -> Probed:
    async with engine.client() as client:
        deadline = asyncio.get_running_loop().time() + 5
        return await probe(client, Target("http://engine", key), form, deadline=deadline, sent_s=1.0)


@pytest.mark.parametrize("status", [400, 500])
async def test_a_server_that_refuses_the_parameters_is_asked_once_more_without(status: int) -> None:
    engine = Engine({SECTIONS: reply(status=status), "/v1/loads": reply(sglang_loads())})
    found = await ask(engine)
    assert engine.asked == [SECTIONS, "/v1/loads"]
    assert (found.verdict.verdict, found.form) == (Verdict.AVAILABLE, Form.PLAIN)


async def test_the_form_that_worked_is_the_only_one_asked_again() -> None:
    engine = Engine({SECTIONS: reply(status=400), "/v1/loads": reply(sglang_loads())})
    await ask(engine, Form.PLAIN)
    assert engine.asked == ["/v1/loads"]


async def test_a_server_that_refuses_both_forms_proves_nothing_and_no_form_is_kept() -> None:
    engine = Engine({"/v1/loads": reply(status=500)})
    found = await ask(engine)
    assert (found.verdict.verdict, found.form) == (Verdict.INCONCLUSIVE, Form.SECTIONS)


async def test_the_key_goes_along_and_never_into_a_reason() -> None:
    engine = Engine({"/v1/loads": httpx.ReadError("Bearer hush-hush")})
    found = await ask(engine, key="hush-hush")
    assert engine.requests[0].headers["authorization"] == "Bearer hush-hush"
    assert "hush-hush" not in repr(found)
    assert "hush-hush" not in repr(Target("http://engine", "hush-hush"))


async def test_a_redirect_is_not_followed() -> None:
    engine = Engine({"/v1/loads": reply(status=302, location="http://elsewhere/v1/loads")})
    found = await ask(engine, key="k")
    assert [request.url.host for request in engine.requests] == ["engine"]
    assert found.verdict.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("error", "unreached"),
    [
        (httpx.ConnectError("refused"), True),
        (httpx.ConnectTimeout("slow"), True),
        (httpx.ReadError("reset"), False),
        (httpx.RemoteProtocolError("cut off"), False),
        (httpx.ReadTimeout("slow"), False),
    ],
)
async def test_a_transport_error_proves_nothing(error: Exception, unreached: bool) -> None:
    found = await ask(Engine({"/v1/loads": error}))
    assert found.verdict.verdict is Verdict.INCONCLUSIVE
    assert found.unreached is unreached
