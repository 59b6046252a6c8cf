"""Late binding: who waits gets a lease once there is room, and no lease is lost. The store is played."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import random
import time
from collections import Counter
from dataclasses import replace

import pytest
import structlog

from dispatcher.demand import Demand
from dispatcher.hedging import Hedging
from dispatcher.lookout import Lookout
from dispatcher.placement import Closing, Placement
from dispatcher.scheduler.question import Need
from dispatcher.scheduler.strategies import SchedulerPolicy, Strategies
from dispatcher.speeds import Speeds
from tests.fleets import view, worker
from workers.breaker import BreakerState, Verdict
from workers.errors import StoreUnavailable
from workers.leases import Grant, Refusal

A, B = "a:1", "b:1"


class Store:
    """A fleet in memory that grants up to each worker's limit; may be away, or hold its answer back."""

    def __init__(self, **limits):
        self.limits = limits or {A: 2}
        self.leases = {}
        self.settled = []
        self.renewed = []
        self.away = 0
        self.spoiled = 0
        self.lost = 0
        self.stalled = set()
        self.models = {}
        self.contexts = {}
        self.answers = asyncio.Event()
        self.answers.set()
        self.calls = asyncio.Event()

    async def _answer(self):
        self.calls.set()
        await self.answers.wait()
        if self.away:
            self.away -= 1
            raise StoreUnavailable("away")

    def count(self, name):
        return sum(held == name for held in self.leases.values())

    async def view(self):
        await self._answer()
        if self.spoiled:
            self.spoiled -= 1
            raise ValueError("spoiled")
        return view(
            *(
                worker(
                    name,
                    limit=limit,
                    leases=self.count(name),
                    load=None,
                    models=frozenset({self.models.get(name, "llama")}),
                    max_model_len=self.contexts.get(name),
                    **self.breaker(name),
                )
                for name, limit in self.limits.items()
            )
        )

    def breaker(self, name):
        return {"breaker": BreakerState.OPEN, "breaker_reason": "stalled"} if name in self.stalled else {}

    async def acquire(self, asks):
        await self._answer()
        answers = [self._one(ask) for ask in asks]
        if self.lost:
            self.lost -= 1
            raise StoreUnavailable("the answer got lost")
        return answers

    def _one(self, ask):
        for name in ask.candidates:
            if self.count(name) < self.limits[name]:
                self.leases[ask.lease] = name
                return Grant(name, 0, trial=False)
        return tuple(Refusal(name, "full", 0.0) for name in ask.candidates)

    async def settle(self, ends):
        await self._answer()
        for end in ends:
            self.settled.append(end)
            self.leases.pop(end.lease, None)
        return len(ends)

    async def renew(self, leases):
        self.renewed.append({name: tuple(ids) for name, ids in leases.items()})
        return ()


def need(model="llama", cost=10):
    return Need(model=model, prompt_tokens=2, asked_tokens=8, cost_tokens=cost)


def make(store, *, view_interval_s=0.001, rates=None, clock=time.monotonic, shared_demand=None):
    """`rates`: tokens per second and sequence that each worker was seen to write."""
    speeds = Speeds()
    for name in store.limits:
        speeds.saw(name, 100, 100 / (rates or {}).get(name, 100.0))
    lookout = Lookout(store, speeds, interval_s=view_interval_s, clock=clock, shared_demand=shared_demand)
    return Placement(
        store,
        lookout,
        Strategies(SchedulerPolicy()),
        speeds,
        Hedging(speeds),
        owner="d",
        rng=random.Random(1),
    )


@contextlib.asynccontextmanager
async def passes(placement):
    task = asyncio.create_task(placement.run())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until(holds):
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - passes have no event for tests
            await asyncio.sleep(0)


async def test_a_lease_names_its_worker_and_is_given_back_once():
    store = Store()
    placement = make(store)
    async with passes(placement):
        held = await placement.lease(need(), 1)
        assert (held.worker_id, held.url, placement.in_flight) == (A, f"http://{A}", 1)
        for _ in range(2):
            placement.give_back(held, Verdict.SUCCESS, "ok")
        await until(lambda: store.settled)
    assert [(end.lease, end.verdict) for end in store.settled] == [(held.lease, Verdict.SUCCESS)]
    assert (placement.in_flight, store.leases) == (0, {})


