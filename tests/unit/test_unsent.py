"""What is left of a shard, when some of its models have to wait."""

from __future__ import annotations

from dispatcher.batches.plan import PlannedRequest
from dispatcher.unsent import Unsent


def left(models):
    """One request for each letter; "-" stands for one that any worker may take."""
    return Unsent(
        PlannedRequest(line, 0, 0, None if model == "-" else model, 1, None, 1, 0)
        for line, model in enumerate(models)
    )


def lines(planned):
    return [request.line for request in planned]


def test_lines_are_taken_in_their_order_whatever_their_models():
    unsent = left("abba-b")
    assert set(unsent.models) == {"a", "b", None}
    assert lines(unsent.take(["b", None, "a"], 4)) == [0, 1, 2, 3]
    assert lines(unsent.take(unsent.models, 9)) == [4, 5]
    assert not unsent


def test_a_model_that_has_to_wait_is_passed_over_and_keeps_its_place():
    unsent = left("aabab")
    assert lines(unsent.take(["b"], 1)) == [2]
    assert lines(unsent.take(["a", "b"], 2)) == [0, 1]
    assert lines(unsent.take(["b"], 9)) == [4]
    assert list(unsent.models) == ["a"]
    assert lines(unsent.take(["b"], 9)) == []
    assert lines(unsent.take(["a"], 9)) == [3]
    assert not unsent


def test_large_lines_are_taken_up_to_so_many_bytes_but_one_always():
    unsent = Unsent(
        PlannedRequest(line, 0, length, "a", 1, None, 1, 0) for line, length in enumerate([9, 2, 3, 4])
    )
    assert lines(unsent.take(["a"], 9, 5)) == [0]
    assert lines(unsent.take(["a"], 9, 5)) == [1, 2]
    assert lines(unsent.take(["a"], 9, 5)) == [3]
    assert not unsent


def test_a_shard_without_lines_has_nothing_left():
    assert not left("")
