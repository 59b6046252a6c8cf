"""The prefix cache of a simulated engine."""

from __future__ import annotations

import asyncio

import httpx

from forebay.simulator.prefixes import BLOCK_TOKENS, PrefixCache
from forebay.simulator.server import SimulatedEngine
from forebay.simulator.settings import EngineSettings

BLOCK = BLOCK_TOKENS * 4


def text(blocks: int, letter: str = "a") -> bytes:
    return letter.encode() * (BLOCK * blocks)


def test_a_prompt_is_known_the_second_time_but_for_its_last_block():
    cache = PrefixCache(tokens=4096)
    assert cache.read(text(10)) == 0
    assert cache.read(text(10)) == 9 * BLOCK_TOKENS
    assert cache.read(text(10) + b"more") == 9 * BLOCK_TOKENS


def test_prompts_share_what_they_begin_with_and_nothing_after_the_first_difference():
    cache = PrefixCache(tokens=4096)
    cache.read(text(4) + text(4, "b"))
    assert cache.read(text(4) + text(1, "c") + text(4, "b")) == 4 * BLOCK_TOKENS
    assert cache.read(text(1, "c") + text(4)) == 0


def test_what_was_used_least_lately_is_forgotten_first():
    cache = PrefixCache(tokens=8 * BLOCK_TOKENS)
    cache.read(text(5, "a"))
    cache.read(text(5, "b"))
    cache.read(text(5, "a"))
    cache.read(text(5, "c"))
    assert cache.read(text(5, "a")) == 4 * BLOCK_TOKENS
    assert cache.read(text(5, "b")) == 0


def test_of_a_prompt_larger_than_the_cache_the_beginning_stays():
    cache = PrefixCache(tokens=4 * BLOCK_TOKENS)
    cache.read(text(10))
    assert cache.read(text(10)) == 4 * BLOCK_TOKENS
    assert cache.read(text(2)) == BLOCK_TOKENS


async def test_an_engine_that_caches_prefixes_reads_a_shared_beginning_once():
    settings = EngineSettings(instant=True, prefix_caching=True)
    async with SimulatedEngine(settings) as engine, httpx.AsyncClient(base_url=engine.url) as client:
        for question in ("one", "two"):
            prompt = "the same beginning. " * 80 + question
            answer = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
            assert answer.json()["usage"]["prompt_tokens"] == 401
        assert 401 < engine.load().prompt_tokens_total < 401 + 2 * BLOCK_TOKENS


async def test_an_engine_without_a_prefix_cache_reads_everything_again():
    async with (
        SimulatedEngine(EngineSettings(instant=True)) as engine,
        httpx.AsyncClient(base_url=engine.url) as client,
    ):
        body = {"prompt": "word " * 400, "max_tokens": 1}
        await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(2)))
        assert engine.load().prompt_tokens_total == 1000