async def test_a_lease_has_its_time_though_a_worker_became_known_while_it_was_taken(monkeypatch):
    store = Store()
    placement = make(store)
    acquire = store.acquire

    async def answered_meanwhile(asks):
        placement.saw_answer(B, 10, 1.0, None)
        return await acquire(asks)

    monkeypatch.setattr(store, "acquire", answered_meanwhile)
    async with passes(placement):
        held = await placement.lease(need(), 1)
    assert math.isfinite(held.granted_s)


async def test_who_finds_no_room_waits_for_it():
    store = Store()
    placement = make(store)
    async with passes(placement):
        held = [await placement.lease(need(), 1) for _ in range(2)]
        third = asyncio.create_task(placement.lease(need(), 1))
        await until(lambda: placement.waiting == 1)
        placement.give_back(held[0], Verdict.SUCCESS)
        assert (await third).worker_id == A
        assert store.count(A) == 2


async def test_the_urgent_overtake():
    store = Store(**{A: 1})
    placement = make(store)
    order = []

    async def ask(name, urgency):
        held = await placement.lease(need(), urgency)
        order.append(name)
        placement.give_back(held, Verdict.SUCCESS)

    async with passes(placement), asyncio.TaskGroup() as group:
        first = await placement.lease(need(), 1)
        for name, urgency in (("low", 2), ("default", 1), ("high", 0)):
            group.create_task(ask(name, urgency))
        await until(lambda: placement.waiting == 3)
        placement.give_back(first, Verdict.SUCCESS)
    assert order == ["high", "default", "low"]


async def test_who_gives_up_while_the_lease_is_on_its_way_leaves_it_free():
    store = Store()
    placement = make(store)
    async with passes(placement):
        await until(lambda: True)
        task = asyncio.create_task(placement.lease(need(), 1))
        await store.calls.wait()
        store.answers.clear()
        await until(lambda: placement.waiting == 0 or store.leases)
        task.cancel()
        store.answers.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not store.leases and placement.in_flight == 0)


async def test_an_outage_is_waited_out_and_nothing_is_lost(monkeypatch):
    monkeypatch.setattr("dispatcher.placement._OUTAGE_PAUSE_S", (0.001, 0.002))
    store = Store()
    placement = make(store)
    async with passes(placement):
        held = await placement.lease(need(), 1)
        store.away = 3
        placement.give_back(held, Verdict.FAILURE, "reset")
        assert (await placement.lease(need(), 1)).worker_id == A
    assert [end.reason for end in store.settled] == ["reset"]


async def test_after_an_outage_what_is_held_is_renewed_before_anybody_gets_its_slot(monkeypatch):
    monkeypatch.setattr("dispatcher.placement._OUTAGE_PAUSE_S", (0.001, 0.002))
    store = Store()
    placement = make(store)
    async with passes(placement):
        held = await placement.lease(need(), 1)
        store.away = 1
        renewed_then = []
        plain = store.acquire

        async def acquire(asks):
            renewed_then.extend(store.renewed)
            return await plain(asks)

        store.acquire = acquire
        await placement.lease(need(), 1)
    assert renewed_then == [{A: (held.lease,)}]


async def test_a_pass_that_fails_is_told_and_the_next_one_grants_the_lease(monkeypatch):
    monkeypatch.setattr("dispatcher.placement._OUTAGE_PAUSE_S", (0.001, 0.002))
    store = Store()
    store.spoiled = 1
    placement = make(store)
    with structlog.testing.capture_logs() as logs:
        async with passes(placement), asyncio.timeout(10):
            assert (await placement.lease(need(), 1)).worker_id == A
    assert [line["log_level"] for line in logs if line["event"] == "cannot place requests now"] == ["error"]


