"""What is learned of a worker's speed, and what a request makes of it: go now, or wait for a faster one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.scheduler.outlook import Outlook, Underway
from dispatcher.speeds import RETELL_S, Speeds
from tests.fleets import idle_load, worker


def test_a_worker_is_unknown_until_its_first_answer_with_tokens():
    speeds = Speeds()
    seen = worker("a", load=None)
    assert speeds.of(seen) is None
    assert not speeds.saw("a", None, 1.0)
    assert not speeds.saw("a", 0, 1.0)
    assert speeds.saw("a", 50, 2.0)
    assert not speeds.saw("a", 50, 2.0)
    assert speeds.of(seen) == pytest.approx(25.0)


def test_a_load_tells_the_speed_of_a_worker_that_has_not_answered_yet():
    busy = worker("a", load=idle_load(running=4, token_rate=100.0))
    idle = worker("a", load=idle_load(running=0, token_rate=100.0))
    assert Speeds().of(busy) == pytest.approx(25.0)
    assert Speeds().of(idle) is None


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0.001, 1000.0)), min_size=1))
def test_a_speed_lies_between_the_slowest_and_the_fastest_answer(answers):
    speeds = Speeds()
    for tokens, seconds in answers:
        speeds.saw("a", tokens, seconds)
    rates = [tokens / seconds for tokens, seconds in answers]
    assert min(rates) * 0.999 <= speeds.of(worker("a", load=None)) <= max(rates) * 1.001


SPEEDS = {"slow": 10.0, "fast": 40.0}


def outlook(*ends, now_s=0.0):
    """The fast worker is full; its answers end at these times."""
    return Outlook(now_s, SPEEDS, [Underway("fast", 0.0, int(end * SPEEDS["fast"])) for end in ends])


def test_a_long_request_waits_for_the_fast_worker_and_a_short_one_goes():
    assert outlook(2.0).better_waits(400, ["slow"], ["slow", "fast"])  # 2 + 10 s against 40 s
    assert not outlook(2.0).better_waits(20, ["slow"], ["slow", "fast"])  # 2.5 s against 2 s


def test_each_that_waits_takes_the_slot_that_it_waits_for():
    seen = outlook(1.0, 2.0)
    assert [seen.better_waits(400, ["slow"], ["slow", "fast"]) for _ in range(3)] == [True, True, False]


def test_nobody_waits_while_the_fast_worker_or_one_of_unknown_speed_has_room():
    assert not outlook(2.0).better_waits(400, ["slow", "fast"], ["slow", "fast"])
    assert not outlook(2.0).better_waits(400, ["slow", "new"], ["slow", "fast", "new"])


def test_nobody_waits_for_a_worker_that_does_not_serve_the_model():
    assert not outlook(2.0).better_waits(400, ["slow"], ["slow"])


def test_an_answer_that_is_overdue_is_expected_now_but_none_that_stands_still():
    for now_s, waits in ((1.9, True), (2.1, False)):
        seen = Outlook(now_s, SPEEDS, [Underway("fast", 0.0, 40)])
        assert seen.better_waits(400, ["slow"], ["slow", "fast"]) is waits


def test_of_workers_that_are_gone_nothing_is_kept():
    speeds = Speeds()
    for name in ("a", "b"):
        speeds.saw(name, 100, 1.0)
    speeds.told(speeds.news(0.0), 0.0)
    speeds.keep_only({"a"})
    assert (speeds.has_seen("a"), speeds.has_seen("b")) == (True, False)
    speeds.saw("a", 1000, 1.0)
    assert set(speeds.news(0.0)) == {"a"}


def test_only_ceilings_foretell_lengths():
    speeds = Speeds()
    for _ in range(50):
        speeds.saw("a", 100, 1.0, allowed=None)
    assert not speeds.foretold
    for _ in range(50):
        speeds.saw("a", 500, 1.0, allowed=None)
        speeds.saw("a", 100, 1.0, allowed=600)
    assert not speeds.foretold


def test_the_mean_of_the_first_answers_is_their_mean():
    speeds = Speeds()
    assert speeds.mean_answer == 0
    speeds.saw("a", 100, 1.0)
    assert speeds.mean_answer == 100
    speeds.saw("b", 300, 1.0)
    assert speeds.mean_answer == pytest.approx(200, rel=0.02)


def test_what_was_learned_of_an_engine_counts_little_for_the_next_behind_its_address():
    speeds, first = Speeds(), worker("a", load=None)
    for _ in range(50):
        speeds.saw("a", 1000, 10.0)
    assert speeds.of(first) == pytest.approx(100.0)
    second = replace(first, incarnation=2)
    assert speeds.of(second) == pytest.approx(100.0)
    for _ in range(2):
        speeds.saw("a", 1000, 100.0)
    assert speeds.of(second) < 20.0


def test_a_speed_that_stays_the_same_is_told_again_before_it_is_too_old():
    speeds = Speeds()
    speeds.saw("a", 100, 1.0)
    speeds.told(speeds.news(0.0), 0.0)
    assert not speeds.news(RETELL_S)
    speeds.saw("a", 100, 1.0)
    assert not speeds.news(RETELL_S - 1)
    assert speeds.news(RETELL_S) == {"a": 100.0}
    speeds.told({"a": 100.0}, RETELL_S)
    assert not speeds.news(3 * RETELL_S)
