"""A dispatcher's pages: what the metrics tell, where they are served, and what probes are answered."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest

from dispatcher.batches.record import FINAL
from dispatcher.exporter import Exporter
from dispatcher.server import LoopDoor, serving
from dispatcher.settings import DispatcherSettings
from dispatcher.survey import Survey, summed_up
from workers.errors import SettingsError, StoreUnavailable

SURVEY = Survey(jobs={"high": 0, "low": 7}, batches={"in_progress": 2}, lines_left=40, in_trouble=1)


def exporter(seen: Survey | None = SURVEY) -> Exporter:
    placement: Any = SimpleNamespace(
        in_flight=1, waiting=2, without_worker=None, hedging=SimpleNamespace(made=3), workers={"a:1"}
    )
    return Exporter(placement, lambda: seen)


def served(
    host: str = "127.0.0.1", port: int | None = 0, *, alive: bool = True, ready: bool = True, **kind: Any
):
    registry = exporter(**kind).registry
    return serving(registry, port, host, alive=lambda: alive, ready=lambda: ready)


def page(host: str, port: int | None, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=10) as response:
        return response.read().decode()


def refusal(port: int | None, path: str) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as refused:
        page("127.0.0.1", port, path)
    with refused.value as response:
        return response.code, response.read().decode()


def test_the_page_is_served_at_the_address_that_is_set_and_at_no_other():
    with served("127.0.0.2") as port:
        assert "forebay_second_attempts_total 3.0" in page("127.0.0.2", port)
        with pytest.raises(urllib.error.URLError, match="refused"):
            page("127.0.0.1", port)
    with pytest.raises(urllib.error.URLError, match="refused"):
        page("127.0.0.2", port)


def ended(worker: str, outcome: str = "ok") -> Any:
    return SimpleNamespace(
        held=SimpleNamespace(worker_id=worker),
        outcome=SimpleNamespace(label=SimpleNamespace(value=outcome)),
        elapsed_s=1.0,
    )


def test_a_worker_that_two_scrapes_found_gone_leaves_the_page():
    told = exporter()
    for worker, outcome in (("a:1", "ok"), ("gone:1", "ok"), ("gone:1", "busy")):
        told.saw(ended(worker, outcome))
    pages = [generate_latest(told.registry).decode() for _ in range(3)]
    assert ["gone:1" in text for text in pages] == [True, True, False]
    assert 'forebay_attempts_total{outcome="ok",worker="a:1"} 1.0' in pages[-1]
    told.saw(ended("gone:1"))
    assert (
        'forebay_attempts_total{outcome="ok",worker="gone:1"} 1.0' in generate_latest(told.registry).decode()
    )


def test_without_a_port_there_is_no_page():
    with served(port=None) as port:
        assert port is None


def test_a_port_that_somebody_has_is_said_to_be_taken():
    with (
        served() as port,
        pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port}"),
        served(port=port),
    ):
        raise AssertionError("two servers at one address")


def test_only_this_machine_may_ask_unless_it_is_said():
    assert DispatcherSettings().metrics_host == "127.0.0.1"


def test_what_waits_in_queues_and_batches_is_told():
    with served() as port:
        lines = page("127.0.0.1", port).splitlines()
    assert {
        'forebay_queue_jobs{queue="high"} 0.0',
        'forebay_queue_jobs{queue="low"} 7.0',
        'forebay_batches{status="in_progress"} 2.0',
        "forebay_batch_lines_left 40.0",
        "forebay_batches_in_trouble 1.0",
    } <= set(lines)


def test_what_nobody_could_look_at_has_no_sample():
    with served(seen=None) as port:
        text = page("127.0.0.1", port)
    assert "forebay_dispatcher_waiting 2.0" in text
    assert "forebay_queue_jobs" not in text


def test_probes_are_answered_by_what_they_ask():
    with served() as port:
        assert page("127.0.0.1", port, "/healthz") == "ok\n"
        assert page("127.0.0.1", port, "/readyz") == "ready\n"
        assert refusal(port, "/") == (404, "not found\n")
    with served(alive=False) as port:
        assert refusal(port, "/healthz") == (503, "the loop hangs\n")
    with served(ready=False) as port:
        assert page("127.0.0.1", port, "/healthz") == "ok\n"
        assert refusal(port, "/readyz") == (503, "takes no jobs now\n")


def entry(status: str, total: int, done: int, **fields: str) -> Any:
    told = {"status": status, "ended": status in FINAL}
    return SimpleNamespace(**told, total=total, completed=done, failed=0, fields=fields)


def test_only_batches_that_have_not_ended_are_summed_up():
    seen = summed_up(
        {"low": 1},
        [
            entry("in_progress", 100, 40),
            entry("in_progress", 10, 0, trouble="the disk is full"),
            entry("cancelling", 5, 5),
            entry("completed", 1000, 900, trouble="long ago"),
        ],
    )
    assert {status: count for status, count in seen.batches.items() if count} == {
        "in_progress": 2,
        "cancelling": 1,
    }
    assert {"validating", "finalizing"} <= seen.batches.keys()
    assert (seen.lines_left, seen.in_trouble, seen.jobs) == (70, 1, {"low": 1})


async def test_a_loop_answers_other_threads_and_an_outage_is_no_answer():
    door = LoopDoor(asyncio.get_running_loop())

    async def away() -> bool:
        raise StoreUnavailable("away")

    assert await asyncio.to_thread(door.answers)
    assert await asyncio.to_thread(door.ask, away) is None


async def test_a_loop_that_hangs_does_not_answer():
    # Asked from the loop's own thread: it cannot turn while it waits for itself.
    assert LoopDoor(asyncio.get_running_loop(), patience_s=0.01).answers() is False


def test_a_loop_that_has_ended_does_not_answer():
    loop = asyncio.new_event_loop()
    loop.close()
    assert LoopDoor(loop).answers() is False
