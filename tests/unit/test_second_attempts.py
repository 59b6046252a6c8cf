"""Second attempts: which requests get one, what they may cost, and that exactly one of two answers wins."""

from __future__ import annotations

import asyncio

import pytest

from dispatcher.hedges import Candidate, Hedge, choose
from dispatcher.hedging import MOST_TOKENS, Hedging
from dispatcher.race import Race
from dispatcher.speeds import Speeds

SPEEDS = {"slow": 10.0, "equal": 11.0, "fast": 40.0, "faster": 80.0}


EVERYBODY = frozenset(SPEEDS)


def running(lease, worker="slow", since_s=0.0, tokens=1000, may=EVERYBODY):
    return Candidate(lease, worker, since_s, tokens, frozenset(may))


def chosen(candidates, free, *, now_s=10.0, foretold=True):
    return choose(candidates, free, SPEEDS, now_s, foretold=foretold)


def test_the_least_progressed_goes_to_the_fastest_free_slot():
    candidates = [running("old", since_s=0), running("new", since_s=9)]
    assert chosen(candidates, {"fast": 1, "faster": 1}) == [Hedge("new", "faster"), Hedge("old", "fast")]
    assert chosen(candidates, {"fast": 2}) == [Hedge("new", "fast"), Hedge("old", "fast")]


def test_of_unknown_length_nobody_takes_a_slower_slot_while_a_faster_one_comes_free_in_a_moment():
    candidates = [running("a"), running("b", worker="faster")]
    assert chosen(candidates, {"fast": 4}, foretold=False) == []
    assert chosen(candidates, {"faster": 1}, foretold=False) == [Hedge("a", "faster")]
    standing = running("b", worker="faster", tokens=100)
    assert chosen([running("a"), standing], {"fast": 4}, foretold=False)[0] == Hedge("a", "fast")


def test_there_are_no_more_second_attempts_than_free_slots():
    assert len(chosen([running(str(n)) for n in range(5)], {"fast": 2})) == 2


@pytest.mark.parametrize("foretold", [True, False])
def test_slots_of_workers_that_could_not_take_a_request_are_nothing_to_it(foretold):
    of_one_model = {"slow", "fast"}
    free = {"faster": 4, "fast": 1}
    assert chosen([running("a", may=of_one_model)], free, foretold=foretold) == [Hedge("a", "fast")]
    both = [running("a", may=of_one_model), running("b", may=of_one_model), running("c", may={"faster"})]
    hedges = chosen(both, free, foretold=foretold)
    assert sorted(hedge.worker_id for hedge in hedges) == ["fast", "faster"]
    assert Hedge("c", "faster") in hedges


@pytest.mark.parametrize("foretold", [True, False])
def test_what_stands_still_on_the_fastest_worker_with_room_goes_to_another(foretold):
    standing = running("a", worker="faster", tokens=1000)
    free = {"fast": 1, "faster": 2}
    assert chosen([standing], free, now_s=51, foretold=foretold) == [Hedge("a", "fast", idle=True)]


def test_who_hangs_is_rescued_by_a_worker_of_its_own_model():
    silent = running("a", worker="unknown", may={"unknown", "fast"})
    assert chosen([silent], {"faster": 4, "fast": 1}, now_s=51) == [Hedge("a", "fast", idle=True)]


def test_a_worker_that_is_hardly_faster_gets_none():
    assert chosen([running("a")], {"equal": 4}) == []


def test_a_worker_of_unknown_speed_takes_none():
    assert chosen([running("a")], {"unknown": 1}) == []


def test_a_worker_that_never_answered_gives_what_another_would_have_answered_long_ago():
    silent = running("a", worker="unknown", tokens=1000)  # the fast one needs 25 s at most
    assert chosen([silent], {"fast": 1}, now_s=49) == []
    assert chosen([silent], {"fast": 1}, now_s=51, foretold=False) == [Hedge("a", "fast", idle=True)]


