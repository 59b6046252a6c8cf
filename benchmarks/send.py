"""CPU time of one attempt through the sender, with pyreqwest alone for comparison: python
benchmarks/send.py [--json].

256 in flight, bodies of 1.6 KB each way, against a server in a process of its own that answers after 20
ms. The candidates alternate; times are this process' user and system time per request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import httpx
import uvloop
from pyreqwest.client import ClientBuilder
from pyreqwest.compatibility.httpx import HttpxTransport

from dispatcher.reply import Reply
from dispatcher.send import Sender, make_transport

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

IN_FLIGHT = 256
REQUESTS = 6_000
ROUNDS = 4
BODY = json.dumps({"model": "llama", "messages": [{"role": "user", "content": "a" * 1_540}]}).encode()
ANSWER = json.dumps({"choices": [{"message": {"role": "assistant", "content": "b" * 1_540}}]}).encode()
PATH = "/v1/chat/completions"


class Instant(asyncio.Protocol):
    """A server that answers every request alike, 20 ms later."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, not the class
        self.received = b""

    def data_received(self, data: bytes) -> None:
        self.received += data
        while (end := self.received.find(b"\r\n\r\n")) >= 0:
            head = self.received[:end].lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            if len(self.received) < end + 4 + length:
                return
            self.received = self.received[end + 4 + length :]
            asyncio.get_running_loop().call_later(0.02, self.answer)

    def answer(self) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(
            ANSWER
        )
        self.transport.write(head + ANSWER)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Instant, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def spend(once: Callable[[], Awaitable[None]]) -> tuple[float, float]:
    """Microseconds of CPU per request, and requests per second."""
    left = REQUESTS

    async def lane() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await once()

    used, began = cpu_s(), time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))
    return (cpu_s() - used) / REQUESTS * 1e6, REQUESTS / (time.perf_counter() - began)


async def compare(url: str) -> dict[str, list[tuple[float, float]]]:
    client = ClientBuilder().follow_redirects(False).no_proxy().http1_only().build()
    senders = {
        "sender, our wire": Sender(make_transport()),
        "sender, httpx over pyreqwest": Sender(HttpxTransport(client, close_client=False)),
    }

    def through(sender: Sender) -> Callable[[], Awaitable[None]]:
        async def once() -> None:
            answer = await sender.send(url, PATH, BODY, api_key="k", timeout_s=60, request_id="request-1")
            assert isinstance(answer, Reply)
            assert answer.status == httpx.codes.OK

        return once

    async def alone() -> None:
        request = client.post(url + PATH).header("content-type", "application/json").body_bytes(BODY)
        bytes(await (await request.build().send()).bytes())

    candidates = {name: through(sender) for name, sender in senders.items()} | {"pyreqwest alone": alone}
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    for _ in range(ROUNDS):
        for name, once in candidates.items():
            rows[name].append(await spend(once))
    for sender in senders.values():
        await sender.aclose()
    await client.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        uvloop.run(serve())
        return
    server = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        seen = {
            loop: runner(compare(url)) for loop, runner in (("asyncio", asyncio.run), ("uvloop", uvloop.run))
        }
    finally:
        server.terminate()
        server.wait()
    rows: list[dict[str, Any]] = [
        {
            "loop": loop,
            "client": name,
            "cpu_us": round(statistics.median(cost for cost, _ in values)),
            "cpu_us_range": [round(min(values)[0]), round(max(values)[0])],
            "per_second": round(statistics.median(rate for _, rate in values)),
        }
        for loop, clients in seen.items()
        for name, values in clients.items()
    ]
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    print("{:<8} {:<30} {:>8} {:>12} {:>11}".format("loop", "client", "CPU us", "range", "requests/s"))
    for row in rows:
        spread = "-".join(str(cost) for cost in row["cpu_us_range"])
        print(f"{row['loop']:<8} {row['client']:<30} {row['cpu_us']:>8} {spread:>12} {row['per_second']:>11}")


if __name__ == "__main__":
    main()
