"""The comparison with peers: who is run, in which order, on what, and which command line starts each."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.peers import arguments, environments, routers, workload
from benchmarks.peers.engines import settings_of
from benchmarks.peers.interactive import MEDIAN, arrivals_per_s
from benchmarks.peers.scenarios import LARGEST, MIDDLE, SCENARIOS
from benchmarks.peers.systems import SYSTEMS, Case, Kind, cases, matching
from forebay.simulator.faults import SlowFault

URLS = ("http://127.0.0.1:1", "http://127.0.0.1:2")
ROUTERS = [name for name, system in SYSTEMS.items() if system.kind is Kind.ROUTER]


def wished(*flags: str) -> list[Case]:
    return cases(arguments.wish(arguments.parser().parse_args(flags)))


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_is_started_on_its_ports_with_every_worker_and_its_own_packages(name: str):
    start = routers.start(SYSTEMS[name], Path("bin"), URLS, (3000, 3001), Path("conf"))
    told = " ".join([*start.command, start.config or ""])
    assert start.command[0].startswith("bin/")
    assert start.command[start.command.index("--port") + 1] == "3000"
    assert all(url in told for url in URLS)
    assert start.environment["PYTHONPATH"] == ""


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("smg/least_load", "--policy least_load --load-monitor-interval 1"),
        ("smg/least_requests", "--policy power_of_two --power-of-two-load-metric least_requests"),
        ("vllm-router/cache_aware", "--policy cache_aware"),
        ("sglang-router/power_of_two", "--policy power_of_two"),
    ],
)
def test_the_policy_that_a_row_names_is_the_one_that_the_router_is_told(name: str, flags: str):
    start = routers.start(SYSTEMS[name], Path("bin"), URLS, (3000, 3001), Path("conf"))
    assert " ".join(start.command).endswith(flags)


def test_litellm_is_told_its_strategy_and_a_deployment_for_each_worker():
    start = routers.start(SYSTEMS["litellm/least-busy"], Path("bin"), URLS, (3000, 3001), Path("conf"))
    config = json.loads(start.config or "")
    assert config["router_settings"] == {"routing_strategy": "least-busy"}
    assert [each["litellm_params"]["api_base"] for each in config["model_list"]] == [f"{u}/v1" for u in URLS]
    assert start.command[start.command.index("--config") + 1] == "conf"


def test_every_router_has_pins_with_hashes_and_no_index_in_them():
    for package in {SYSTEMS[name].package for name in ROUTERS}:
        assert package is not None
        text = environments.requirements(package).read_text()
        assert f"{package}" in text
        assert "--hash=sha256:" in text
        assert "://" not in text


def test_litellm_stays_at_the_release_before_the_compromised_one():
    assert "\nlitellm==1.106.4 " in environments.requirements("litellm").read_text()


def test_every_window_is_tried_with_routers_and_none_where_there_is_none_to_guess():
    run = wished("--seeds", "1", "--systems", "forebay/all", "smg/least_load", "central/first-come")
    assert [(case.system, case.window) for case in run] == [
        ("forebay/all", None),
        ("smg/least_load", 64),
        ("smg/least_load", 128),
        ("smg/least_load", 256),
        ("smg/least_load", None),
        ("central/first-come", None),
    ]


def test_every_second_seed_runs_in_reverse():
    run = wished("--seeds", "1", "2", "3", "--systems", "forebay/all", "central/*")
    names = [case.system for case in run]
    assert names[:3] == names[3:6][::-1] == names[6:]
    assert [case.seed for case in run] == [1] * 3 + [2] * 3 + [3] * 3


def test_clients_retry_when_asked_to_and_forebay_is_not_run_twice_for_it():
    run = wished("--seeds", "1", "--systems", "forebay/all", "central/first-come", "--retries", "off", "on")
    assert [(case.system, case.retries) for case in run] == [
        ("forebay/all", False),
        ("central/first-come", False),
        ("central/first-come", True),
    ]


def test_leaving_room_for_others_is_measured_only_where_there_are_others():
    def systems(scenario: str) -> set[str]:
        return {case.system for case in wished("--scenario", scenario)}

    assert systems("interactive") - systems("mixed") == {"forebay/spare", "central/nobody"}


def test_no_two_cases_have_the_same_words():
    everything = wished("--scenario", "every", "--retries", "off", "on", "--lengths", "unknown", "foretold")
    assert len({case.key for case in everything}) == len(everything) == len(set(everything))


def test_a_pattern_that_names_no_system_is_refused():
    assert matching(["smg/*_load"]) == ["smg/least_load"]
    with pytest.raises(ValueError, match="envoy/\\* names no system"):
        matching(["smg/*", "envoy/*"])


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5"])
def test_a_window_is_a_number_above_0_or_unlimited(text: str):
    assert arguments.window("unlimited") is None
    assert arguments.window("64") == 64
    with pytest.raises(argparse.ArgumentTypeError):
        arguments.window(text)


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("foretold", [True, False])
def test_the_same_seed_asks_the_same_and_another_seed_something_else(scenario: str, *, foretold: bool):
    def lines(seed: int) -> list[bytes]:
        run = workload.requests(SCENARIOS[scenario], 80, seed, foretold=foretold)
        return [request.line() for request in run]

    assert lines(1) == lines(1)
    assert not set(lines(1)) & set(lines(2))


def test_lengths_are_told_by_max_tokens_only_when_they_are_foretold():
    told = workload.requests(SCENARIOS["mixed"], 50, 1, foretold=True)
    hidden = workload.requests(SCENARIOS["mixed"], 50, 1, foretold=False)
    assert [request.max_tokens for request in told] == [request.tokens for request in hidden]
    assert {request.max_tokens for request in hidden} == {2048}


def test_prompts_that_fit_no_engine_come_first_and_count_for_nothing():
    run = workload.requests(SCENARIOS["over-long"], 100, 1, foretold=False)
    assert [request.tokens == 0 for request in run] == [True] * 60 + [False] * 40
    assert all(len(request.prompt) > 8192 * 4 for request in run[:60])


def test_prompts_share_their_beginnings_only_where_that_is_the_scenario():
    def beginnings(scenario: str) -> int:
        run = workload.requests(SCENARIOS[scenario], 200, 1, foretold=False)
        return len({request.prompt[:12] for request in run})

    assert beginnings("mixed") == 200
    assert beginnings("prefixes") == 32


def test_capacity_that_is_lost_or_used_by_others_moves_the_bound():
    tokens = [200] * 2000
    calm = SCENARIOS["mixed"].bound_s(tokens)
    killed = SCENARIOS["killed"].bound_s(tokens)
    lost = SCENARIOS["mixed"].engines[MIDDLE].capacity / SCENARIOS["mixed"].capacity
    assert killed == pytest.approx(calm / 3 + calm * 2 / 3 / (1 - lost))
    assert SCENARIOS["interactive"].bound_s(tokens) == pytest.approx(2 * calm)
    assert SCENARIOS["telemetry"].bound_s(tokens) == calm


def test_the_engines_of_a_scenario_have_the_runtime_that_a_router_needs():
    mixed = [each.runtime for each in settings_of(SCENARIOS["mixed"], None)]
    assert sorted(set(mixed)) == ["sglang", "vllm"]
    assert {each.runtime for each in settings_of(SCENARIOS["mixed"], "vllm")} == {"vllm"}


def test_engines_read_prompts_and_remember_them_only_where_prompts_share_beginnings():
    assert {(e.prefill_tokens_per_s, e.prefix_caching) for e in settings_of(SCENARIOS["mixed"], None)} == {
        (0.0, False)
    }
    assert all(e.prefill_tokens_per_s and e.prefix_caching for e in settings_of(SCENARIOS["prefixes"], None))


def test_a_hanging_worker_takes_requests_and_finishes_none():
    hanging = SCENARIOS["hangs"]
    assert hanging.faults == (SlowFault(factor=0.0),)
    assert (hanging.place, SCENARIOS["telemetry"].place) == (MIDDLE, LARGEST)


def test_interactive_traffic_offers_the_share_it_is_told():
    mean_tokens = MEDIAN * 1.3771  # e^(0.8^2 / 2)
    assert arrivals_per_s(8800) * mean_tokens == pytest.approx(8800, rel=0.001)