def test_a_fast_worker_that_stands_still_gives_to_a_slower_one_and_never_to_itself():
    standing = running("a", worker="faster", tokens=1000)  # 12.5 s at most; the fast one needs 25 s
    assert chosen([standing], {"fast": 1}, now_s=49) == []
    assert chosen([standing], {"faster": 2}, now_s=51) == []
    assert chosen([standing], {"fast": 1}, now_s=51) == [Hedge("a", "fast", idle=True)]


def test_what_is_foretold_to_be_nearly_done_is_left_alone():
    nearly = running("a", since_s=0, tokens=120)  # 12 s in all, 2 s are left; the fast one needs 3 s
    assert chosen([nearly], {"fast": 1}, now_s=10) == []
    assert chosen([nearly], {"fast": 1}, now_s=10, foretold=False) == [Hedge("a", "fast")]


def test_what_should_have_ended_long_ago_waits_in_its_engine_and_is_worth_it():
    waiting = running("a", since_s=0, tokens=50)
    assert chosen([waiting], {"fast": 1}, now_s=9) == [Hedge("a", "fast")]
    assert chosen([waiting], {"fast": 1}, now_s=100) == [Hedge("a", "fast", idle=True)]


def account(*, answers=100, tokens=100):
    speeds = Speeds()
    hedging = Hedging(speeds)
    for _ in range(answers):
        speeds.saw("slow", tokens, 1.0, allowed=tokens)
        hedging.wrote(tokens)
    return hedging


def test_second_attempts_cost_a_bounded_part_of_all_tokens():
    hedging = account()
    candidates = [running(str(n), tokens=100) for n in range(50)]
    begun = 0
    while hedges := hedging.pick(candidates, {"fast": 50}, SPEEDS, 1.0):
        for _ in hedges:
            hedging.made_one(100)
            begun += 1
    assert begun * 100 == MOST_TOKENS * 100 * 100
    assert hedging.made == begun


def test_what_second_attempts_cost_is_what_the_lost_ones_wrote():
    hedging = account()  # 500 tokens may be spent
    charges = [hedging.made_one(100) for _ in range(5)]
    assert charges == [100] * 5
    waiting = [running("a", tokens=100)]
    assert hedging.pick(waiting, {"fast": 1}, SPEEDS, 1.0) == []
    hedging.lost_one(100, 20)
    assert hedging.pick(waiting, {"fast": 1}, SPEEDS, 1.0) == []
    hedging.lost_one(100, 70)
    assert len(hedging.pick(waiting, {"fast": 1}, SPEEDS, 1.0)) == 1
    hedging.lost_one(100, 300)
    assert hedging.pick(waiting, {"fast": 1}, SPEEDS, 1.0) == []


def test_second_attempts_beside_attempts_that_stand_still_cost_nothing():
    hedging = account(answers=0)
    candidates = [running(str(n), worker="unknown", tokens=100) for n in range(50)]
    hedges = hedging.pick(candidates, {"fast": 50}, SPEEDS, 10.0)
    assert len(hedges) == 50
    for hedge in hedges:
        hedging.made_one(100, idle=hedge.idle)
    assert hedging.made == 50
    hedging.wrote(100_000)
    assert len(hedging.pick([running("slow", tokens=100)], {"fast": 1}, SPEEDS, 1.0)) == 1


def test_answers_as_long_as_allowed_are_foretold_and_others_are_not():
    speeds = Speeds()
    for _ in range(50):
        speeds.saw("a", 100, 1.0, allowed=100)
    assert speeds.foretold
    assert speeds.mean_answer == pytest.approx(100, rel=0.3)
    for _ in range(200):
        speeds.saw("a", 100, 1.0, allowed=2048)
    assert not speeds.foretold


