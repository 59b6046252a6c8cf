"""The check for lines that were sent again without need."""

from __future__ import annotations

from tests.chaos.takeovers import Claimed, Part, Takeovers, claimed_of

FIRST, SECOND = Claimed(3, 1, "dispatcher-0-1"), Claimed(3, 2, "dispatcher-1-4")


def standing(claimed):
    return {
        str(claimed.shard): f"claim={claimed.number} state=running by={claimed.owner} completed=1 failed=0"
    }


def takeovers():
    """The first claim is seen at 10 s, the second at 12 s."""
    watched = Takeovers(9.0)
    watched.look(standing(FIRST), 10.0)
    watched.look(standing(FIRST), 11.0)
    watched.look(standing(SECOND), 12.0)
    return watched


def needless(*parts):
    return list(takeovers().needless(parts))


def test_a_line_that_was_durable_before_the_second_claim_must_not_be_answered_again():
    [said] = needless(Part(FIRST, 10.5, frozenset({1, 2})), Part(SECOND, 13.0, frozenset({2, 3})))
    assert said.startswith("line 2:")


def test_a_line_in_flight_at_the_takeover_may_be_answered_twice():
    assert needless(Part(FIRST, 11.5, frozenset({1})), Part(SECOND, 13.0, frozenset({1}))) == []


def test_the_first_claim_may_answer_late_what_the_second_had_answered():
    assert needless(Part(FIRST, 14.0, frozenset({1})), Part(SECOND, 13.0, frozenset({1}))) == []


def test_parts_of_other_shards_and_of_claims_that_nobody_saw_say_nothing():
    other = Claimed(4, 1, "dispatcher-0-1")
    unseen = Claimed(3, 7, "dispatcher-2-2")
    assert needless(Part(other, 1.0, frozenset({1})), Part(SECOND, 13.0, frozenset({1}))) == []
    assert needless(Part(FIRST, 1.0, frozenset({1})), Part(unseen, 13.0, frozenset({1}))) == []


def test_the_name_of_a_part_tells_its_claim():
    assert claimed_of("parts/3/2.dispatcher-1-4.9f40a7-0.jsonl") == SECOND
    assert claimed_of("parts/invalid/0-0.jsonl") is None