async def test_a_lease_whose_grant_got_lost_on_the_way_is_freed(monkeypatch):
    monkeypatch.setattr("dispatcher.placement._OUTAGE_PAUSE_S", (0.001, 0.002))
    store = Store(**{A: 1, B: 1})
    store.lost = 1
    placement = make(store)
    async with passes(placement):
        held = [await placement.lease(need(), 1) for _ in range(2)]
    assert store.leases == {one.lease: one.worker_id for one in held}


async def test_ends_that_were_on_their_way_when_the_passes_ended_are_settled_at_last():
    store = Store()
    placement = make(store)
    async with passes(placement) as task:
        held = await placement.lease(need(), 1)
        store.calls.clear()
        store.answers.clear()
        placement.give_back(held, Verdict.SUCCESS, "ok")
        await store.calls.wait()
        task.cancel()
    store.answers.set()
    await placement.settle_all()
    assert [end.lease for end in store.settled] == [held.lease]


async def test_closing_sends_away_who_waits_and_whoever_comes():
    store = Store(**{A: 1})
    placement = make(store)
    async with passes(placement):
        held = await placement.lease(need(), 1)
        waiting = asyncio.create_task(placement.lease(need(), 1))
        await until(lambda: placement.waiting == 1)
        placement.close()
        for refused in (waiting, placement.lease(need(), 1)):
            with pytest.raises(Closing):
                await refused
        placement.give_back(held, Verdict.SUCCESS)
        await until(lambda: not store.leases)


class LargeFleet(Store):
    """A look at it takes so long on its clock."""

    def __init__(self, look_s):
        super().__init__(**{A: 3})
        self.look_s, self.now_s, self.looks = look_s, 0.0, 0

    async def view(self):
        self.looks += 1
        self.now_s += self.look_s
        return await super().view()

    def clock(self):
        return self.now_s


@pytest.mark.parametrize(("look_s", "apart_s"), [(0.001, 0.1), (0.1, 0.5), (60.0, 1.0)])
async def test_a_fleet_that_takes_long_to_look_at_is_looked_at_less_often(look_s, apart_s):
    store = LargeFleet(look_s)
    placement = make(store, view_interval_s=0.1, clock=store.clock)
    async with passes(placement):
        await placement.lease(need(), 1)
        store.now_s += 0.9 * apart_s
        await placement.lease(need(), 1)
        assert store.looks == 1
        store.now_s += 0.2 * apart_s
        await placement.lease(need(), 1)
        assert store.looks == 2


class Elsewhere:
    """What waits at other dispatchers, and what was told them of ours."""

    def __init__(self, *demands):
        self.demands = demands
        self.told = []

    async def exchange(self, mine, for_s):
        assert for_s > 0
        self.told.append(mine)
        return [self.demands] if self.demands else []


async def test_what_waits_here_is_told_to_others_with_every_look_until_it_has_its_lease():
    elsewhere = Elsewhere()
    store = Store(**{A: 1})
    placement = make(store, shared_demand=elsewhere)
    async with passes(placement):
        held = await placement.lease(need(), 1)
        waiting = asyncio.create_task(placement.lease(need(), 2))
        await until(lambda: elsewhere.told[-1:] == [[Demand("llama", 2, 1)]])
        placement.give_back(held, Verdict.SUCCESS)
        await waiting
        other = asyncio.create_task(placement.lease(need("nobody"), 1))
        elsewhere.told.clear()
        await until(lambda: [] in elsewhere.told)
        other.cancel()


async def test_a_slot_is_left_to_what_is_more_urgent_elsewhere():
    elsewhere = Elsewhere(Demand("llama", 0, 1))
    placement = make(Store(**{A: 2}), shared_demand=elsewhere)
    async with passes(placement):
        await placement.lease(need(), 1)
        waiting = asyncio.create_task(placement.lease(need(), 1))
        looks = len(elsewhere.told)
        await until(lambda: len(elsewhere.told) > looks + 2)
        assert not waiting.done()
        elsewhere.demands = ()
        await waiting