class Attempt:
    """An attempt whose end the test decides."""

    def __init__(self):
        self.end = asyncio.get_running_loop().create_future()
        self.begun = asyncio.Event()
        self.called_off = False

    async def run(self):
        self.begun.set()
        try:
            return await self.end
        except asyncio.CancelledError:
            self.called_off = True
            raise


def raced(first):
    """A request's task, and the future of its race. Good results and refusals are usable, and only the good
    ones win.
    """
    made = asyncio.get_running_loop().create_future()

    async def request():
        race = Race(
            lambda result: result.startswith(("good", "refused")), lambda result: result.startswith("good")
        )
        made.set_result(race)
        return await race.run(first.run())

    return asyncio.create_task(request()), made


async def both():
    first, second = Attempt(), Attempt()
    task, made = raced(first)
    race = await made
    await first.begun.wait()
    race.join(second.run, never_begun=pytest.fail)
    await second.begun.wait()
    return task, race, first, second


async def test_a_request_without_a_second_attempt_ends_with_its_first():
    first = Attempt()
    task, _ = raced(first)
    first.end.set_result("good")
    assert await task == "good"


async def test_the_first_answer_wins_and_the_second_is_called_off():
    task, race, first, second = await both()
    first.end.set_result("good first")
    assert await task == "good first"
    assert second.called_off
    assert not race.open


async def test_the_second_answer_wins_and_the_first_is_called_off():
    task, _, first, second = await both()
    second.end.set_result("good second")
    assert await task == "good second"
    assert first.called_off


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
async def test_two_answers_in_the_same_moment_make_one_result(order):
    task, _, first, second = await both()
    attempts = {"first": first, "second": second}
    for name in order:
        attempts[name].end.set_result(f"good {name}")
    assert await task in ("good first", "good second")
    assert not task.cancelling()


async def test_a_second_attempt_that_fails_leaves_the_first_alone():
    task, _, first, second = await both()
    second.end.set_result("bad second")
    await asyncio.sleep(0)
    assert not task.done()
    first.end.set_result("good first")
    assert await task == "good first"


async def test_what_only_the_second_worker_refuses_does_not_end_the_first():
    task, _, first, second = await both()
    second.end.set_result("refused second")
    await asyncio.sleep(0)
    assert not task.done()
    first.end.set_result("good first")
    assert await task == "good first"


async def test_what_the_first_worker_refuses_is_refused():
    task, _, first, second = await both()
    first.end.set_result("refused first")
    assert await task == "refused first"
    assert second.called_off


async def test_what_fails_at_the_first_and_is_refused_by_the_second_is_tried_again():
    task, _, first, second = await both()
    second.end.set_result("refused second")
    first.end.set_result("bad first")
    assert await task == "bad first"


async def test_a_first_attempt_that_fails_waits_for_the_second():
    task, _, first, second = await both()
    first.end.set_result("bad first")
    await asyncio.sleep(0)
    second.end.set_result("good second")
    assert await task == "good second"


async def test_when_both_fail_the_request_ends_with_the_first_failure():
    task, _, first, second = await both()
    first.end.set_result("bad first")
    second.end.set_result("bad second")
    assert await task == "bad first"


async def test_cancelling_the_request_calls_off_both():
    task, _, first, second = await both()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert first.called_off
    assert second.called_off


@pytest.mark.parametrize("ending", ["the first is usable", "the request is cancelled"])
async def test_a_second_attempt_that_is_called_off_before_its_first_step_is_told_of(ending):
    first, second, told = Attempt(), Attempt(), []
    task, made = raced(first)
    race = await made
    await first.begun.wait()
    # Heard of before the second attempt's task has its first turn.
    if ending == "the first is usable":
        first.end.set_result("good")
    else:
        task.cancel()
    race.join(second.run, never_begun=lambda: told.append("never begun"))
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert (told, second.begun.is_set()) == (["never begun"], False)


async def test_a_cancellation_beside_a_won_race_is_not_lost():
    task, _, _first, second = await both()
    second.end.set_result("good second")
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
