"""What tests of the monitor are built from: views, loads, and an engine behind MockTransport."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from workers.breaker import BreakerState
from workers.fleet import WorkerState, WorkerView
from workers.load import Load, LoadSource

DATA = Path(__file__).parent / "data"


def page(name: str) -> str:
    """A body that a real engine gave."""
    return (DATA / "pages" / name).read_text(encoding="utf-8")


def cases(folder: str) -> list[dict[str, Any]]:
    """The table of cases of a folder."""
    return json.loads((DATA / folder / "cases.json").read_text(encoding="utf-8"))


def make_load(**fields: Any) -> Load:
    """A load read from metrics at time 1000, unless told otherwise."""
    return Load(**{"source": LoadSource.METRICS, "sampled_at": 1000.0, "received_at": 1000.0, **fields})


def make_view(**fields: Any) -> WorkerView:
    """A ready worker of incarnation 1 with limit 16 and no leases, unless told otherwise."""
    defaults: dict[str, Any] = {
        "id": "engine:8000",
        "url": "http://engine:8000",
        "runtime": None,
        "state": WorkerState.READY,
        "incarnation": 1,
        "models": frozenset(),
        "max_model_len": None,
        "max_running": None,
        "weight": 1.0,
        "api_key_env": None,
        "version": None,
        "load": None,
        "limit": 16,
        "leases": 0,
        "leases_since_sample": 0,
        "tokens_since_sample": 0,
        "breaker": BreakerState.CLOSED,
        "breaker_open_until": 0.0,
        "deferred_until": 0.0,
        "limit_version": 1,
    }
    return WorkerView(**{**defaults, **fields})


Reply = httpx.Response | Exception | Callable[[httpx.Request], httpx.Response]


@dataclass
class Engine:
    """Answers by path (with its query, if listed so), 404 for the rest, and remembers what was asked."""

    replies: dict[str, Reply] = field(default_factory=dict)
    requests: list[httpx.Request] = field(default_factory=list)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        whole = request.url.raw_path.decode()
        reply = self.replies.get(whole, self.replies.get(request.url.path, httpx.Response(404)))
        if isinstance(reply, Exception):
            raise reply
        if callable(reply):
            return reply(request)
        return httpx.Response(reply.status_code, headers=reply.headers, content=reply.content)

    @property
    def asked(self) -> list[str]:
        """Paths with their queries, in order."""
        return [request.url.raw_path.decode() for request in self.requests]

    def client(self) -> httpx.AsyncClient:
        """A client that reaches this engine whatever the host."""
        return httpx.AsyncClient(transport=httpx.MockTransport(self))


def reply(
    body: str | bytes | dict[str, Any] | list[Any] = "", status: int = 200, **headers: str
) -> httpx.Response:
    """An answer; a dictionary or list goes out as JSON."""
    if isinstance(body, dict | list):
        return httpx.Response(status, json=body, headers=headers)
    return httpx.Response(status, content=body, headers=headers)


VLLM_METRICS = (
    'vllm:num_requests_running{{model_name="m"}} {running}\n'
    'vllm:num_requests_waiting{{model_name="m"}} {waiting}\n'
    'vllm:kv_cache_usage_perc{{model_name="m"}} {kv}\n'
    'vllm:generation_tokens_total{{model_name="m"}} {tokens}\n'
    'vllm:request_success_total{{model_name="m",finished_reason="stop"}} {done}\n'
    "process_start_time_seconds {started}\n"
)


def vllm_page(
    running: int = 1,
    waiting: int = 0,
    kv: float = 0.1,
    tokens: int = 100,
    done: int = 1,
    started: float = 500.0,
) -> str:
    """A short metrics page of vLLM."""
    return VLLM_METRICS.format(
        running=running, waiting=waiting, kv=kv, tokens=tokens, done=done, started=started
    )


def vllm_engine(**numbers: Any) -> Engine:
    """vLLM: a list of models, a version, metrics, no /v1/loads."""
    return Engine(
        {
            "/v1/models": reply({"data": [{"id": "m", "owned_by": "vllm", "max_model_len": 2048}]}),
            "/version": reply({"version": "0.32.0"}),
            "/metrics": reply(vllm_page(**numbers)),
        }
    )


def sglang_loads(running: int = 1, waiting: int = 0, **more: Any) -> dict[str, Any]:
    """A body of /v1/loads with one rank."""
    rank = {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "token_usage": 0.1,
        **more,
    }
    return {"version": "0.5.23", "loads": [rank]}


def sglang_engine(**rank: Any) -> Engine:
    """SGLang: a list of models and /v1/loads."""
    return Engine(
        {
            "/v1/models": reply({"data": [{"id": "m", "owned_by": "sglang", "max_model_len": 2048}]}),
            "/v1/loads": reply(sglang_loads(**rank)),
        }
    )
