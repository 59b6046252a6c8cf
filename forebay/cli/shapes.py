"""The JSON that commands print about workers: the fleet's records in the shape that scripts rely on."""

from __future__ import annotations

from typing import Any

from workers.fleet import WorkerView
from workers.load import Load
from workers.store import Memo


def worker(view: WorkerView, memo: Memo | None) -> dict[str, Any]:
    """One worker. What it has not said is null; times are seconds since 1970."""
    return {
        "id": view.id,
        "url": view.url,
        "runtime": view.runtime,
        "state": view.state,
        "reason": view.reason,
        "since": view.since,
        "incarnation": view.incarnation,
        "models": sorted(view.models),
        "max_model_len": view.max_model_len,
        "version": view.version,
        "weight": view.weight,
        "api_key_env": view.api_key_env,
        "api_key_file": view.api_key_file,
        "origin": view.origin or None,
        "load": load(view.load),
        "limit": view.limit,
        "limit_reason": view.limit_reason,
        "limit_since": view.limit_since,
        "leases": view.leases,
        "deferred_until": view.deferred_until or None,
        "drain_until": view.drain_until,
        "breaker": {
            "state": view.breaker,
            "trips": view.breaker_trips,
            "open_until": view.breaker_open_until or None,
            "reason": view.breaker_reason,
        },
        "memo": None if memo is None else {"reason": memo.reason, "until": memo.until},
    }


def load(found: Load | None) -> dict[str, Any] | None:
    """A load, with null for what the worker did not say; None when none was ever read."""
    return None if found is None else found.model_dump(mode="json")
