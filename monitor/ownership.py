"""Which monitor watches which worker: rendezvous hashing over the live ones. Pure.

Who is live is known by heartbeats, which ``service`` sends and reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


def owner(worker_id: str, monitors: Iterable[str]) -> str | None:
    """The one of ``monitors`` that watches the worker; None when there is none.

    When a monitor comes or goes, only its own workers move. The order of ``monitors`` does not matter.
    """
    return max(monitors, key=lambda name: (_weight(name, worker_id), name), default=None)


def owned(worker_ids: Iterable[str], name: str, monitors: Iterable[str]) -> frozenset[str]:
    """The workers that monitor ``name`` watches; it counts itself as live."""
    live = {*monitors, name}
    return frozenset(worker for worker in worker_ids if owner(worker, live) == name)


def _weight(monitor: str, worker_id: str) -> bytes:
    return blake2b(f"{monitor}\0{worker_id}".encode(), digest_size=8).digest()
