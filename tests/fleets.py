"""Workers, loads and views as tests want them: everything sensible unless a test says otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from workers.breaker import BreakerState
from workers.fleet import FleetView, WorkerState, WorkerView
from workers.load import Load, LoadSource

NOW_S = 1_000_000.0


def load(**known: Any) -> Load:
    """A load sampled half a second ago of which only ``known`` is known."""
    stamps = {"sampled_at": NOW_S - 0.5, "received_at": NOW_S - 0.4, "source": LoadSource.METRICS}
    return Load(**(stamps | known))


def idle_load(**known: Any) -> Load:
    """A load of a worker that does nothing, of which everything that scores is known."""
    facts = {
        "running": 0,
        "waiting": 0,
        "kv_usage_max": 0.0,
        "capacity_tokens": 100_000,
        "drain_rate": 1.0,
        "capacity_rate": 1_000.0,
    }
    return load(**(facts | known))


def worker(name: str = "a:1", **changes: Any) -> WorkerView:
    """A ready, idle worker that serves ``llama`` and has room for 16."""
    plain = WorkerView(
        id=name,
        url=f"http://{name}",
        runtime=None,
        state=WorkerState.READY,
        incarnation=1,
        models=frozenset({"llama"}),
        max_model_len=None,
        max_running=None,
        weight=1.0,
        api_key_env=None,
        version=None,
        load=idle_load(),
        limit=16,
        leases=0,
        leases_since_sample=0,
        tokens_since_sample=0,
        breaker=BreakerState.CLOSED,
        breaker_open_until=0.0,
        deferred_until=0.0,
    )
    return replace(plain, **changes)


def view(*workers: WorkerView, now_s: float = NOW_S) -> FleetView:
    return FleetView(now_s=now_s, generation=1, workers=workers)