async def test_nobody_gets_a_second_attempt_while_first_ones_wait_elsewhere():
    elsewhere = Elsewhere(Demand("llama", 5, 1))
    store = Store(**{A: 1, B: 0})
    placement = make(store, rates={B: 1000.0}, shared_demand=elsewhere)
    async with passes(placement):
        first = await placement.lease(need(), 1)
        seconds = []
        first.join = seconds.append
        placement.hedging.wrote(100_000)
        store.limits[B] = 1
        placement.note_left(nothing=True)
        looks = len(elsewhere.told)
        await until(lambda: len(elsewhere.told) > looks + 2)
        assert not seconds
        elsewhere.demands = ()
        await until(lambda: seconds)


async def test_closing_sends_away_also_who_is_being_refused_at_that_moment():
    store = Store()
    placement = make(store, view_interval_s=1000.0)
    async with passes(placement):
        await placement.lease(need(), 1)
        store.limits[A] = 1  # which the look taken before does not know
        store.calls.clear()
        store.answers.clear()
        waiting = asyncio.create_task(placement.lease(need(), 1))
        await store.calls.wait()
        placement.close()
        store.answers.set()
        with pytest.raises(Closing):
            await waiting
    assert placement.waiting == 0


async def test_a_cancellation_that_meets_the_closing_stays_a_cancellation():
    placement = make(Store())
    task = asyncio.create_task(placement.lease(need(), 1))
    await until(lambda: placement.waiting == 1)
    placement.close()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_all_that_is_held_is_renewed():
    store = Store()
    placement = make(store)
    async with passes(placement):
        held = [await placement.lease(need(), 1) for _ in range(2)]
        await placement.renew()
    assert store.renewed == [{A: tuple(one.lease for one in held)}]


async def test_who_is_in_flight_where_nothing_moves_is_called_off_though_nobody_waits(monkeypatch):
    monkeypatch.setattr("dispatcher.placement._WATCH_S", 0.001)
    store = Store(**{A: 1, B: 1})
    placement = make(store)
    called_off = []
    async with passes(placement):
        for _ in range(2):
            held = await placement.lease(need(), 1)
            held.call_off = functools.partial(called_off.append, held.worker_id)
        store.stalled = {A}
        await until(lambda: called_off)
        store.calls.clear()
        await store.calls.wait()  # another look calls nobody off twice
    assert called_off == [A]


async def test_those_without_any_worker_take_no_room_from_others(monkeypatch):
    store = Store(**{A: 1})
    placement = make(store)
    async with passes(placement):
        lost = [asyncio.create_task(placement.lease(need("nobody"), 1)) for _ in range(40)]
        await until(lambda: placement.waiting == 40 and placement.has_room())
        assert placement.without_worker is not None
        assert (await placement.lease(need(), 1)).worker_id == A
        many = [asyncio.create_task(placement.lease(need(), 1)) for _ in range(40)]
        await until(lambda: not placement.has_room())
        for task in many + lost:
            task.cancel()


async def test_even_those_without_a_worker_are_bounded(monkeypatch):
    monkeypatch.setattr("dispatcher.quota._MOST_APART", 20)
    monkeypatch.setattr("dispatcher.quota.MOST_WAITING", 20)
    placement = make(Store())
    async with passes(placement):
        lost = [asyncio.create_task(placement.lease(need("nobody"), 1)) for _ in range(20)]
        await until(lambda: placement.waiting == 20 and not placement.has_room())
        for task in lost:
            task.cancel()


async def test_a_model_whose_worker_is_full_takes_no_room_from_another():
    store = Store(**{A: 1, B: 1})
    store.models = {A: "big", B: "small"}
    placement = make(store)
    async with passes(placement):
        held = await placement.lease(need("big"), 1)
        waiting = [asyncio.create_task(placement.lease(need("big"), 1)) for _ in range(20)]
        await until(lambda: placement.waiting == 20)
        assert await placement.room(["big", "small"], 1) == ["small"]
        assert placement.has_room()  # somebody idles, and another job may be for him
        other = await placement.lease(need("small"), 1)
        await until(lambda: not placement.has_room())
        room = asyncio.create_task(placement.room(["big"], 1))
        placement.give_back(other, Verdict.SUCCESS)
        await until(placement.has_room)
        assert not room.done()
        for task in waiting[:10]:
            task.cancel()
        placement.give_back(held, Verdict.SUCCESS)
        assert await room == ["big"]
        for task in waiting:
            task.cancel()


