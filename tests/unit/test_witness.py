"""What a dispatcher counts of workers that do not tell how busy they are, and what it leaves out."""

from __future__ import annotations

import pytest

from dispatcher.witness import Witness
from tests.fleets import NOW_S, idle_load, load, worker
from workers.errors import StoreUnavailable
from workers.evidence import Evidence

SINCE = NOW_S - 100.0


class Told:
    """Takes what is told, in place of the store; fails once where it is told to."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, float, Evidence]] = []
        self.fails = False

    async def note_evidence(self, notes):
        if self.fails:
            raise StoreUnavailable("away")
        self.notes += notes
        return len(notes)


@pytest.fixture
def told():
    return Told()


@pytest.fixture
def witness(told):
    return Witness(told, stale_after_s=3.0)


def silent(**changes):
    """A worker that says nothing, and whose limit is full."""
    return worker(**{"load": None, "limit": 16, "leases": 16, "limit_since": SINCE, **changes})


async def test_answers_of_a_full_worker_that_says_nothing_are_counted_once(witness, told):
    witness.look([silent()], NOW_S)
    witness.saw("a:1", 100, 2.0, NOW_S + 2)
    witness.saw("a:1", 50, 1.0, NOW_S + 3)
    await witness.tell()
    await witness.tell()
    assert told.notes == [("a:1", SINCE, Evidence(2, 150, 3.0, 32))]


@pytest.mark.parametrize(
    ("tokens", "seconds", "at_s"),
    [(100, None, 2.0), (100, 2.0, 1.0)],
    ids=["no time", "begun before it was seen full"],
)
async def test_what_shows_nothing_is_left_out(witness, told, tokens, seconds, at_s):
    witness.look([silent()], NOW_S)
    witness.saw("a:1", tokens, seconds, NOW_S + at_s)
    await witness.tell()
    assert told.notes == []


@pytest.mark.parametrize("tokens", [None, 0])
async def test_answers_without_tokens_count_by_themselves(witness, told, tokens):
    witness.look([silent(leases=14)], NOW_S)
    witness.saw("a:1", tokens, 2.0, NOW_S + 2)
    await witness.tell()
    assert told.notes == [("a:1", SINCE, Evidence(1, 1, 2.0, 14))]


@pytest.mark.parametrize(
    ("said", "counts"),
    [
        (None, 1),
        (load(running=3), 1),
        (load(waiting=0), 1),
        (idle_load(sampled_at=NOW_S - 4.0), 1),
        (idle_load(), 0),
    ],
    ids=["nothing", "not what waits", "not what runs", "long ago", "all"],
)
async def test_only_workers_that_do_not_tell_are_watched(witness, told, said, counts):
    witness.look([silent(load=said)], NOW_S)
    witness.saw("a:1", 100, 1.0, NOW_S + 2)
    await witness.tell()
    assert len(told.notes) == counts


async def test_a_request_that_ran_while_there_was_room_shows_nothing(witness, told):
    witness.look([silent()], NOW_S)
    witness.look([silent(leases=11)], NOW_S + 1)
    witness.look([silent(leases=13)], NOW_S + 2)
    witness.saw("a:1", 100, 2.5, NOW_S + 4)
    await witness.tell()
    assert told.notes == []
    witness.saw("a:1", 100, 1.5, NOW_S + 4)
    await witness.tell()
    assert [evidence.answers for _, _, evidence in told.notes] == [1]


async def test_while_nobody_looks_nothing_is_shown(witness, told):
    """This process stood still, or Redis did not answer: how full the worker was nobody knows."""
    witness.look([silent()], NOW_S)
    witness.saw("a:1", 100, 2.0, NOW_S + 30)
    witness.look([silent()], NOW_S + 30)
    witness.saw("a:1", 100, 20.0, NOW_S + 31)
    await witness.tell()
    assert told.notes == []
    witness.saw("a:1", 100, 1.0, NOW_S + 32)
    await witness.tell()
    assert len(told.notes) == 1


async def test_a_changed_limit_begins_anew(witness, told):
    witness.look([silent()], NOW_S)
    witness.saw("a:1", 100, 1.0, NOW_S + 2)
    witness.look([silent(limit_since=NOW_S + 2.5)], NOW_S + 3)
    witness.saw("a:1", 100, 3.0, NOW_S + 4)
    await witness.tell()
    assert told.notes == []
    witness.saw("a:1", 100, 1.0, NOW_S + 5)
    await witness.tell()
    assert told.notes == [("a:1", NOW_S + 2.5, Evidence(1, 100, 1.0, 16))]


async def test_who_is_gone_or_tells_again_is_not_watched_any_more(witness, told):
    witness.look([silent(), silent(name="b:1")], NOW_S)
    for name in ("a:1", "b:1"):
        witness.saw(name, 100, 1.0, NOW_S + 2)
    witness.look([silent(load=idle_load())], NOW_S + 2)
    await witness.tell()
    assert told.notes == []


async def test_what_redis_did_not_take_is_not_told_twice(witness, told):
    witness.look([silent()], NOW_S)
    witness.saw("a:1", 100, 1.0, NOW_S + 2)
    told.fails = True
    with pytest.raises(StoreUnavailable):
        await witness.tell()
    told.fails = False
    await witness.tell()
    assert told.notes == []
