"""The limit of a silent worker: it goes as far as answers show that with more at once more is done."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from monitor.exploring import PAUSE_S, Explorer
from workers.evidence import NONE, Evidence
from workers.limits import DEFAULT_LIMIT


def of(speed: float, answers: int = 5000) -> Evidence:
    """So many answers, each of 100 tokens, written so fast."""
    return Evidence(answers, 100 * answers, answers * 100 / speed)


def slots(number: int) -> Callable[[int], float]:
    """An engine that runs so many at once, at one speed; what is beyond waits inside it."""
    return lambda limit: 50.0 * min(1.0, number / limit)


def slowing(limit: int) -> float:
    """An engine that runs all at once, each the slower, and no more than 2,000 tokens/s in all."""
    return 2000.0 / (40 + limit)


def explored(speed_at: Callable[[int], float], *, polls: int = 40) -> list[int]:
    """The limits that an engine gets, one a second, while leases press all the time."""
    explorer, limits = Explorer(), [DEFAULT_LIMIT]
    for second in range(polls):
        found = explorer.decide(limits[-1], of(speed_at(limits[-1])), pressed=True, now_s=float(second))
        limits.append(found.value)
    return limits


@pytest.mark.parametrize("number", [16, 17, 20, 32, 64, 100, 256, 1000])
def test_it_ends_at_the_slots_of_an_engine_or_a_third_above(number):
    limits = explored(slots(number))
    assert number * 8 / 9 <= limits[-1] <= number * 4 / 3
    assert max(limits) <= 1.5 * 4 / 3 * number


def test_it_ends_where_a_larger_batch_only_slows_each_answer():
    limits = explored(slowing)
    assert limits[-3:] == [81, 81, 81]
    assert max(limits) == 121


def test_a_worker_of_fewer_slots_than_the_usual_limit_gets_no_more():
    assert explored(slots(8))[-1] == DEFAULT_LIMIT
    assert max(explored(slots(8))) == 24


def test_without_enough_answers_it_stays():
    explorer = Explorer()
    for evidence in (NONE, of(50.0, answers=15), Evidence(100, 0, 5.0)):
        assert explorer.decide(16, evidence, pressed=True, now_s=0.0).value == 16
    assert explorer.decide(40, of(50.0, answers=39), pressed=True, now_s=0.0).value == 40
    assert explorer.decide(40, of(50.0, answers=40), pressed=True, now_s=0.0).value == 60


def test_where_leases_do_not_press_it_stays():
    assert Explorer().decide(16, of(50.0), pressed=False, now_s=0.0).value == 16


def test_what_was_no_better_is_tried_again_after_a_pause_which_grows():
    explorer, speed_at = Explorer(), slots(16)

    def seconds_until(limit: int, wanted: int, start: int) -> int:
        for second in range(start, start + 5000):
            if explorer.decide(limit, of(speed_at(limit)), pressed=True, now_s=float(second)).value == wanted:
                return second
        raise AssertionError("it never was")

    pauses, now = [], 0
    for _ in range(6):
        tried = seconds_until(16, 24, now)
        now = seconds_until(24, 16, tried)
        pauses.append(tried)
    assert [after - before for before, after in pairwise(pauses)] == [60, 120, 240, 480, 960]
    assert PAUSE_S == (60.0, 960.0)


def test_an_engine_that_became_faster_is_found_after_the_pause():
    explorer = Explorer()
    assert explorer.decide(16, of(50.0), pressed=True, now_s=0.0).value == 24
    assert explorer.decide(24, of(30.0), pressed=True, now_s=1.0).value == 16
    assert explorer.decide(16, of(50.0), pressed=True, now_s=30.0).value == 16
    assert explorer.decide(16, of(50.0), pressed=True, now_s=61.0).value == 24
    assert explorer.decide(24, of(49.0), pressed=True, now_s=62.0).value == 36


def test_a_refusal_ends_what_was_thought_before():
    explorer = Explorer()
    assert explorer.decide(32, of(50.0), pressed=True, now_s=0.0).value == 48
    explorer.refused(5.0)
    assert explorer.decide(24, of(50.0), pressed=True, now_s=6.0).value == 24
    assert explorer.decide(24, of(50.0), pressed=True, now_s=66.0).value == 36


def test_it_says_why():
    explorer = Explorer()
    said = [
        explorer.decide(limit, evidence, pressed=True, now_s=0.0).reason
        for limit, evidence in ((16, NONE), (16, of(50.0)), (24, of(33.0)))
    ]
    assert said == [
        "hold: 0 of 16 answers that show its speed",
        "try 24: with 16 an answer has 50 tokens/s",
        "back: more at once was no faster",
    ]
