"""The fleet as metrics: what is too old is unknown, and what is unknown is absent."""

from __future__ import annotations

import asyncio

import pytest

from monitor import exporter
from monitor.exporter import Exporter, FleetCollector, own_registry
from tests.monitored import make_load, make_view
from workers.fleet import FleetView


def exported(now_s: float) -> dict[str, float]:
    worker = make_view(load=make_load(running=3, kv_usage_max=None, sampled_at=1000.0))
    collector = FleetCollector(FleetView(now_s, 1, (worker,)), {}, dead_after_s=10.0)
    return {sample.name: sample.value for family in collector.collect() for sample in family.samples}


def test_a_fresh_load_is_exported_without_what_it_does_not_say() -> None:
    found = exported(1004.0)
    assert (found["forebay_worker_running"], found["forebay_worker_load_age_seconds"]) == (3, 4.0)
    assert "forebay_worker_kv_usage" not in found


def test_of_a_dead_load_only_its_age_is_told() -> None:
    found = exported(1011.0)
    assert found["forebay_worker_load_age_seconds"] == 11.0
    assert "forebay_worker_running" not in found
    assert found["forebay_worker_limit"] == 16


class Silent:
    """A Redis that took the question and says nothing."""

    async def view(self):
        await asyncio.Event().wait()


async def test_a_redis_that_says_nothing_is_told_before_the_scrape_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter, "_PATIENCE_S", 0.01)
    page = await Exporter(Silent(), own_registry(), lambda: True).page()
    assert b"\nforebay_redis_up 0.0\n" in page
    assert b"forebay_worker_" not in page
