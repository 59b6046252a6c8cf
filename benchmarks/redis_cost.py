"""What batches cost their Redis: commands, memory while they wait.

Belongs here: how these are counted, and nothing of the fleet that causes them (`bench_fleet`).
"""

from __future__ import annotations

import contextlib
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from dispatcher.batches.ledger import Ledger
from dispatcher.batches.storage import Storage
from forebay.embedded import EmbeddedServer
from forebay.submission import Options, prepare, publish
from workers.connection import AsyncRedis, connect, connect_sync

_END = "the end of what is counted"


async def over_tcp(client: AsyncRedis) -> str:
    """Let the server listen on TCP too, and give the URL: whoever comes that way can be told from others."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    await client.config_set("port", port)
    return f"redis://127.0.0.1:{port}"


@contextlib.contextmanager
def counted(url: str) -> Iterator[Counter[str]]:
    """Commands that come over TCP while the block runs, by name; complete when it has ended.

    A script is one command: `INFO commandstats`, and the counts of `CLIENT LIST`, have what it does inside as
    well. `MONITOR` tells the difference, and who sent what; it slows the server down, so take no times.
    """
    commands: Counter[str] = Counter()
    listening = threading.Event()

    def listen() -> None:
        with connect_sync(url) as client, client.monitor() as monitor:
            listening.set()
            for seen in monitor.listen():
                if _END in seen["command"]:
                    return
                if seen["client_type"] == "tcp":
                    commands[seen["command"].split(" ", 1)[0].lower()] += 1

    listener = threading.Thread(target=listen)
    listener.start()
    listening.wait()
    try:
        yield commands
    finally:
        with connect_sync(url) as client:
            client.echo(_END)
        listener.join()


async def queued_bytes(batch: Path) -> int:
    """Bytes that Redis needs more for a batch that is queued, and that no dispatcher has taken up."""
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as name:
        server = EmbeddedServer(Path(name, "valkey.log"))
        client, rq_redis = connect(server.url), connect_sync(server.url)
        try:
            storage, ledger = Storage(str(Path(name, "storage"))), Ledger(client)
            used = []
            for _ in range(2):  # the first one loads scripts and fills what grows in steps
                before = await _used(client)
                with batch.open("rb") as source:
                    record = prepare(storage, source, name="b", options=Options(), now_s=time.time())
                await publish(ledger, rq_redis, storage.files(record.id))
                used.append(await _used(client) - before)
            return used[-1]
        finally:
            await client.aclose()
            rq_redis.close()
            server.close()


async def _used(client: AsyncRedis) -> int:
    return int((await client.info("memory"))["used_memory"])
