"""Interactive traffic beside a batch: requests that come when they come, each to an engine by its capacity.

An open loop: Poisson arrivals, so that a slow answer holds up no later question. It goes to the engines
themselves, past every router, so that all batches meet the same traffic. Run as a program of its own, until
SIGTERM; then it prints when each answered request began (Unix time) and how long it took, as a line of JSON.

    python -m benchmarks.peers.interactive --tokens-per-s 8800 --to URL=CAPACITY [--to URL=CAPACITY ...]
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import signal
import sys
import time

import aiohttp
import msgspec

MEDIAN = 128.0
SIGMA = 0.8
MOST = 1024
"""Of the answers' lognormal lengths, in tokens."""
LAST_WORDS_S = 30.0
"""How long it waits, once told to stop, for answers to what was asked before."""


def arrivals_per_s(tokens_per_s: float) -> float:
    """How many such answers make so many tokens a second (the ceiling's cut is neglected)."""
    return tokens_per_s / (MEDIAN * math.exp(SIGMA**2 / 2))


class Traffic:
    """What is asked, and what was answered: (beginning, seconds) pairs, and how many questions failed."""

    def __init__(self, session: aiohttp.ClientSession, engines: list[tuple[str, float]], seed: int) -> None:
        self._session = session
        self._urls = [url for url, _ in engines]
        self._weights = [weight for _, weight in engines]
        self._random = random.Random(seed)
        self.answered: list[tuple[float, float]] = []
        self.failed = 0

    async def ask_until(self, stop: asyncio.Event, rate: float) -> None:
        """Ask at that mean rate until told to stop, then wait for what was asked."""
        open_: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        next_s = loop.time()
        while not stop.is_set():
            next_s += self._random.expovariate(rate)
            await asyncio.sleep(max(0.0, next_s - loop.time()))
            task = asyncio.create_task(self._ask())
            open_.add(task)
            task.add_done_callback(open_.discard)
        if open_:
            _, late = await asyncio.wait(open_, timeout=LAST_WORDS_S)
            for task in late:
                task.cancel()
            self.failed += len(late)

    async def _ask(self) -> None:
        tokens = max(1, min(MOST, round(MEDIAN * self._random.lognormvariate(0, SIGMA))))
        url = self._random.choices(self._urls, self._weights)[0]
        question = {"role": "user", "content": f"interactive question {self._random.random()}"}
        body = {"messages": [question], "max_tokens": tokens, "ignore_eos": True}
        began_s, clock_s = time.time(), time.monotonic()
        try:
            async with self._session.post(url + "/v1/chat/completions", json=body) as answer:
                await answer.read()
                answer.raise_for_status()
        except (aiohttp.ClientError, TimeoutError, OSError):
            self.failed += 1
        else:
            self.answered.append((began_s, time.monotonic() - clock_s))


async def run(engines: list[tuple[str, float]], tokens_per_s: float, seed: int) -> Traffic:
    """Traffic until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        traffic = Traffic(session, engines, seed)
        await traffic.ask_until(stop, arrivals_per_s(tokens_per_s))
    return traffic


def _engine(text: str) -> tuple[str, float]:
    url, _, capacity = text.rpartition("=")
    return url, float(capacity)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask engines until SIGTERM.")
    parser.add_argument("--to", type=_engine, action="append", required=True, metavar="URL=CAPACITY")
    parser.add_argument("--tokens-per-s", type=float, required=True)
    parser.add_argument("--seed", type=int, default=1)
    told = parser.parse_args()
    traffic = asyncio.run(run(told.to, told.tokens_per_s, told.seed))
    report = {"answered": traffic.answered, "failed": traffic.failed}
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


if __name__ == "__main__":
    main()
