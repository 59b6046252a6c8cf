"""Requests a second that one simulated engine answers, and what each costs of its core.

Belongs here: a load generator that is nothing but sockets, so that the engine is the limit, and the figures.
The engine runs in a process of its own, with zero service time.

    python benchmarks/simulator.py [--requests 20000] [--connections 32] [--runtime vllm] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import cast

import msgspec
import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from forebay.simulator.process import start_engine
from forebay.simulator.settings import EngineSettings

_PROMPT_CHARS = 1600
_ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Figures:
    """``engine_us`` is CPU time of the engine's process for each request, in microseconds."""

    runtime: str
    requests: int
    connections: int
    elapsed_s: float
    requests_per_s: float
    engine_us: float


class _Client(asyncio.Protocol):
    """One connection that sends its next request as soon as the last one is answered."""

    def __init__(self, request: bytes, share: int, done: asyncio.Future[None]) -> None:
        self._request = request
        self._left = share
        self._done = done
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found or len(body) < _content_length(head):
            return
        if not head.startswith(b"HTTP/1.1 200"):
            self._done.set_exception(RuntimeError(head.decode()))
            return
        self._buffer = b""
        self._left -= 1
        if self._left:
            self._transport.write(self._request)
        else:
            self._transport.close()
            self._done.set_result(None)


def _content_length(head: bytes) -> int:
    _, _, rest = head.partition(b"content-length: ")
    return int(rest.partition(b"\r\n")[0])


def _request() -> bytes:
    message = {"role": "user", "content": "x" * _PROMPT_CHARS}
    body = msgspec.json.encode({"messages": [message], "max_tokens": _ANSWER_TOKENS})
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: engine\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _load(port: int, requests: int, connections: int) -> float:
    """Send them all; returns the seconds it took."""
    loop = asyncio.get_running_loop()
    request = _request()
    shares = [requests // connections + (index < requests % connections) for index in range(connections)]
    ends = [loop.create_future() for share in shares if share]
    started_s = time.perf_counter()
    for share, end in zip(shares, ends, strict=False):
        await loop.create_connection(partial(_Client, request, share, end), "127.0.0.1", port)
    await asyncio.gather(*ends)
    return time.perf_counter() - started_s


def measure(runtime: str, requests: int, connections: int) -> Figures:
    """One run against a fresh engine, after a short one that warms it."""
    settings = EngineSettings.model_validate({"runtime": runtime, "instant": True, "slots": 256})
    with start_engine(settings) as engine, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        port = int(engine.url.rpartition(":")[2])
        runner.run(_load(port, connections * 10, connections))
        process = psutil.Process(engine.pid)
        before = process.cpu_times()
        elapsed_s = runner.run(_load(port, requests, connections))
        after = process.cpu_times()
    cpu_s = after.user + after.system - before.user - before.system
    return Figures(runtime, requests, connections, elapsed_s, requests / elapsed_s, cpu_s / requests * 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description="Requests/s of one simulated engine with zero service time.")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--runtime", choices=("vllm", "sglang"), action="append")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = [
        measure(runtime, options.requests, options.connections)
        for runtime in options.runtime or ("vllm", "sglang")
    ]
    if options.json:
        print(msgspec.json.encode([asdict(each) for each in figures]).decode())
    else:
        Console().print(_table(figures))


def _table(figures: list[Figures]) -> Table:
    table = Table(title="simulated engine, zero service time")
    for heading in ("runtime", "requests", "connections", "requests/s", "engine CPU, us/request"):
        table.add_column(heading, justify="right")
    for each in figures:
        table.add_row(
            each.runtime,
            f"{each.requests:,}",
            str(each.connections),
            f"{each.requests_per_s:,.0f}",
            f"{each.engine_us:.0f}",
        )
    return table


if __name__ == "__main__":
    main()
