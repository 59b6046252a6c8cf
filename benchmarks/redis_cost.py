"""What batches cost their Redis: commands, memory while they wait.

Belongs here: how these are counted, and nothing of the fleet that causes them (`bench_fleet`).
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from dispatcher.batches.ledger import Ledger
from dispatcher.batches.storage import Storage
from forebay.embedded import EmbeddedServer
from forebay.submission import Options, prepare, publish
from workers.connection import AsyncRedis, connect, connect_sync


def named(url: str, name: str) -> str:
    """The URL with which a client is known to the server by a name."""
    return f"{url}?client_name={name}"


async def commands_of(client: AsyncRedis, name: str) -> int:
    """Commands that the clients of that name have sent on the connections that they have now.

    Counted by connection, a script is one command; by `INFO commandstats`, what it does inside counts too,
    and who sent it is unknown. Needs Valkey 8.1 or newer.
    """
    return sum(int(one["tot-cmds"]) for one in await client.client_list() if one["name"] == name)


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
