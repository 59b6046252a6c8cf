"""The series of a page -> one load: the worker's model, the replicas of a rank, then over ranks. Pure.

Where the series come from belongs to ``page``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from monitor import lenient
from monitor.gauges.contract import COUNTS, Field
from monitor.gauges.page import Page, Series
from workers.load import Load, LoadSource

_RANK = ("dp_rank", "engine")
"""Labels that tell ranks apart: each has requests of its own."""
_REPLICA = frozenset({"tp_rank", "pp_rank", "pid", "moe_ep_rank"})
"""Labels of processes that report the same requests once more (or 0): the largest is right."""


def to_load(page: Page, models: Collection[str], *, sampled_s: float, received_s: float) -> Load:
    """One load of all ranks. ``models`` names what the worker serves; empty: unknown, all series count."""
    ranks = {
        field: _by_rank(_of_priority(_of_model(series, models))) for field, series in page.series.items()
    }
    values: dict[str, Any] = {
        field.value: lenient.total([lenient.count(rank) for rank in ranks[field]])
        for field in COUNTS
        if field in ranks
    }
    values["gen_throughput"] = lenient.total_rate(ranks.get(Field.GEN_THROUGHPUT, []))
    values["kv_usage_mean"], values["kv_usage_max"] = lenient.mean_and_max(ranks.get(Field.KV_USAGE, []))
    values["cache_hit_rate"], _ = lenient.mean_and_max(ranks.get(Field.CACHE_HIT_RATE, []))
    values["process_start_time"] = _oldest(page.series.get(Field.PROCESS_START_TIME, ()))
    values.update(_cache_config(page.series.get(Field.CACHE_CONFIG, ())))
    return Load(
        source=LoadSource.METRICS,
        sampled_at=sampled_s,
        received_at=received_s,
        rank_count=len(ranks.get(Field.RUNNING, ())) or None,
        **values,
    )


def _of_model(series: Sequence[Series], models: Collection[str]) -> Sequence[Series]:
    """The series of the worker's models, with those that name none; all when none of them fits."""
    fitting = [one for one in series if one.labels.get("model_name") in models]
    if not fitting:
        return series
    return [one for one in series if "model_name" not in one.labels] + fitting


def _of_priority(series: Sequence[Series]) -> Sequence[Series]:
    """Without the parts of a total: ``priority=""`` is the sum of the other priorities."""
    totals = [one for one in series if not one.labels.get("priority")]
    return totals or series


def _by_rank(series: Iterable[Series]) -> list[float | None]:
    """One value per rank: the largest of its replicas, summed over whatever else tells series apart."""
    parts: dict[tuple[str, ...], dict[tuple[tuple[str, str], ...], float | None]] = {}
    for one in series:
        labels = one.labels
        rank = tuple(labels.get(name, "") for name in _RANK)
        part = tuple(item for item in labels.items() if item[0] not in _REPLICA)
        known = parts.setdefault(rank, {})
        known[part] = _largest(known.get(part), lenient.number(one.value))
    return [lenient.total_rate(list(known.values())) for known in parts.values()]


def _largest(one: float | None, other: float | None) -> float | None:
    return one if other is None else other if one is None else max(one, other)


def _oldest(series: Iterable[Series]) -> float | None:
    known = [value for one in series if (value := lenient.number(one.value))]
    return min(known) if known else None


def _cache_config(series: Iterable[Series]) -> Mapping[str, int | None]:
    """What vLLM tells of its cache, in labels; ``"None"`` is unknown [vllm-project/vllm#16560]."""
    configs = [one.labels for one in series]
    if not configs:
        return {}
    blocks = lenient.total(
        [lenient.count(lenient.digits(labels.get("num_gpu_blocks"))) for labels in configs]
    )
    block_size = lenient.count(lenient.digits(configs[0].get("block_size")))
    tokens = lenient.total(
        [lenient.count(lenient.digits(labels.get("kv_cache_size_tokens"))) for labels in configs]
    )
    if tokens is None and blocks is not None and block_size is not None:
        tokens = blocks * block_size
    return {"block_size": block_size, "num_gpu_blocks": blocks, "capacity_tokens": tokens}
