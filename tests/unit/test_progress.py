"""A batch and its fleet as numbers: what a look makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dispatcher.batches.ledger import Entry
from forebay.progress import Pace, look, unserved
from tests.fleets import NOW_S, worker
from workers.fleet import FleetView

LLAMA = worker("a:1", models=frozenset({"llama", "llama-lora"}))
QWEN = worker("b:1", models=frozenset({"qwen"}))
UNSAID = worker("c:1", models=frozenset())
ENTRY = Entry(
    id="batch_1",
    status="in_progress",
    total=100,
    completed=0,
    failed=0,
    prompt_tokens=0,
    completion_tokens=0,
    cost_total=1000,
    cost_done=0,
    shards=1,
    shards_done=0,
    queue="default",
    created_at=NOW_S - 10,
    expires_at=NOW_S + 1000,
    fields={},
)


def at(seconds, entry, pace, *workers, models=()):
    view = FleetView(now_s=NOW_S + seconds, generation=1, workers=workers)
    return look(entry, view, pace, started_s=NOW_S, models=models)


def test_models_that_no_worker_names_are_unserved():
    assert unserved({"qwen", "lama", "llama-lora", "a"}, [LLAMA, QWEN]) == ("a", "lama")
    assert unserved({"llama"}, []) == ("llama",)
    assert unserved(set(), [LLAMA]) == ()


def test_who_has_not_said_what_it_serves_may_serve_all():
    assert unserved({"lama"}, [LLAMA, UNSAID]) == ()


def test_a_batch_that_has_ended_waits_for_no_model():
    assert at(0, ENTRY, Pace(), LLAMA, models={"lama"}).unserved == ("lama",)
    assert at(0, replace(ENTRY, status="cancelled"), Pace(), LLAMA, models={"lama"}).unserved == ()


def test_rates_are_those_of_the_last_seconds_and_foretell_the_end():
    pace = Pace(window_s=10)
    assert at(0, ENTRY, pace).tokens_per_s is None
    at(100, replace(ENTRY, completion_tokens=100, cost_done=100), pace)
    seen = at(110, replace(ENTRY, completion_tokens=300, cost_done=600), pace)
    assert seen.tokens_per_s == pytest.approx(20)
    assert seen.eta_s == pytest.approx(8)


def test_the_end_is_not_foretold_before_enough_is_done():
    pace = Pace()
    at(0, ENTRY, pace)
    assert at(5, replace(ENTRY, cost_done=49), pace).eta_s is None
    assert at(10, replace(ENTRY, cost_done=50), pace).eta_s is not None
