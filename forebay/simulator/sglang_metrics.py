"""The metrics page of SGLang 0.5.23, as far as a reader of loads is concerned with it.

Belongs here: names, help texts, labels and order of the families, copied from a real page, including
neighbours that mislead a careless reader (``num_grammar_queue_reqs``, ``pending_prealloc_token_usage``,
``*_histogram``). Left out are most histograms and the families of features that the simulated engine has not.

The page goes out as prometheus_client's ASGI application sends it: chunked, compressed for whoever accepts
gzip, and, for whoever accepts OpenMetrics, with underscores where the names have colons.
"""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

from forebay.simulator.prometheus import Page
from forebay.simulator.reply import Reply

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forebay.simulator.load import LoadSnapshot
    from forebay.simulator.settings import EngineSettings

_TEXT = b"text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = b"application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores"
_TOKENS_BOUNDS = (100.0, 300.0, 500.0, 700.0, 1000.0, 1500.0, 2000.0, 3000.0, 4000.0, 5000.0, 6000.0)


def metrics_reply(settings: EngineSettings, load: LoadSnapshot, headers: Mapping[bytes, bytes]) -> Reply:
    """The page at the moment of ``load``, encoded as the request's headers (names in lower case) ask."""
    body, content_type = metrics_page(settings, load), _TEXT
    if b"application/openmetrics-text" in headers.get(b"accept", b""):
        body, content_type = body.replace(b"sglang:", b"sglang_") + b"# EOF\n", _OPENMETRICS
    if b"gzip" not in headers.get(b"accept-encoding", b""):
        return Reply(200, body, content_type, chunked=True)
    packed = gzip.compress(body, compresslevel=1, mtime=0)
    return Reply(200, packed, content_type, ((b"content-encoding", b"gzip"),), chunked=True)


def metrics_page(settings: EngineSettings, load: LoadSnapshot) -> bytes:
    """The page as text, names with colons."""
    ranked = Page(engine_type="unified", model_name=settings.model, moe_ep_rank="0", pp_rank="0", tp_rank="0")
    counted = Page(engine_type="unified", is_streaming="false", model_name=settings.model)
    lengths = Page(engine_type="unified", model_name=settings.model)
    _lengths(lengths, load)
    _capacity(ranked, settings, load)
    _batch(ranked, load)
    _cache(ranked, load)
    _counters(counted, load)
    lengths.append(ranked)
    lengths.append(counted)
    return lengths.text()


def _lengths(page: Page, load: LoadSnapshot) -> None:
    count = load.succeeded
    page.histogram(
        "sglang:prompt_tokens_histogram",
        "Histogram of prompt token length.",
        _TOKENS_BOUNDS,
        count,
        load.prompt_tokens_total,
    )
    page.histogram(
        "sglang:generation_tokens_histogram",
        "Histogram of generation token length.",
        _TOKENS_BOUNDS,
        count,
        load.generation_tokens_total,
    )


def _capacity(page: Page, settings: EngineSettings, load: LoadSnapshot) -> None:
    page.gauge(
        "sglang:max_total_num_tokens",
        "Maximum total number of tokens in the KV cache pool.",
        load.capacity_tokens,
    )
    page.gauge("sglang:page_size", "KV cache page size in tokens.", 1)
    page.gauge("sglang:context_len", "Maximum context length.", settings.max_model_len)


def _batch(page: Page, load: LoadSnapshot) -> None:
    page.gauge("sglang:num_running_reqs", "The number of running requests.", load.running)
    page.gauge("sglang:num_queue_reqs", "The number of requests in the waiting queue.", load.waiting)
    page.gauge("sglang:num_grammar_queue_reqs", "The number of requests in the grammar waiting queue.", 0)
    page.gauge("sglang:gen_throughput", "The generation throughput (token/s).", load.gen_tokens_per_s)
    page.gauge("sglang:cache_hit_rate", "The prefix cache hit rate.", 0.0)


def _cache(page: Page, load: LoadSnapshot) -> None:
    page.gauge("sglang:token_usage", "The token usage.", round(load.usage, 2))
    page.gauge("sglang:full_token_usage", "The token usage for full attention layers.", load.usage)
    page.gauge("sglang:swa_token_usage", "The token usage for SWA layers.", 0.0)
    page.gauge("sglang:num_used_tokens", "The number of used tokens.", load.used_tokens)
    page.gauge(
        "sglang:pending_prealloc_token_usage",
        "The token usage for pending preallocated tokens (not preallocated yet).",
        0.0,
    )


def _counters(page: Page, load: LoadSnapshot) -> None:
    for name, text, value in (
        ("prompt_tokens_total", "Number of prefill tokens processed.", load.prompt_tokens_total),
        ("generation_tokens_total", "Number of generation tokens processed.", load.generation_tokens_total),
        ("num_requests_total", "Number of requests processed.", load.succeeded),
    ):
        page.family(f"sglang:{name}", "counter", text)
        page.sample(f"sglang:{name}", value)
