"""Whether a router is ready: healthy, and answering, from a port of its own.

Belongs here: waiting for it before its clock starts. How it is started is ``routers``' subject.
"""

from __future__ import annotations

import asyncio
import socket
import time

import aiohttp
from bench_fleet import MODEL

from benchmarks.peers.environments import Unavailable

_READY_S = 120.0
_SETTLE_S = 2.0
_WARM_UPS = 4


async def read_away(process: asyncio.subprocess.Process) -> None:
    """A router that writes to a pipe which nobody reads would stand still."""
    assert process.stdout is not None, "its output is a pipe"
    while await process.stdout.read(2**16):
        pass


async def ready(process: asyncio.subprocess.Process, url: str, health: str) -> None:
    """Wait until it is healthy and has answered a few requests. Raises Unavailable."""
    question = {"model": MODEL, "messages": [{"role": "user", "content": "ready?"}], "max_tokens": 1}
    deadline = time.monotonic() + _READY_S
    answered = 0
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        while answered < _WARM_UPS:
            if process.returncode is not None:
                raise Unavailable(f"ended with status {process.returncode} before it answered")
            if time.monotonic() > deadline:
                raise Unavailable(f"did not answer within {_READY_S:g} s")
            answered += await _answers(session, url, health, question)
    await asyncio.sleep(_SETTLE_S)  # routers get to know their workers one by one and say so nowhere alike


async def _answers(session: aiohttp.ClientSession, url: str, health: str, question: object) -> bool:
    try:
        async with session.get(url + health) as healthy:
            await healthy.read()
        async with session.post(url + "/v1/chat/completions", json=question) as answer:
            await answer.read()
    except (aiohttp.ClientError, TimeoutError, OSError):
        await asyncio.sleep(0.1)
        return False
    if not (healthy.ok and answer.ok):
        await asyncio.sleep(0.1)
    return healthy.ok and answer.ok


def free_ports() -> tuple[int, int]:
    """Two that nobody listens on at this moment."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]
