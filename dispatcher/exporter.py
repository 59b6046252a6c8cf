"""A dispatcher's metrics. Attempts are counted as they end; what stands now is read when it is scraped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dispatcher.attempts import Seen
from dispatcher.placement import Placement

_LATENCY_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Exporter(Collector):
    """One dispatcher's numbers in a registry of their own."""

    def __init__(self, name: str, placement: Placement) -> None:
        self._name = name
        self._placement = placement
        self.registry = CollectorRegistry()
        self._attempts = Counter(
            "forebay_attempts", "Attempts by how they ended.", ["worker", "outcome"], registry=self.registry
        )
        self._latency = Histogram(
            "forebay_attempt_seconds",
            "Time from sending a request to its whole reply.",
            ["worker"],
            buckets=_LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.registry.register(self)

    def saw(self, seen: Seen) -> None:
        """Count an attempt that ended."""
        worker = seen.held.worker_id
        self._attempts.labels(worker, seen.outcome.label.value).inc()
        if seen.elapsed_s:
            self._latency.labels(worker).observe(seen.elapsed_s)

    def collect(self) -> Iterable[Metric]:
        """What stands now."""
        yield _gauge(
            "forebay_dispatcher_in_flight", "Leases that this dispatcher holds.", self._placement.in_flight
        )
        yield _gauge(
            "forebay_dispatcher_waiting", "Requests that wait here for a lease.", self._placement.waiting
        )
        yield _gauge(
            "forebay_dispatcher_without_worker",
            "1 while somebody waits for whom there is no worker, however idle.",
            int(self._placement.without_worker is not None),
        )

        yield CounterMetricFamily(
            "forebay_second_attempts",
            "Second attempts begun for requests on slow workers.",
            value=self._placement.hedging.made,
        )

    @contextlib.contextmanager
    def serving(self, port: int | None, host: str) -> Iterator[int | None]:
        """Serve the page at `/metrics` and give the port, 0 being any free one; None: do not."""
        if port is None:
            yield None
            return
        server, thread = start_http_server(port, host, registry=self.registry)
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)
