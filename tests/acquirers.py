"""A process that asks for many leases at once, for tests of what several processes may have together.

``python -m tests.acquirers REDIS_URL NAME COUNT WORKER`` prints how many were granted,
and how many of these as trials.
"""

from __future__ import annotations

import asyncio
import sys

from workers.connection import connect
from workers.leases import Ask, Grant, lease_id
from workers.store import FleetStore


async def acquire(url: str, name: str, count: int, worker: str) -> tuple[int, int]:
    client = connect(url)
    store = FleetStore(client)
    answers = await asyncio.gather(
        *(store.acquire([Ask(lease_id(name, number, 1), (worker,))]) for number in range(count))
    )
    await client.aclose()
    grants = [answer for (answer,) in answers if isinstance(answer, Grant)]
    return len(grants), sum(grant.trial for grant in grants)


if __name__ == "__main__":
    _, given_url, given_name, given_count, given_worker = sys.argv
    print(*asyncio.run(acquire(given_url, given_name, int(given_count), given_worker)))  # noqa: T201 - its answer
