"""A dispatcher's metrics. Attempts are counted as they end; what stands now is read when it is scraped.

How the page is served is `server`'s subject.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dispatcher.attempts import Seen
from dispatcher.placement import Placement
from dispatcher.survey import Survey

_LATENCY_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Exporter(Collector):
    """One dispatcher's numbers in a registry of their own."""

    def __init__(self, placement: Placement, survey: Callable[[], Survey | None]) -> None:
        """`survey` looks at queues and batches, in the thread of a scrape; None: nobody knows now."""
        self._placement = placement
        self._survey = survey
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
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
        self._outcomes: dict[str, set[str]] = {}
        """What stands on the page, by worker."""
        self._missed: set[str] = set()
        """Workers on the page that were gone at the last scrape."""
        self.registry.register(self)

    def saw(self, seen: Seen) -> None:
        """Count an attempt that ended."""
        worker = seen.held.worker_id
        outcome = seen.outcome.label.value
        self._outcomes.setdefault(worker, set()).add(outcome)
        self._attempts.labels(worker, outcome).inc()
        if seen.elapsed_s:
            self._latency.labels(worker).observe(seen.elapsed_s)

    def collect(self) -> Iterable[Metric]:
        """What stands now."""
        self._drop_the_gone()
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
        if (seen := self._survey()) is not None:
            yield from _of_survey(seen)

    def _drop_the_gone(self) -> None:
        """Take workers off the page that two scrapes in a row found gone: addresses may be new every day."""
        gone = self._outcomes.keys() - self._placement.workers
        for worker in gone & self._missed:
            for outcome in self._outcomes.pop(worker):
                self._attempts.remove(worker, outcome)
            self._latency.remove(worker)
        self._missed = gone


def _of_survey(seen: Survey) -> Iterable[Metric]:
    yield _gauges("forebay_queue_jobs", "Jobs that wait in the queue.", "queue", seen.jobs)
    yield _gauges("forebay_batches", "Batches that have not ended.", "status", seen.batches)
    yield _gauge("forebay_batch_lines_left", "Lines of those batches without a result.", seen.lines_left)
    yield _gauge(
        "forebay_batches_in_trouble", "Those of them whose files cannot be used now.", seen.in_trouble
    )


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=[label])
    for value_of, value in values.items():
        family.add_metric([value_of], value)
    return family
