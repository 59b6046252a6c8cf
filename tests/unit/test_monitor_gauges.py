"""A metrics page read into a load: the contract, the mappings, the reduction over series."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from monitor.gauges.contract import Field, MissingMetricsError, UnreadablePageError
from monitor.gauges.mappings import DEFAULTS, MappingOverride, mapping_for
from monitor.gauges.page import PageReader
from monitor.gauges.reduce import to_load
from monitor.gauges.scrape import scrape
from monitor.http import Target
from tests.monitored import DATA, Engine, cases, page, reply, vllm_page
from workers.load import Load
from workers.spec import Runtime


def read(text: str, runtime: Runtime = Runtime.VLLM, *models: str) -> Load:
    series = PageReader(mapping_for(runtime, "w", {})).read(text)
    return to_load(series, models, sampled_s=1.0, received_s=1.0)


def load_of(case: dict[str, Any]) -> Load:
    text = (DATA / "metrics" / case["file"]).read_text(encoding="utf-8")
    return read(text, Runtime(case["runtime"]), *filter(None, [case["model"]]))


GOOD = [case for case in cases("metrics") if case["error"] is None]
BAD = [case for case in cases("metrics") if case["error"] is not None]


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case["file"])
def test_a_page_is_read_as_the_table_says(case: dict[str, Any]) -> None:
    load = load_of(case)
    for name, value in case["load"].items():
        assert getattr(load, name) == value, name


@pytest.mark.parametrize("case", BAD, ids=lambda case: case["file"])
def test_a_page_that_must_not_be_used_raises(case: dict[str, Any]) -> None:
    with pytest.raises((MissingMetricsError, UnreadablePageError)) as caught:
        load_of(case)
    if isinstance(caught.value, MissingMetricsError):
        assert list(caught.value.names) == case["error"]
        assert all(name in str(caught.value) for name in case["error"])
    else:
        assert case["error"] == ["unparsable"]


@pytest.mark.parametrize(
    ("runtime", "expected"),
    [
        (Runtime.VLLM, {"running": 8, "waiting": 32, "success_total": 9, "capacity_tokens": 2097152}),
        (Runtime.SGLANG, {"running": 8, "waiting": 32, "success_total": 10, "used_tokens": 954}),
        (
            Runtime.LLAMACPP,
            {"running": 3, "waiting": 0, "generation_tokens_total": 7199, "steps_total": 4399},
        ),
    ],
)
def test_a_page_of_a_real_engine_is_read(runtime: Runtime, expected: dict[str, int]) -> None:
    load = read(page(f"{runtime}_metrics.prom"), runtime, "tiny-llama")
    assert {name: getattr(load, name) for name in expected} == expected


def test_every_runtime_has_a_mapping_and_the_mandatory_fields_have_names() -> None:
    assert set(DEFAULTS) == set(Runtime)
    for mapping in DEFAULTS.values():
        assert all(mapping.aliases[field] for field in mapping.mandatory)
        assert (mapping.path is None) == (not mapping.aliases)


def test_a_page_that_ends_in_the_middle_of_a_number_is_cut_off() -> None:
    with pytest.raises(UnreadablePageError):
        read(vllm_page(running=80).rstrip("\n"))


def test_a_wanted_line_that_does_not_parse_spoils_the_page() -> None:
    with pytest.raises(UnreadablePageError):
        read(vllm_page().replace("} 1\n", "} one\n"))


def test_a_line_nobody_wants_spoils_nothing() -> None:
    assert read("what is this{\n" + vllm_page(running=3)).running == 3


def test_a_page_without_series_of_the_model_is_taken_whole() -> None:
    assert read(vllm_page(running=3), Runtime.VLLM, "another-name").running == 3


def test_one_rank_whose_usage_is_unknown_makes_mean_and_max_unknown() -> None:
    text = page_of_two_ranks("NaN")
    load = read(text)
    assert (load.kv_usage_mean, load.kv_usage_max, load.running) == (None, None, 2)


def page_of_two_ranks(usage: str) -> str:
    lines = []
    for rank, value in (("0", "0.5"), ("1", usage)):
        lines += [
            f'vllm:num_requests_running{{engine="{rank}"}} 1',
            f'vllm:num_requests_waiting{{engine="{rank}"}} 0',
            f'vllm:kv_cache_usage_perc{{engine="{rank}"}} {value}',
        ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("odd", ["NaN", "+Inf", "-Inf", "-1", "1e300"])
def test_what_is_no_number_is_unknown_and_not_0(odd: str) -> None:
    load = read(vllm_page(kv=odd, waiting=odd))  # type: ignore[arg-type]  # as the engine prints it
    assert (load.kv_usage_mean, load.waiting, load.running) == (None, None, 1)


def test_parts_by_priority_are_added_when_there_is_no_total() -> None:
    text = (
        'sglang:num_running_reqs{priority="1"} 3\n'
        'sglang:num_running_reqs{priority="2"} 4\n'
        "sglang:num_queue_reqs 0\nsglang:token_usage 0.5\n"
    )
    assert read(text, Runtime.SGLANG).running == 7


class TestOverrides:
    def test_a_partial_override_is_completed_from_the_defaults(self) -> None:
        override = MappingOverride(aliases={Field.RUNNING: ("my:running",)})
        mapping = mapping_for(Runtime.VLLM, "w", {"vllm": override})
        default = DEFAULTS[Runtime.VLLM]
        assert mapping.aliases[Field.RUNNING] == ("my:running",)
        assert mapping.aliases[Field.WAITING] == default.aliases[Field.WAITING]
        assert (mapping.path, mapping.mandatory, mapping.live) == (default.path, default.mandatory, True)

    def test_a_workers_own_override_is_laid_over_its_runtimes(self) -> None:
        overrides = {
            "vllm": MappingOverride(path="/m", aliases={Field.RUNNING: ("r",), Field.WAITING: ("w",)}),
            "host:1": MappingOverride(aliases={Field.RUNNING: ("mine",)}),
        }
        mine = mapping_for(Runtime.VLLM, "host:1", overrides)
        other = mapping_for(Runtime.VLLM, "host:2", overrides)
        assert (mine.path, mine.aliases[Field.RUNNING], mine.aliases[Field.WAITING]) == (
            "/m",
            ("mine",),
            ("w",),
        )
        assert other.aliases[Field.RUNNING] == ("r",)

    def test_a_field_that_is_given_up_may_be_missing(self) -> None:
        mapping = mapping_for(Runtime.VLLM, "w", {"vllm": MappingOverride(aliases={Field.KV_USAGE: ()})})
        found = PageReader(mapping).read("vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n")
        assert Field.KV_USAGE not in found.used

    def test_a_generic_worker_with_named_metrics_has_a_page(self) -> None:
        override = MappingOverride(aliases={Field.RUNNING: ("app_busy",)})
        mapping = mapping_for(Runtime.GENERIC, "w", {"generic": override})
        assert mapping.path == "/metrics"
        assert PageReader(mapping).read("app_busy 3\n").used == {Field.RUNNING: "app_busy"}


async def scraped(answer: httpx.Response, runtime: Runtime = Runtime.VLLM) -> tuple[Any, Engine]:
    engine = Engine({"/metrics": answer})
    async with engine.client() as client:
        found = await scrape(
            client,
            Target("http://engine"),
            "/metrics",
            PageReader(DEFAULTS[runtime]),
            (),
            deadline=asyncio.get_running_loop().time() + 5,
            sent_s=7.0,
        )
    return found, engine


async def test_the_plain_format_is_asked_for_and_the_page_is_as_old_as_the_question() -> None:
    found, engine = await scraped(reply(vllm_page()))
    assert engine.requests[0].headers["accept"] == "text/plain; version=0.0.4"
    assert found.load.sampled_at == 7.0
    assert found.used[Field.RUNNING] == "vllm:num_requests_running"


async def test_llamacpp_tells_its_start_in_a_header() -> None:
    headers = {"Process-Start-Time-Unix": "1792789361"}
    found, _ = await scraped(
        httpx.Response(200, text=page("llamacpp_metrics.prom"), headers=headers), Runtime.LLAMACPP
    )
    assert found.load.process_start_time == 1792789361.0


async def test_a_start_that_no_clock_can_tell_is_unknown() -> None:
    headers = {"Process-Start-Time-Unix": "9" * 310}
    found, _ = await scraped(
        httpx.Response(200, text=page("llamacpp_metrics.prom"), headers=headers), Runtime.LLAMACPP
    )
    assert found.load.process_start_time is None


def test_a_cache_larger_than_any_is_unknown() -> None:
    config = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{"9" * 310}"}} 1\n'
    load = read(vllm_page() + config)
    assert (load.block_size, load.num_gpu_blocks, load.capacity_tokens) == (16, None, None)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (reply(status=503), "metrics: status 503"),
        (reply("vllm:num_requests_running 1\n"), "lacks vllm:num_requests_waiting, vllm:kv_cache_usage_perc"),
        (reply("vllm:num_requests_running"), "cut off"),
    ],
)
async def test_a_scrape_without_a_load_says_why(answer: httpx.Response, reason: str) -> None:
    found, _ = await scraped(answer)
    assert found.load is None
    assert reason in found.reason
