"""The batching model of the simulated engine: exact times, and what holds for every sequence of events."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.simulator.batching import Batch, Finished, Pace, QueueFullError, Sequence

ROOMY = 10**9


def pace(**changes: float | None) -> Pace:
    values = {
        "tokens_per_s": 10.0,
        "slots": 2,
        "slowdown": 1.0,
        "prefill_tokens_per_s": 100.0,
        "kv_tokens": ROOMY,
        "max_queued": None,
    }
    return Pace(**{**values, **changes})  # type: ignore[arg-type]  # a test's shorthand


def run_out(batch: Batch) -> list[Finished]:
    finished = []
    while (next_s := batch.next_event_s()) is not None:
        finished += batch.advance(next_s)
    return finished


def ends(batch: Batch) -> dict[int, float]:
    return {each.sequence.key: each.finished_s for each in run_out(batch)}


def test_a_sequence_alone_takes_its_prefill_and_its_decode_time():
    batch = Batch(pace())
    batch.submit(Sequence(1, 50, 20), 3.0)
    assert batch.next_event_s() == pytest.approx(3.0 + 0.5 + 2.0)


def test_a_second_sequence_moves_the_finish_of_the_first():
    batch = Batch(pace(prefill_tokens_per_s=0.0))
    batch.submit(Sequence(1, 1, 20), 0.0)  # alone it would end at 2.0
    batch.submit(Sequence(2, 1, 20), 1.0)
    # From 1.0 on each keeps 1 / (1 + 1/2) of its pace: the 1.0 s that are left take 1.5 s.
    assert batch.next_event_s() == pytest.approx(2.5)
    # Then the second, which has 1.0 s of its 2.0 s behind it, runs alone.
    assert ends(batch) == {1: pytest.approx(2.5), 2: pytest.approx(3.5)}


def test_an_abort_lets_the_others_go_faster():
    batch = Batch(pace(prefill_tokens_per_s=0.0))
    batch.submit(Sequence(1, 1, 20), 0.0)
    batch.submit(Sequence(2, 1, 20), 0.0)
    assert batch.abort(2, 1.5)
    assert ends(batch) == {1: pytest.approx(1.5 + 1.0)}


def test_aborting_what_is_not_there_changes_nothing():
    batch = Batch(pace())
    batch.submit(Sequence(1, 1, 20), 0.0)
    before_s = batch.next_event_s()
    assert not batch.abort(7, 0.0)
    assert batch.next_event_s() == before_s


def test_an_aborted_waiting_sequence_never_runs():
    batch = Batch(pace(slots=1))
    for key in (1, 2, 3):
        batch.submit(Sequence(key, 10, 10), 0.0)
    assert batch.abort(2, 0.0)
    assert list(ends(batch)) == [1, 3]


def test_no_pace_at_all_finishes_at_the_moment_of_submission():
    batch = Batch(pace(tokens_per_s=0.0, prefill_tokens_per_s=0.0))
    batch.submit(Sequence(1, 10, 10), 4.0)
    assert [each.finished_s for each in batch.advance(4.0)] == [4.0]
    assert batch.generation_tokens_total == 10


def test_a_factor_of_zero_stands_still_and_of_one_goes_on():
    batch = Batch(pace(prefill_tokens_per_s=0.0))
    batch.submit(Sequence(1, 1, 20), 0.0)
    batch.set_factor(0.0, 1.0)
    assert batch.next_event_s() is None
    assert batch.advance(100.0) == []
    assert (batch.running, batch.generation_tokens_total) == (1, 10)
    batch.set_factor(1.0, 100.0)
    assert batch.next_event_s() == pytest.approx(101.0)


def test_tokens_count_while_a_sequence_runs():
    batch = Batch(pace())
    batch.submit(Sequence(1, 100, 20), 0.0)  # prefill until 1.0, decode until 3.0
    batch.advance(0.5)
    assert (batch.prompt_tokens_total, batch.generation_tokens_total, batch.held_tokens) == (0, 0, 100)
    batch.advance(2.0)
    assert (batch.prompt_tokens_total, batch.generation_tokens_total, batch.held_tokens) == (100, 10, 110)
    batch.advance(3.0)
    assert (batch.prompt_tokens_total, batch.generation_tokens_total, batch.held_tokens) == (100, 20, 0)


def test_a_full_queue_takes_nothing_in():
    batch = Batch(pace(slots=1, max_queued=1))
    batch.submit(Sequence(1, 1, 10), 0.0)
    batch.submit(Sequence(2, 1, 10), 0.0)
    with pytest.raises(QueueFullError):
        batch.submit(Sequence(3, 1, 10), 0.0)
    assert (batch.running, batch.waiting) == (1, 1)
    batch.submit(Sequence(4, 1, 10), 1.02)  # the first has left by then
    assert batch.waiting == 1


def test_the_head_of_the_queue_waits_for_kv_tokens_and_nothing_passes_it():
    batch = Batch(pace(slots=4, kv_tokens=100))
    batch.submit(Sequence(1, 50, 10), 0.0)
    batch.submit(Sequence(2, 50, 10), 0.0)
    batch.submit(Sequence(3, 1, 1), 0.0)
    assert (batch.running, batch.waiting) == (1, 2)
    finished = {each.sequence.key: each for each in run_out(batch)}
    assert finished[2].started_s == finished[3].started_s == finished[1].finished_s


@pytest.mark.parametrize("slowdown", [0.0, 0.5, 1.0, 4.0])
def test_a_larger_batch_slows_each_and_speeds_all(slowdown: float):
    rates = [pace(slots=8, slowdown=slowdown).speed(size) for size in range(1, 9)]
    totals = [size * rate for size, rate in enumerate(rates, start=1)]
    assert rates == sorted(rates, reverse=True)
    assert totals == sorted(set(totals))


sizes = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 300)), min_size=1, max_size=25)
paces = st.builds(
    pace,
    slots=st.integers(1, 6),
    slowdown=st.floats(0.0, 3.0),
    tokens_per_s=st.sampled_from([0.0, 1.0, 33.0]),
    prefill_tokens_per_s=st.sampled_from([0.0, 500.0]),
    kv_tokens=st.sampled_from([700, 2000, ROOMY]),
)
gaps = st.lists(st.floats(0.0, 5.0), min_size=25, max_size=25)


@given(paces, sizes, gaps)
def test_every_sequence_finishes_once_in_fifo_order_and_every_token_is_counted(pace_, sequences, waits):
    batch = Batch(pace_)
    finished: list[Finished] = []
    now_s = 0.0
    for key, ((prompt, completion), gap_s) in enumerate(zip(sequences, waits, strict=False)):
        now_s += gap_s
        finished += batch.advance(now_s)
        batch.submit(Sequence(key, prompt, completion), now_s)
        assert batch.running <= pace_.slots
        assert batch.running + batch.waiting + len(finished) >= key  # a finish may not be handed out yet
    finished += run_out(batch)
    assert sorted(each.sequence.key for each in finished) == list(range(len(sequences)))
    started = [each.started_s for each in sorted(finished, key=lambda each: each.sequence.key)]
    assert started == sorted(started)
    times = [each.finished_s for each in finished]
    assert times == sorted(times)
    assert batch.prompt_tokens_total == sum(prompt for prompt, _ in sequences)
    assert batch.generation_tokens_total == sum(completion for _, completion in sequences)
    assert (batch.running, batch.waiting, batch.held_tokens) == (0, 0, 0)
    assert batch.max_running_seen <= pace_.slots


@given(paces, sizes, st.floats(0.0, 30.0), st.data())
def test_counters_never_fall_and_aborted_tokens_stay_counted(pace_, sequences, until_s, data):
    batch = Batch(pace_)
    for key, (prompt, completion) in enumerate(sequences):
        batch.submit(Sequence(key, prompt, completion), 0.0)
    batch.advance(until_s)
    seen = batch.prompt_tokens_total, batch.generation_tokens_total
    batch.abort(data.draw(st.integers(0, len(sequences) - 1)), until_s)
    after = batch.prompt_tokens_total, batch.generation_tokens_total
    assert after[1] == seen[1]
    assert after[0] >= seen[0]  # more, where a sequence without prefill time took the free slot
    run_out(batch)
    assert batch.prompt_tokens_total >= after[0]
    assert batch.generation_tokens_total >= after[1]


@given(paces, sizes, st.tuples(st.integers(1, 400), st.integers(1, 300)), st.integers(0, 25))
def test_one_more_sequence_lets_no_other_finish_earlier(pace_, sequences, extra, place):
    roomy = pace(
        slots=pace_.slots,
        slowdown=pace_.slowdown,
        tokens_per_s=pace_.tokens_per_s,
        prefill_tokens_per_s=pace_.prefill_tokens_per_s,
    )  # with KV tokens short, a large one in front may let small ones meet a better moment
    without, with_extra = Batch(roomy), Batch(roomy)
    for key, (prompt, completion) in enumerate(sequences):
        if key == place:
            with_extra.submit(Sequence(-1, *extra), 0.0)
        without.submit(Sequence(key, prompt, completion), 0.0)
        with_extra.submit(Sequence(key, prompt, completion), 0.0)
    later = ends(with_extra)
    for key, end_s in ends(without).items():
        assert later[key] >= end_s or math.isclose(later[key], end_s, rel_tol=1e-9)


@given(paces, sizes, st.lists(st.floats(0.0, 40.0), max_size=20))
def test_looking_often_changes_no_finish(pace_, sequences, looks):
    asked, unasked = Batch(pace_), Batch(pace_)
    for key, (prompt, completion) in enumerate(sequences):
        asked.submit(Sequence(key, prompt, completion), 0.0)
        unasked.submit(Sequence(key, prompt, completion), 0.0)
    finished = [each for look_s in sorted(looks) for each in asked.advance(look_s)] + run_out(asked)
    expected = ends(unasked)
    assert {each.sequence.key: each.finished_s for each in finished} == pytest.approx(expected, rel=1e-9)