async def test_a_full_backlog_keeps_nobody_waiting_who_is_more_urgent():
    placement = make(Store(**{A: 1}))
    async with passes(placement):
        waiting = [asyncio.create_task(placement.lease(need(), 1)) for _ in range(20)]
        await until(lambda: not placement.has_room(1))
        assert placement.has_room(0)
        assert await asyncio.wait_for(placement.room(["llama"], 0), 10) == ["llama"]
        for task in waiting:
            task.cancel()


async def test_of_those_who_wait_for_room_one_brings_its_lines_when_there_is_some():
    placement = make(Store(**{A: 1}))
    reading, read = [], asyncio.Event()

    async def bring():
        await placement.room(["llama"], 1)
        with placement.announced(Counter({"llama": 32}), 1):
            reading.append(None)
            await read.wait()

    async with passes(placement):
        waiting = [asyncio.create_task(placement.lease(need(), 1)) for _ in range(20)]
        await until(lambda: not placement.has_room())
        feeding = [asyncio.create_task(bring()) for _ in range(3)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        await until(lambda: reading)
        assert (len(reading), placement.has_room()) == (1, True)  # who reads for long keeps no job waiting
        read.set()  # nothing joins: the next has room at once, though there is no pass any more
        await asyncio.wait_for(asyncio.gather(*feeding), 10)


async def test_whoever_waits_for_room_goes_on_when_the_dispatcher_ends():
    store = Store(**{A: 1})
    placement = make(store)
    async with passes(placement):
        waiting = [asyncio.create_task(placement.lease(need(), 1)) for _ in range(20)]
        await until(lambda: not placement.has_room())
        room = asyncio.create_task(placement.room(["llama"], 1))
        await asyncio.sleep(0)
        placement.close()
        assert await room == ["llama"]
        assert await placement.room(["llama"], 1) == ["llama"]
        await asyncio.gather(*waiting, return_exceptions=True)


async def test_nothing_waits_once_a_worker_appears():
    store = Store(**{A: 1})
    placement = make(store)
    async with passes(placement):
        task = asyncio.create_task(placement.lease(replace(need(), tried=frozenset({A})), 1))
        assert (await task).worker_id == A  # tried, but there is no other


@pytest.mark.parametrize("lack", ["context", "model", "it failed there"])
async def test_no_second_attempt_goes_where_the_request_could_not_go(lack):
    fit = "c:1"
    store = Store(**{A: 1, B: 0, fit: 0})
    tried = frozenset({B}) if lack == "it failed there" else frozenset()
    if lack == "context":
        store.contexts[B] = 9
    elif lack == "model":
        store.models[B] = "other"
    placement = make(store, rates={B: 1000.0, fit: 900.0})
    async with passes(placement):
        first = await placement.lease(replace(need(), tried=tried), 1)
        seconds = []
        first.join = seconds.append
        placement.hedging.wrote(100_000)
        store.limits[B] = store.limits[fit] = 1
        placement.note_left(nothing=True)
        await until(lambda: seconds)
        assert [second.worker_id for second in seconds] == [fit]


async def test_requests_that_end_while_second_attempts_are_being_placed_get_none():
    store = Store(**{A: 3, B: 0})
    placement = make(store, view_interval_s=0.0, rates={B: 1000.0})
    asked, held = [], []
    acquire = store.acquire

    async def all_end_meanwhile(asks):
        if held:
            asked.extend(ask.candidates for ask in asks)
            for one in held:
                one.join = None
                placement.give_back(one, Verdict.SUCCESS)
        return await acquire(asks)

    store.acquire = all_end_meanwhile
    async with passes(placement) as running:
        granted = [await placement.lease(need(), 1) for _ in range(3)]
        for one in granted:
            one.join = lambda second: pytest.fail("a request that has ended got a second attempt")
        held += granted
        placement.hedging.wrote(100_000)
        store.limits[B] = 3
        placement.note_left(nothing=True)
        await until(lambda: running.done() or (asked and not store.leases and not placement.in_flight))
        assert not running.done()
    assert asked == [(B,)]
