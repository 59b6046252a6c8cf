"""How each router is started: its command line, configuration and health page. Pure.

Defaults stand where a person has no reason to touch them. What is set: ports, the policy, the poll that
`least_load` needs to be of use, quiet logs, and for litellm that it may run without a database and a key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from bench_fleet import MODEL

from benchmarks.peers.systems import System

_SMG = {
    "power_of_two": ["--policy", "power_of_two"],
    "least_requests": ["--policy", "power_of_two", "--power-of-two-load-metric", "least_requests"],
    "least_load": ["--policy", "least_load", "--load-monitor-interval", "1"],
    "round_robin": ["--policy", "round_robin"],
    "cache_aware": ["--policy", "cache_aware"],
}


@dataclass(frozen=True, slots=True)
class Start:
    """All it takes. ``config``: the text of the file that the command names, if it does."""

    command: list[str]
    health: str
    config: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


def start(system: System, programs: Path, urls: Sequence[str], ports: tuple[int, int], config: Path) -> Start:
    """How to start a router on the first port; the second is for its metrics, ``config`` for its file."""
    listen = ["--host", "127.0.0.1", "--port", str(ports[0])]
    routing = [*listen, "--prometheus-host", "127.0.0.1", "--prometheus-port", str(ports[1])]
    workers = ["--worker-urls", *urls]
    match system.package:
        case "smg":
            quiet = ["--log-level", "warn", "--disable-tokenizer-autoload"]
            command = [str(programs / "smg"), "launch", *workers, *routing, *quiet, *_SMG[system.setting]]
        case "sglang-router":
            policy = ["--log-level", "warn", "--policy", system.setting]
            command = [str(programs / "sglang-router"), "launch", *workers, *routing, *policy]
        case "vllm-router":
            policy = ["--log-level", "warning", "--policy", system.setting]
            command = [str(programs / "vllm-router"), *workers, *routing, *policy]
        case "litellm":
            command = [str(programs / "litellm"), "--config", str(config), *listen, "--telemetry", "False"]
            return Start(command, "/health/liveliness", litellm_config(system.setting, urls), _LITELLM)
        case package:
            raise ValueError(f"{package} is no router")
    return Start(command, "/health", environment=_OWN)


_OWN = {"PYTHONPATH": ""}
"""Its packages are its own, and ours are none of its."""
_LITELLM = _OWN | {
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it fetches one from the network
}


def litellm_config(strategy: str, urls: Sequence[str]) -> str:
    """JSON, which is YAML too."""
    workers = [
        {
            "model_name": MODEL,
            "litellm_params": {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"},
        }
        for url in urls
    ]
    settings = {"model_list": workers, "router_settings": {"routing_strategy": strategy}}
    return msgspec.json.encode(settings).decode()
