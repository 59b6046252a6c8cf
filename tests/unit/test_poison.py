"""Finding the line that kills: what is sent next, over claims that die, end in order, or are killed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.batches.poison import CAREFUL_AFTER, LONE_DEATHS, GiveUp, Past, Send, next_step

CAREFUL = Past(died=CAREFUL_AFTER)


@dataclass
class Shard:
    """A shard whose killers kill whatever sends them; it keeps what the ledger keeps."""

    size: int
    killers: frozenset[int]
    past: Past = CAREFUL
    left: list[int] = field(init=False)
    given_up: set[int] = field(default_factory=set)
    deaths: int = 0

    def __post_init__(self):
        self.left = list(range(self.size))

    def step(self) -> bool:
        """One step of a claim; False: it died."""
        match next_step(self.known, self.left, self.size):
            case GiveUp(position):
                self.given_up.add(position)
                self.left.remove(position)
            case Send(positions):
                assert positions
                assert set(positions) <= set(self.left)
                self.note(range(positions[0], positions[-1] + 1))
                if self.killers & set(positions):
                    return False
                self.left = [position for position in self.left if position not in positions]
        return True

    def note(self, group):
        self.past = replace(self.past, group=group, alone=self.past.alone if group == self.past.group else 0)

    def claim(self):
        self.known = self.past

    def die(self):
        self.deaths += 1
        group = self.past.group
        alone = self.past.alone + (group is not None and len(group) == 1)
        self.past = replace(self.past, died=self.past.died + 1, alone=alone)

    def to_its_end(self, interruptions=()):
        """`interruptions`: after how many steps a claim ends in an orderly way, one number a claim."""
        waiting = list(interruptions)
        while self.left:
            self.claim()
            steps = waiting.pop() if waiting else self.size + 1
            for _ in range(steps):
                if not self.left:
                    return
                if not self.step():
                    self.die()
                    break


@st.composite
def shards(draw, most_killers=256):
    size = draw(st.integers(1, 256))
    killers = draw(st.frozensets(st.integers(0, size - 1), max_size=min(size, most_killers)))
    return Shard(size, killers)


@given(shards(), st.lists(st.integers(0, 4), max_size=6))
def test_every_line_is_answered_or_given_up_and_only_killers_are_given_up(shard, interruptions):
    shard.to_its_end(interruptions)
    assert shard.left == []
    assert shard.given_up == shard.killers


@given(shards(most_killers=8))
def test_a_killer_costs_no_more_deaths_than_a_bisection_and_those_it_dies_alone(shard):
    shard.to_its_end()
    assert shard.deaths <= len(shard.killers) * (math.ceil(math.log2(shard.size)) + 1 + LONE_DEATHS)


@given(st.integers(1, 256), st.integers(0, 255))
def test_the_first_killer_is_found_by_bisection_alone(size, place):
    shard = Shard(size, frozenset({place % size}))
    shard.to_its_end()
    assert shard.deaths <= math.ceil(math.log2(size)) + LONE_DEATHS


@given(shards(most_killers=0), st.lists(st.integers(1, 6), max_size=12))
def test_a_line_outlives_dispatchers_that_somebody_kills_if_not_always_during_it_alone(shard, kills):
    for steps in kills:
        shard.claim()
        for _ in range(steps):
            if shard.left:
                shard.step()
        if shard.left:
            shard.past = replace(shard.past, died=shard.past.died + 1)  # killed between two groups
    shard.to_its_end()
    assert shard.given_up == set()


def test_a_line_that_died_alone_less_often_is_sent_again():
    past = Past(died=9, group=range(4, 5), alone=LONE_DEATHS - 1)
    assert next_step(past, [1, 4, 7], 8) == Send((4,))
    assert next_step(replace(past, alone=LONE_DEATHS), [1, 4, 7], 8) == GiveUp(4)


def test_deaths_of_a_line_that_was_answered_since_are_held_against_no_other():
    past = Past(died=9, group=range(4, 5), alone=LONE_DEATHS)
    assert next_step(past, [1, 7], 8) == Send((1, 7))


def test_suspects_go_first_and_half_of_them_at_a_time():
    past = Past(died=4, group=range(2, 7))
    assert next_step(past, [0, 2, 3, 5, 6, 7], 8) == Send((2, 3))
    assert next_step(past, [0, 5, 6, 7], 8) == Send((5,))
    assert next_step(past, [0, 6, 7], 8) == Send((6,))
    assert next_step(past, [0, 7], 8) == Send((0, 7))


@pytest.mark.parametrize(
    ("fields", "past"),
    [
        ({}, Past()),
        ({"died": "2,5,6", "group": "10-19@6"}, Past(3, range(10, 20))),
        ({"died": "2", "group": "7-7@8", "alone": "7,8"}, Past(1, range(7, 8), 2)),
    ],
)
def test_the_past_is_read_from_the_ledger_s_text(fields, past):
    assert Past.read(fields) == past


def test_a_shard_runs_carefully_from_the_third_death_on():
    assert [Past(died=died).careful for died in range(5)] == [False, False, False, True, True]
