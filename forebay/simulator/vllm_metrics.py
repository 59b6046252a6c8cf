"""The metrics page of vLLM 0.32, as far as a reader of loads is concerned with it.

Belongs here: names, help texts, labels and order of the families, copied from a real page, including those
that mislead a careless reader: ``_by_reason`` parts beside their total, and a ``_created`` gauge for every
counter. Left out are the histograms but one, and the Python and HTTP families but
``process_start_time_seconds``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.simulator.prometheus import Page

if TYPE_CHECKING:
    from forebay.simulator.load import LoadSnapshot
    from forebay.simulator.settings import EngineSettings

_BLOCK_TOKENS = 16
_REASONS = ("stop", "length", "abort", "error", "repetition")
_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0)


def metrics_page(settings: EngineSettings, load: LoadSnapshot, started_at_s: float) -> bytes:
    """The page at the moment of ``load``; ``started_at_s`` (Unix time) is the process's start."""
    page = Page(engine="0", model_name=settings.model)
    _process(page, started_at_s)
    _requests(page, load)
    page.gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", load.usage)
    _counter(
        page, "vllm:num_preemptions", "Cumulative number of preemption from the engine.", started_at_s, 0
    )
    _tokens(page, load, started_at_s)
    _finished(page, load, started_at_s)
    _rejections(page, settings, load, started_at_s)
    page.histogram(
        "vllm:request_generation_tokens",
        "Number of generation tokens processed.",
        _BOUNDS,
        load.succeeded,
        load.generation_tokens_total,
    )
    _cache_config(page, settings)
    return page.text()


def _process(page: Page, started_at_s: float) -> None:
    name = "process_start_time_seconds"
    page.family(name, "gauge", "Start time of the process since unix epoch in seconds.")
    page.bare(name, started_at_s)


def _requests(page: Page, load: LoadSnapshot) -> None:
    page.gauge("vllm:num_requests_running", "Number of requests in model execution batches.", load.running)
    page.gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", load.waiting)
    name = "vllm:num_requests_waiting_by_reason"
    page.family(
        name,
        "gauge",
        "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; "
        "'deferred' = deferred by transient constraints (LoRA budget, KV transfer, blocked status). "
        "Sum of all reasons equals vllm:num_requests_waiting.",
    )
    page.sample(name, load.waiting, reason="capacity")
    page.sample(name, 0, reason="deferred")


def _counter(page: Page, stem: str, text: str, started_at_s: float, value: float) -> None:
    page.family(f"{stem}_total", "counter", text)
    page.sample(f"{stem}_total", value)
    page.gauge(f"{stem}_created", text, started_at_s)


def _tokens(page: Page, load: LoadSnapshot, started_at_s: float) -> None:
    prompt = load.prompt_tokens_total
    _counter(page, "vllm:prompt_tokens", "Number of prefill tokens processed.", started_at_s, prompt)
    name = "vllm:prompt_tokens_by_source_total"
    page.family(name, "counter", "Number of prompt tokens by source.")
    page.sample(name, prompt, source="local_compute")
    page.sample(name, 0, source="local_cache_hit")
    page.sample(name, 0, source="external_kv_transfer")
    _counter(
        page,
        "vllm:generation_tokens",
        "Number of generation tokens processed.",
        started_at_s,
        load.generation_tokens_total,
    )


def _finished(page: Page, load: LoadSnapshot, started_at_s: float) -> None:
    text = "Count of successfully processed requests."
    page.family("vllm:request_success_total", "counter", text)
    for reason in _REASONS:
        page.sample("vllm:request_success_total", load.finished.get(reason, 0), finished_reason=reason)
    page.family("vllm:request_success_created", "gauge", text)
    for reason in _REASONS:
        page.sample("vllm:request_success_created", started_at_s, finished_reason=reason)


def _rejections(page: Page, settings: EngineSettings, load: LoadSnapshot, started_at_s: float) -> None:
    text = "Number of admission attempts rejected by a queue limit, by reason."
    own = Page(model_name=settings.model)  # these have no engine label
    own.family("vllm:admission_rejections_total", "counter", text)
    own.sample("vllm:admission_rejections_total", load.rejected, reason="max_num_queued_reqs")
    own.sample("vllm:admission_rejections_total", 0, reason="max_num_queued_tokens")
    own.family("vllm:admission_rejections_created", "gauge", text)
    for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
        own.sample("vllm:admission_rejections_created", started_at_s, reason=reason)
    page.append(own)


def _cache_config(page: Page, settings: EngineSettings) -> None:
    name = "vllm:cache_config_info"
    page.family(name, "gauge", "Information of the LLMEngine CacheConfig")
    own = Page(engine="0")  # and this no model
    own.sample(
        name,
        1,
        block_size=str(_BLOCK_TOKENS),
        cache_dtype="auto",
        enable_prefix_caching="False",
        gpu_memory_utilization="0.92",
        kv_cache_max_concurrency=str(settings.kv_tokens / settings.max_model_len),
        kv_cache_size_tokens=str(settings.kv_tokens),
        num_cpu_blocks="None",
        num_gpu_blocks=str(settings.kv_tokens // _BLOCK_TOKENS),
        num_gpu_blocks_override="None",
        sliding_window="None",
    )
    page.append(own)
