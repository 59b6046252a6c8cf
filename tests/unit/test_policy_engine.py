"""One modelled engine: slots, the queue, when sequences end, and what they wrote."""

from __future__ import annotations

import pytest

from forebay.policy.engine import Engine, EngineSpec, Sequence, Started


def engine(slots=1, speed=10.0, prefill=0.0):
    return Engine(EngineSpec(speed, slots, prefill))


def test_a_sequence_starts_at_once_where_a_slot_is_free_and_ends_when_it_has_written_all():
    assert engine().submit(Sequence(1, 50, 100), 5.0) == [Started(1, 15.0)]


def test_reading_the_prompt_takes_time_where_the_engine_says_so():
    assert engine(prefill=25.0).submit(Sequence(1, 50, 100), 0.0) == [Started(1, 12.0)]


def test_who_finds_no_slot_starts_when_one_comes_free_first_come_first():
    one = engine()
    one.submit(Sequence(1, 0, 100), 0.0)
    assert one.submit(Sequence(2, 0, 20), 1.0) == one.submit(Sequence(3, 0, 10), 2.0) == []
    assert (one.running, one.waiting) == (1, 2)
    assert one.finish(1, 10.0) == [Started(2, 12.0)]
    assert one.finish(2, 12.0) == [Started(3, 13.0)]


def test_an_aborted_sequence_frees_its_slot_and_what_it_wrote_stays_counted():
    one = engine()
    one.submit(Sequence(1, 0, 100), 0.0)
    one.submit(Sequence(2, 0, 20), 0.0)
    assert one.abort(1, 3.0) == [Started(2, 5.0)]
    assert one.tokens_written(4.0) == 30 + 10
    assert one.finished == 0


def test_a_sequence_that_waits_can_be_aborted_and_has_written_nothing():
    one = engine()
    one.submit(Sequence(1, 0, 100), 0.0)
    one.submit(Sequence(2, 0, 20), 0.0)
    assert one.tokens_of(2, 1.0) == 0
    assert one.abort(2, 1.0) == []
    assert (one.running, one.waiting) == (1, 0)


def test_tokens_are_counted_as_they_are_written_and_not_while_the_prompt_is_read():
    one = engine(prefill=10.0)
    one.submit(Sequence(1, 10, 100), 0.0)
    assert [one.tokens_written(at_s) for at_s in (0.5, 1.0, 2.0, 50.0)] == [0, 0, 10, 100]


def test_busy_time_counts_each_slot_that_is_taken():
    one = engine(slots=2)
    one.submit(Sequence(1, 0, 100), 0.0)
    one.submit(Sequence(2, 0, 50), 0.0)
    one.finish(2, 5.0)
    one.finish(1, 10.0)
    assert one.busy_slot_s == pytest.approx(15.0)
