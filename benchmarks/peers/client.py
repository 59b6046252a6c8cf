"""The client that peers are driven with: a batch file in, a results file out, a window of requests in flight.

What a person writes in an hour: aiohttp, so many tasks, one list. Each *place* of the window sends to one
URL: to a router from all places, or to the engines themselves, each from as many places as it has slots. Run
as a program of its own, so that its CPU time is its own. Nothing of Forebay is used.

    python -m benchmarks.peers.client IN OUT --to URL=PLACES [--to URL=PLACES ...] [--retries 4]

Prints when it began and ended (Unix time), and its CPU seconds and peak memory, as one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Final

import aiohttp
import msgspec

BASE_S: Final = 0.5
CAP_S: Final = 30.0
"""Longest waits before a second try, and before any."""
_HEADERS = {"content-type": "application/json"}


class _Line(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw


@dataclass(slots=True)
class Work:
    """One request: how often it was tried, and when first."""

    custom_id: str
    path: str
    body: bytes
    tries: int = 0
    began_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """What the client tells of itself. Times are Unix times."""

    began_s: float
    ended_s: float
    cpu_s: float
    rss_mib: float


def read(path: Path) -> list[Work]:
    """The requests of a batch file, in its order."""
    decoder = msgspec.json.Decoder(_Line)
    with path.open("rb") as file:
        lines = [decoder.decode(raw) for raw in file]
    return [Work(line.custom_id, line.url, bytes(line.body)) for line in lines]


def worth_retrying(status: int | None) -> bool:
    """Whether a client that retries does so. None: there was no answer."""
    return status is None or status in (408, 429) or status >= 500


class Client:
    """Sends every request and writes what came back."""

    def __init__(self, session: aiohttp.ClientSession, out: BinaryIO, *, retries: int, seed: int) -> None:
        self._session = session
        self._out = out
        self._retries = retries
        self._random = random.Random(seed)
        self._todo: asyncio.Queue[Work] = asyncio.Queue()

    async def run(self, work: list[Work], places: list[str]) -> None:
        """Return once every request has its result.

        ``places`` names a URL for each request in flight; the first requests go to the first places.
        """
        for each in work:
            self._todo.put_nowait(each)
        central = len(set(places)) > 1
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._serve(url, central=central)) for url in places]
            await self._todo.join()
            for task in tasks:
                task.cancel()

    async def _serve(self, url: str, *, central: bool) -> None:
        failures = 0
        while True:
            one = await self._todo.get()
            status, told = await self._try(url, one)
            while not central and self._again(one, status):
                await asyncio.sleep(self._pause_s(one.tries - 1))
                status, told = await self._try(url, one)
            if self._again(one, status):  # another place may have an engine that works
                failures += 1
                self._todo.put_nowait(one)
                self._todo.task_done()
                await asyncio.sleep(self._pause_s(failures - 1))
                continue
            failures = 0
            self._write(one, status, told)
            self._todo.task_done()

    def _again(self, one: Work, status: int | None) -> bool:
        return worth_retrying(status) and one.tries <= self._retries

    def _pause_s(self, failures: int) -> float:
        return self._random.uniform(0, min(CAP_S, BASE_S * 2**failures))

    async def _try(self, url: str, one: Work) -> tuple[int | None, bytes]:
        """Status and body; no status and the error's name when there was no answer."""
        one.began_s = one.began_s or time.monotonic()
        one.tries += 1
        try:
            async with self._session.post(url + one.path, data=one.body, headers=_HEADERS) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return None, type(error).__name__.encode()

    def _write(self, one: Work, status: int | None, told: bytes) -> None:
        response = None if status is None else {"status_code": status, "body": _body(told)}
        result = {
            "custom_id": one.custom_id,
            "response": response,
            "error": told.decode() if status is None else None,
            "tries": one.tries,
            "latency_s": time.monotonic() - one.began_s,
        }
        self._out.write(msgspec.json.encode(result) + b"\n")


def _body(raw: bytes) -> msgspec.Raw | str:
    """The body as it came when it looks like JSON, else as text: some answer errors in words."""
    text = raw.strip()
    if text[:1] == b"{" and text[-1:] == b"}":
        return msgspec.Raw(text)
    return raw.decode(errors="replace")


async def send(source: Path, target: Path, places: list[str], *, retries: int, timeout_s: float) -> Report:
    """Run the whole file."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    work = read(source)
    with target.open("wb") as out:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            began_s = time.time()
            await Client(session, out, retries=retries, seed=len(work)).run(work, places)
        out.flush()
        ended_s = time.time()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return Report(began_s, ended_s, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def target(text: str) -> tuple[str, int]:
    """``URL=PLACES``."""
    url, _, places = text.rpartition("=")
    return url, int(places)


def main() -> None:
    parser = argparse.ArgumentParser(description="Send a batch file with so many requests in flight.")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--to", type=target, action="append", required=True, metavar="URL=PLACES")
    parser.add_argument("--retries", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    told = parser.parse_args()
    places = [url for url, places in told.to for _ in range(places)]
    sending = send(told.source, told.target, places, retries=told.retries, timeout_s=told.timeout_s)
    report = asyncio.run(sending)
    sys.stdout.write(msgspec.json.encode(asdict(report)).decode() + "\n")


if __name__ == "__main__":
    main()
