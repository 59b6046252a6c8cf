"""Which metric carries which field, per runtime: data, and how configuration changes it.

What the fields are and which may be missing belongs to ``contract``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict
from pydantic import Field as Setting

from monitor.gauges.contract import Field, MetricMap
from workers.spec import Runtime

_PROCESS = {Field.PROCESS_START_TIME: ("process_start_time_seconds",)}
_QUEUE = frozenset({Field.RUNNING, Field.WAITING})
_QUEUE_AND_KV = _QUEUE | {Field.KV_USAGE}


def _vllm(*names: str) -> tuple[str, ...]:
    # Plain vLLM, vLLM under Ray Serve, and NIM, which drops the prefix.
    return tuple(prefix + name for prefix in ("vllm:", "ray_vllm:", "") for name in names)


DEFAULTS: Mapping[Runtime, MetricMap] = {
    Runtime.VLLM: MetricMap(
        path="/metrics",
        mandatory=_QUEUE_AND_KV,
        live=True,
        aliases={
            Field.RUNNING: _vllm("num_requests_running"),
            Field.WAITING: _vllm("num_requests_waiting"),
            # 0.9 to 0.11 export both names of the same gauge [vllm-project/production-stack#617].
            Field.KV_USAGE: _vllm("kv_cache_usage_perc", "gpu_cache_usage_perc"),
            Field.PROMPT_TOKENS_TOTAL: _vllm("prompt_tokens_total"),
            Field.GENERATION_TOKENS_TOTAL: _vllm("generation_tokens_total"),
            Field.SUCCESS_TOTAL: _vllm("request_success_total"),
            Field.CACHE_CONFIG: _vllm("cache_config_info"),
            **_PROCESS,
        },
    ),
    Runtime.SGLANG: MetricMap(
        path="/metrics",
        mandatory=_QUEUE_AND_KV,
        aliases={
            Field.RUNNING: ("sglang:num_running_reqs",),
            Field.WAITING: ("sglang:num_queue_reqs",),
            Field.KV_USAGE: ("sglang:token_usage",),
            Field.USED_TOKENS: ("sglang:num_used_tokens",),
            Field.CAPACITY_TOKENS: ("sglang:max_total_num_tokens",),
            Field.GEN_THROUGHPUT: ("sglang:gen_throughput",),
            Field.CACHE_HIT_RATE: ("sglang:cache_hit_rate",),
            Field.PROMPT_TOKENS_TOTAL: ("sglang:prompt_tokens_total",),
            Field.GENERATION_TOKENS_TOTAL: ("sglang:generation_tokens_total",),
            Field.SUCCESS_TOTAL: ("sglang:num_requests_total",),
            **_PROCESS,
        },
    ),
    Runtime.TRTLLM: MetricMap(
        path="/prometheus/metrics",
        mandatory=_QUEUE_AND_KV,
        aliases={
            Field.RUNNING: ("trtllm_num_requests_running",),
            Field.WAITING: ("trtllm_num_requests_waiting",),
            Field.KV_USAGE: ("trtllm_kv_cache_utilization",),
            Field.CACHE_HIT_RATE: ("trtllm_kv_cache_hit_rate",),
            Field.SUCCESS_TOTAL: ("trtllm_request_success_total",),
            **_PROCESS,
        },
    ),
    Runtime.LMDEPLOY: MetricMap(
        path="/metrics",
        mandatory=_QUEUE_AND_KV,
        aliases={
            Field.RUNNING: ("lmdeploy:num_requests_running",),
            Field.WAITING: ("lmdeploy:num_requests_waiting",),
            Field.KV_USAGE: ("lmdeploy:gpu_cache_usage_perc",),
            **_PROCESS,
        },
    ),
    Runtime.TOKENSPEED: MetricMap(
        path="/metrics",
        mandatory=_QUEUE_AND_KV,
        aliases={
            Field.RUNNING: ("tokenspeed:num_requests_running",),
            Field.WAITING: ("tokenspeed:num_requests_waiting",),
            Field.KV_USAGE: ("tokenspeed:kv_cache_usage_perc",),
            **_PROCESS,
        },
    ),
    Runtime.TGI: MetricMap(
        path="/metrics",
        mandatory=_QUEUE,
        aliases={
            Field.RUNNING: ("tgi_batch_current_size",),
            Field.WAITING: ("tgi_queue_size",),
            Field.SUCCESS_TOTAL: ("tgi_request_success",),
            **_PROCESS,
        },
    ),
    Runtime.LLAMACPP: MetricMap(
        path="/metrics",
        mandatory=_QUEUE,
        aliases={
            Field.RUNNING: ("llamacpp:requests_processing",),
            Field.WAITING: ("llamacpp:requests_deferred",),
            Field.KV_USAGE: ("llamacpp:kv_cache_usage_ratio",),
            Field.PROMPT_TOKENS_TOTAL: ("llamacpp:prompt_tokens_total",),
            Field.GENERATION_TOKENS_TOTAL: ("llamacpp:tokens_predicted_total",),
            # Its counters of tokens move when a request ends, this one with every step.
            Field.STEPS_TOTAL: ("llamacpp:n_decode_total",),
            **_PROCESS,
        },
    ),
    # Nothing is known of its metrics: the load is unknown, and our own leases still count.
    Runtime.GENERIC: MetricMap(path=None, mandatory=frozenset(), aliases={}),
}


class MappingOverride(BaseModel):
    """What configuration says of one runtime's or one worker's metrics; what it does not say is the default.

    ``path`` is the page's path on the worker. ``aliases`` replaces the names of single fields; an empty list
    gives a field up, and then it is not mandatory either.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[str, Setting(pattern=r"^/\S*$")] | None = None
    aliases: Mapping[Field, tuple[str, ...]] = {}

    def over(self, base: MetricMap) -> MetricMap:
        """``base`` with this laid over it."""
        given_up = {field for field, names in self.aliases.items() if not names}
        path = self.path or base.path
        return MetricMap(
            # A runtime without a page of its own has one as soon as somebody names its metrics.
            path=path or ("/metrics" if self.aliases else None),
            aliases={**base.aliases, **self.aliases},
            mandatory=base.mandatory - given_up,
            live=base.live,
        )


def mapping_for(runtime: Runtime, worker_id: str, overrides: Mapping[str, MappingOverride]) -> MetricMap:
    """The default of the runtime, then its override, then the worker's own."""
    found = DEFAULTS[runtime]
    for name in (runtime.value, worker_id):
        if name in overrides:
            found = overrides[name].over(found)
    return found
