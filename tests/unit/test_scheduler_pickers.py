"""Each picker: whom it asks first, and who comes after."""

from collections import Counter
from random import Random

import numpy as np
import pytest

from dispatcher.scheduler.pickers import PICKERS, Ballot


def ballot(*totals):
    ids = tuple(f"w{number}" for number in range(len(totals)))
    return Ballot(np.array(totals, dtype=float), np.arange(len(totals)), ids)


def firsts(name, votes, draws=2_000, temperature=0.1):
    picker, rng = PICKERS[name](temperature), Random(1)
    return Counter(picker.order(votes, rng, 3)[0] for _ in range(draws))


@pytest.mark.parametrize("name", PICKERS)
def test_every_picker_names_each_candidate_at_most_once_and_no_more_than_asked(name):
    picker, rng = PICKERS[name](0.1), Random(1)
    for keep in (1, 2, 5, 9):
        order = picker.order(ballot(0.1, 0.5, 0.5, 0.9, 0.3), rng, keep)
        assert len(order) == len(set(order)) == min(keep, 5)


@pytest.mark.parametrize("name", PICKERS)
def test_every_picker_takes_the_only_candidate(name):
    assert PICKERS[name](0.1).order(ballot(0.0), Random(1), 4) == [0]


def test_max_score_asks_the_best_first_and_then_the_next_best():
    assert PICKERS["max-score"](0.1).order(ballot(0.1, 0.9, 0.5), Random(1), 3) == [1, 2, 0]


def test_max_score_gives_equal_bests_equal_chances():
    seen = firsts("max-score", ballot(0.9, 0.1, 0.9, 0.9))
    assert set(seen) == {0, 2, 3}
    assert min(seen.values()) > 550


def test_two_choices_never_picks_the_worst_and_prefers_the_best():
    seen = firsts("p2c", ballot(0.1, 0.5, 0.9))
    assert seen[0] == 0
    assert seen[2] == pytest.approx(2_000 * 2 / 3, rel=0.1)


def test_two_choices_asks_the_rest_after_its_pair():
    assert sorted(PICKERS["p2c"](0.1).order(ballot(0.1, 0.5, 0.9, 0.3), Random(1), 4)) == [0, 1, 2, 3]


def test_softmax_draws_in_proportion_to_the_exponent():
    seen = firsts("softmax", ballot(0.0, 0.1), temperature=0.1)
    assert seen[1] / seen[0] == pytest.approx(np.e, rel=0.2)


def test_round_robin_takes_turns_by_name_and_goes_on_where_it_was_when_candidates_change():
    picker, rng = PICKERS["round-robin"](0.1), Random(1)
    all_three = ballot(0.1, 0.9, 0.5)
    turns = [picker.order(all_three, rng, 3)[0] for _ in range(4)]
    assert turns == [0, 1, 2, 0]
    without_w1 = Ballot(np.array([0.1, 0.5]), np.array([0, 2]), all_three.ids)
    assert picker.order(without_w1, rng, 3) == [1, 0]
