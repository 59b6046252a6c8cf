"""The limit of a silent worker: it goes as far as answers show that with more at once more is done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from monitor.exploring import FRESH_S, PAUSE_S, Explorer
from workers.evidence import NONE, Evidence
from workers.limits import DEFAULT_LIMIT

Speed = Callable[[int], float]
"""Tokens per second of one answer, with so many requests at the worker."""


def slots(number: int, speed: float = 50.0) -> Speed:
    """An engine that runs so many at once, at one speed; what is beyond waits inside it."""
    return lambda at_once: speed * min(1.0, number / at_once)


def slowing(at_once: int) -> float:
    """An engine that runs all at once, each the slower, and no more than 2,000 tokens/s in all."""
    return 2000.0 / (40 + at_once)


@dataclass
class Worker:
    """A silent worker, polled once a second, whose answers come at once; `busy` is what it has at most."""

    speed: Speed
    explorer: Explorer = field(default_factory=Explorer)
    limit: int = DEFAULT_LIMIT
    busy: int = 10_000
    now_s: float = 0.0
    reasons: list[str] = field(default_factory=list)

    def evidence(self) -> Evidence:
        at_once = min(self.limit, self.busy)
        if not at_once:
            return NONE
        answers = 2 * self.limit
        return Evidence(answers, 100 * answers, answers * 100 / self.speed(at_once), answers * at_once)

    def poll(self) -> int:
        pressed = self.busy >= self.limit
        found = self.explorer.decide(self.limit, self.evidence(), pressed=pressed, now_s=self.now_s)
        if found.value != self.limit or found.anew:
            self.reasons.append(found.reason)
        self.limit = found.value
        self.now_s += 1.0
        return self.limit

    def polls(self, seconds: int) -> list[int]:
        """The limits of so long."""
        return [self.poll() for _ in range(seconds)]

    def changes(self, seconds: int) -> list[int]:
        """The limits of so long, each once for as long as it stands."""
        limits = [self.limit, *self.polls(seconds)]
        return [limits[0], *(after for before, after in pairwise(limits) if after != before)]


@pytest.mark.parametrize("number", [16, 17, 20, 32, 64, 100, 256, 1000])
def test_it_ends_at_the_slots_of_an_engine_or_a_third_above(number):
    limits = Worker(slots(number)).polls(50)
    assert number * 8 / 9 <= limits[-1] <= number * 4 / 3
    assert max(limits) <= 1.5 * 4 / 3 * number


def test_it_ends_where_a_larger_batch_only_slows_each_answer():
    assert Worker(slowing).changes(50) == [16, 24, 36, 54, 81, 121, 81]


def test_a_worker_of_fewer_slots_than_the_usual_limit_gets_no_more():
    assert Worker(slots(8)).changes(50) == [16, 24, 16]


def test_without_enough_answers_it_stays():
    few = (NONE, Evidence(15, 1500, 30.0, 240), Evidence(100, 0, 5.0, 1600), Evidence(100, 5, 0.0, 1600))
    for evidence in few:
        assert Explorer().decide(16, evidence, pressed=True, now_s=0.0).value == 16
    assert Explorer().decide(40, Evidence(39, 3900, 78.0, 1560), pressed=True, now_s=0.0).value == 40
    assert Explorer().decide(40, Evidence(40, 4000, 80.0, 1600), pressed=True, now_s=0.0).value == 60


def test_where_leases_do_not_press_it_stays():
    assert Worker(slots(64), busy=15).changes(200) == [16]


def test_what_was_no_better_is_tried_again_after_a_pause_which_grows():
    worker, times = Worker(slots(16)), []
    for _ in range(6000):
        before = worker.limit
        if worker.poll() > before:
            times.append(worker.now_s)
    apart = [round(after - before) for before, after in pairwise(times)]
    # A second for each poll: one measures anew, one tries.
    assert apart[:5] == [62, 122, 242, 482, 962]
    assert set(apart[5:]) == {962}
    assert PAUSE_S == (60.0, 960.0)


def test_after_a_trial_that_paid_the_pause_is_short_again():
    worker = Worker(slots(16))
    worker.polls(2000)
    worker.speed = slots(36)
    while worker.limit < 54:
        worker.poll()
    assert worker.changes(60) == [54, 36]
    assert worker.changes(5) == [36, 24, 36]


def test_a_smaller_limit_is_tried_too_and_stays_if_no_less_is_done():
    worker = Worker(slots(64))
    assert worker.polls(30)[-1] == 81
    worker.speed = slots(16)
    assert worker.changes(100)[1:4] == [54, 36, 24]
    assert worker.polls(200)[-1] in (16, 24)
    assert "try 54: with 81 it does 800 tokens/s" in worker.reasons


def test_a_smaller_limit_with_which_less_is_done_does_not_stay():
    worker = Worker(slots(36))
    assert worker.changes(100) == [16, 24, 36, 54, 36, 24, 36]
    assert worker.reasons[-1] == "back from 24: less was done"


def test_other_requests_than_before_raise_nothing_for_good():
    worker = Worker(slots(16))
    for batch in range(20):
        worker.speed = slots(16, speed=50.0 if batch % 2 else 33.0)
        worker.busy = 10_000
        worker.polls(100)
        worker.busy = 0
        worker.polls(50)
    assert worker.limit <= 24


def test_a_trial_in_the_midst_of_which_other_requests_come_is_undone_later():
    worker = Worker(slots(16, speed=33.0))
    assert worker.poll() == 24
    worker.speed = slots(16, speed=50.0)
    assert worker.polls(2)[-1] in (24, 36)
    assert worker.polls(200)[-1] == 16


def test_who_takes_over_in_the_midst_of_a_trial_tries_less_first():
    limit = Worker(slots(16)).poll()
    assert limit == 24
    for _ in range(5):
        successor = Worker(slots(16), Explorer(adopted=True), limit=limit)
        assert successor.polls(60) == [limit] * 60
        limit = successor.polls(5)[-1]
        assert limit == 16
        limit = Worker(slots(16), Explorer(adopted=True), limit=limit).polls(64)[-1]


def test_a_limit_that_is_not_filled_proves_nothing():
    worker = Worker(slots(16), busy=20)
    assert worker.changes(50) == [16, 24, 16]
    assert worker.reasons[-1] == "back from 24: no more was done"


def test_a_trial_that_gets_no_answers_ends():
    explorer = Explorer()
    enough = Evidence(32, 3200, 64.0, 512)
    assert explorer.decide(16, enough, pressed=True, now_s=0.0).value == 24
    assert explorer.decide(24, NONE, pressed=True, now_s=FRESH_S).value == 24
    back = explorer.decide(24, NONE, pressed=True, now_s=FRESH_S + 1)
    assert (back.value, back.reason) == (16, "back from 24: too few answers came to know more")


def test_a_measurement_that_takes_long_is_begun_anew():
    explorer = Explorer()
    assert not explorer.decide(16, NONE, pressed=True, now_s=0.0).anew
    assert not explorer.decide(16, NONE, pressed=True, now_s=FRESH_S + 1).anew
    anew = explorer.decide(16, NONE, pressed=True, now_s=FRESH_S + PAUSE_S[0] + 1)
    assert (anew.value, anew.anew, anew.reason) == (16, True, "measure what it does with 16 at once")


def test_a_refusal_ends_what_was_tried_and_does_not_make_pauses_longer():
    worker = Worker(slots(1000))
    assert worker.polls(4)[-1] == 81
    for cut in (40, 20, 16):
        worker.explorer.refused(worker.now_s)
        worker.limit = cut
        assert worker.poll() == cut
    assert worker.polls(58) == [16] * 58
    assert worker.polls(10)[-1] > 24
