"""The fleet as Prometheus metrics, and the monitor's own health: ``/metrics``, ``/healthz``, ``/readyz``.

The truth is read from Redis at every scrape; nothing is kept here. What is unknown has no sample: 0 would be
a claim. How the page is served belongs to ``server``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from workers.breaker import BreakerState
from workers.errors import StoreUnavailable

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from workers.fleet import FleetView, WorkerView
    from workers.store import FleetStore, Memo

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

_PATIENCE_S = 2.0
"""With a Redis that says nothing: whoever scrapes waits for ten seconds."""
_POLL_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

_AGE = "forebay_worker_load_age_seconds"
_GAUGES: Mapping[str, tuple[str, Callable[[WorkerView, float], float | None]]] = {
    "forebay_worker_running": (
        "Requests the worker runs, by its own word.",
        lambda view, _now: view.load.running if view.load else None,
    ),
    "forebay_worker_waiting": (
        "Requests that wait inside the worker.",
        lambda view, _now: view.load.waiting if view.load else None,
    ),
    "forebay_worker_kv_usage": (
        "KV cache in use on the fullest rank, 0 to 1.",
        lambda view, _now: view.load.kv_usage_max if view.load else None,
    ),
    "forebay_worker_drain_rate": (
        "Requests finished per second over the last window.",
        lambda view, _now: view.load.drain_rate if view.load else None,
    ),
    "forebay_worker_token_rate": (
        "Tokens generated per second over the last window.",
        lambda view, _now: view.load.token_rate if view.load else None,
    ),
    "forebay_worker_capacity_rate": (
        "Highest sustained token rate lately, per second.",
        lambda view, _now: view.load.capacity_rate if view.load else None,
    ),
    _AGE: (
        "Age of the sample that the load was read from.",
        lambda view, now: max(0.0, now - view.load.sampled_at) if view.load else None,
    ),
    "forebay_worker_limit": (
        "Leases that the worker may have.",
        lambda view, _now: view.limit,
    ),
    "forebay_worker_leases": (
        "Leases that the worker has.",
        lambda view, _now: view.leases,
    ),
}


class FleetCollector(Collector):
    """One look at the fleet as metrics. ``view`` None: Redis did not answer.

    A load older than ``dead_after_s`` is unknown; only its age is still told.
    """

    def __init__(
        self, view: FleetView | None, memos: Mapping[str, Memo], *, dead_after_s: float = math.inf
    ) -> None:
        self._view = view
        self._memos = memos
        self._dead_after_s = dead_after_s

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("forebay_redis_up", "1 when Redis answered this scrape.")
        up.add_metric([], float(self._view is not None))
        yield up
        if self._view is not None:
            yield from self._gauges(self._view)
            yield self._breakers(self._view)
            yield self._info(self._view)

    def _gauges(self, view: FleetView) -> Iterable[Metric]:
        for name, (documentation, read) in _GAUGES.items():
            family = GaugeMetricFamily(name, documentation, labels=["worker"])
            for worker in view.workers:
                known = worker if name == _AGE else self._without_dead_load(worker, view.now_s)
                value = read(known, view.now_s)
                if value is not None:
                    family.add_metric([worker.id], value)
            yield family

    def _without_dead_load(self, worker: WorkerView, now_s: float) -> WorkerView:
        if worker.load is None or now_s - worker.load.sampled_at <= self._dead_after_s:
            return worker
        return replace(worker, load=None)

    def _breakers(self, view: FleetView) -> Metric:
        family = GaugeMetricFamily(
            "forebay_worker_breaker_state", "1 for the state the breaker is in.", labels=["worker", "state"]
        )
        for worker in view.workers:
            for state in BreakerState:
                family.add_metric([worker.id, state.value], float(worker.breaker is state))
        return family

    def _info(self, view: FleetView) -> Metric:
        family = InfoMetricFamily("forebay_worker", "What is known of the worker.", labels=["worker"])
        for worker in view.workers:
            memo = self._memos.get(worker.id)
            family.add_metric(
                [worker.id],
                {
                    "state": worker.state.value,
                    "runtime": worker.runtime.value if worker.runtime else "",
                    "source": worker.load.source.value if worker.load else "none",
                    "memo": memo.reason if memo and memo.incarnation == worker.incarnation else "",
                    "incarnation": str(worker.incarnation),
                },
            )
        return family


def own_registry() -> CollectorRegistry:
    """A registry for a monitor's own figures, with those of its process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


class PollTimes:
    """How long polls take, by where the load came from."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "forebay_monitor_poll_duration_seconds",
            "Time of one poll of one worker.",
            ["source"],
            registry=registry,
            buckets=_POLL_BUCKETS,
        )

    def observe(self, source: str, seconds: float) -> None:
        """One poll took so long; ``source`` is the load's: native, metrics, or none."""
        self._seconds.labels(source).observe(seconds)


class Exporter:
    """The ASGI application. ``ready`` says whether the service has a fresh look at the fleet."""

    def __init__(
        self,
        store: FleetStore,
        registry: CollectorRegistry,
        ready: Callable[[], bool],
        *,
        dead_after_s: float = math.inf,
    ) -> None:
        self._store = store
        self._registry = registry
        self._ready = ready
        self._dead_after_s = dead_after_s

    async def __call__(self, scope: MutableMapping[str, Any], _receive: Receive, send: Send) -> None:
        """Answer one HTTP request."""
        match scope.get("path"):
            case "/metrics":
                await _answer(send, 200, await self.page(), CONTENT_TYPE_LATEST)
            case "/healthz":
                await _answer(send, 200, b"ok\n")
            case "/readyz" if self._ready():
                await _answer(send, 200, b"ready\n")
            case "/readyz":
                await _answer(send, 503, b"no fresh look at the fleet\n")
            case _:
                await _answer(send, 404, b"not found\n")

    async def page(self) -> bytes:
        """The metrics page: the monitor's own figures, then the fleet as it is now."""
        fleet = CollectorRegistry()
        fleet.register(await self._look())
        return generate_latest(self._registry) + generate_latest(fleet)

    async def _look(self) -> FleetCollector:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                view = await self._store.view()
                memos = await self._store.memos([worker.id for worker in view.workers])
        except (StoreUnavailable, TimeoutError):
            return FleetCollector(None, {})
        return FleetCollector(view, memos, dead_after_s=self._dead_after_s)


async def _answer(
    send: Send, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8"
) -> None:
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
