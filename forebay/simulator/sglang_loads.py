"""The body of ``GET /v1/loads`` as SGLang 0.5.23 gives it.

Belongs here: sections and keys, in their order. The top-level timestamp is the time of the answer; the one of
a rank is the time of its sample, which is what a frozen scheduler betrays itself by. What the model of the
engine knows nothing of (memory in GB, disaggregation) is zero, as on an engine that has none of it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from forebay.simulator.reply import Reply, json_reply

if TYPE_CHECKING:
    from forebay.simulator.load import LoadSnapshot
    from forebay.simulator.settings import EngineSettings

_SECTIONS = ("memory", "spec", "lora", "disagg", "queues")
_KNOWN = frozenset({"core", "all", *_SECTIONS})
_KEYS = {"memory": "memory", "disagg": "disaggregation", "queues": "queues"}


def loads_reply(
    settings: EngineSettings, version: str, load: LoadSnapshot, include: str | None, now_s: float
) -> Reply:
    """The answer at ``now_s`` (Unix time); ``include`` is the query's list with commas, None means all."""
    asked = {part.strip() for part in include.split(",")} if include else {"all"}
    if unknown := sorted(asked - _KNOWN):
        return json_reply(400, {"detail": f"Invalid include sections: {unknown}"})
    return json_reply(
        200,
        {
            "timestamp": datetime.fromtimestamp(now_s, UTC).isoformat(timespec="microseconds"),
            "version": version,
            "accelerator": None,
            "num_accelerators": 1,
            "loads": [_rank(settings, load, asked)],
        },
    )


def _rank(settings: EngineSettings, load: LoadSnapshot, asked: set[str]) -> dict[str, object]:
    total = load.used_tokens + load.waiting_prompt_tokens
    rank: dict[str, object] = {
        "timestamp": load.sampled_at_s,
        "dp_rank": 0,
        "num_running_reqs": load.running,
        "num_waiting_reqs": load.waiting,
        "num_waiting_uncached_tokens": load.waiting_prompt_tokens,
        "num_used_tokens": load.used_tokens,
        "num_total_tokens": total,
        "num_active_tokens": total,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": load.capacity_tokens,
        "max_running_requests": settings.slots,
        "token_usage": round(load.usage, 4),
        "gen_throughput": round(load.gen_tokens_per_s, 2),
        "cache_hit_rate": 0.0,
        "utilization": 0.0,
        "total_prefill_uncached_tokens": load.prompt_tokens_total,
        "total_prefill_busy_us": round(settings.pace().prefill_s(load.prompt_tokens_total) * 1e6),
        "decode_moments": _decode_moments(settings, load),
    }
    sections = _sections(load)
    rank.update((key, sections[name]) for name, key in _KEYS.items() if asked & {"all", name})
    return rank


def _decode_moments(settings: EngineSettings, load: LoadSnapshot) -> list[float]:
    """Sums over all decode steps: steps, batch, microseconds, batch squared, batch by microseconds, tokens.

    The model of the engine has no steps: each token counts as one, of a batch of one.
    """
    tokens = float(load.generation_tokens_total)
    busy_us = round(settings.pace().decode_s(load.generation_tokens_total) * 1e6)
    return [tokens, tokens, float(busy_us), tokens, float(busy_us), tokens]


def _sections(load: LoadSnapshot) -> dict[str, dict[str, object]]:
    return {
        "memory": {
            "weight_gb": 0.0,
            "kv_cache_gb": 0.0,
            "graph_gb": 0.0,
            "token_capacity": load.capacity_tokens,
        },
        "disagg": {
            "mode": "null",
            "prefill_bootstrap_queue_reqs": 0,
            "prefill_inflight_queue_reqs": 0,
            "decode_prealloc_queue_reqs": 0,
            "decode_transfer_queue_reqs": 0,
            "decode_retracted_queue_reqs": 0,
            "kv_transfer_speed_gb_s": 0.0,
            "kv_transfer_latency_ms": 0.0,
        },
        "queues": {"waiting": load.waiting, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0},
    }
