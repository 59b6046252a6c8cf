"""Leases under any history and any concurrency: a worker never has more than its limit."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import fakeredis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from workers import keys
from workers.breaker import BreakerPolicy, Verdict
from workers.connection import connect
from workers.fleet import WorkerState
from workers.leases import Ask, End, Grant, lease_id
from workers.spec import WorkerSpec
from workers.store import FleetStore

pytestmark = pytest.mark.integration

NAMES = ("127.0.0.1:1", "127.0.0.1:2")
LONG_AGO = 1.0


async def make_ready(store, name, limit):
    registered = await store.register(WorkerSpec(url=f"http://{name}"))
    await store.write_state(name, registered.incarnation, WorkerState.READY)
    assert await store.write_limit(name, registered.incarnation, limit, "test", seen=1)


class Leases(RuleBasedStateMachine):
    """The store beside a model of it: for each worker its limit, its live leases, and those that lapsed.

    A lapsed lease lives again when it is renewed before anybody asked that worker for another.
    """

    def __init__(self, make_client):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.client = make_client()
        self.run(self.client.flushall())
        policy = BreakerPolicy(failure_threshold=10_000, rate_minimum=10_000)
        self.store = FleetStore(self.client, policy=policy, lease_ttl_s=1000, rng=random.Random(1))
        self.limit = dict.fromkeys(NAMES, 2)
        self.live = {name: set() for name in NAMES}
        self.lapsed = {name: set() for name in NAMES}
        self.ended = []
        self.last_call = []
        self.serial = 0
        for name in NAMES:
            self.run(make_ready(self.store, name, 2))

    def run(self, step):
        return self.loop.run_until_complete(step)

    def teardown(self):
        self.run(self.client.aclose())
        self.loop.close()

    def all_leases(self, *states):
        return [(name, lease) for state in states for name in NAMES for lease in sorted(state[name])]

    @rule(wishes=st.lists(st.permutations(NAMES), min_size=1, max_size=5))
    def acquire(self, wishes):
        asks = []
        for wish in wishes:
            self.serial += 1
            asks.append(Ask(lease_id("d", self.serial, 1), tuple(wish)))
        self.last_call = asks
        self.ask_for(asks)

    @precondition(lambda self: self.unfinished())
    @rule()
    def acquire_what_was_asked_before(self):
        """The same call once more, as it comes when its answer was lost; nobody asks for what has ended."""
        self.ask_for(self.unfinished())

    def unfinished(self):
        gone = {lease for _, lease in self.ended + self.all_leases(self.lapsed)}
        return [ask for ask in self.last_call if ask.lease not in gone]

    def ask_for(self, asks):
        held = {lease: name for name, lease in self.all_leases(self.live)}
        for ask, answer in zip(asks, self.run(self.store.acquire(asks)), strict=True):
            wanted = held.get(ask.lease) or self.first_with_room(ask)
            if ask.lease in held:
                self.drop_lapsed(wanted)
            assert (answer.worker_id if isinstance(answer, Grant) else None) == wanted
            if wanted is not None:
                self.live[wanted].add(ask.lease)
                assert ask.lease in held or len(self.live[wanted]) <= self.limit[wanted]

    def first_with_room(self, ask):
        for name in ask.candidates:
            self.drop_lapsed(name)
            if len(self.live[name]) < self.limit[name]:
                return name
        return None

    def drop_lapsed(self, name):
        self.ended += [(name, lease) for lease in self.lapsed[name]]
        self.lapsed[name].clear()

    @precondition(lambda self: self.all_leases(self.live))
    @rule(data=st.data(), verdict=st.sampled_from(list(Verdict)), times=st.integers(1, 3))
    def settle(self, data, verdict, times):
        name, lease = data.draw(st.sampled_from(self.all_leases(self.live)))
        freed = [self.run(self.store.settle([End(lease, name, 0, verdict)])) for _ in range(times)]
        assert freed == [1] + [0] * (times - 1)
        self.live[name].remove(lease)
        self.ended.append((name, lease))

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def settle_what_has_ended(self, data):
        name, lease = data.draw(st.sampled_from(self.ended))
        assert self.run(self.store.settle([End(lease, name, 0, Verdict.SUCCESS)])) == 0

    @precondition(lambda self: self.all_leases(self.live))
    @rule(data=st.data())
    def lapse(self, data):
        name, lease = data.draw(st.sampled_from(self.all_leases(self.live)))
        self.run(self.client.zadd(keys.LEASES.of(name), {lease: LONG_AGO}))
        self.live[name].remove(lease)
        self.lapsed[name].add(lease)

    @precondition(lambda self: self.all_leases(self.live, self.lapsed) or self.ended)
    @rule(data=st.data())
    def renew(self, data):
        name, lease = data.draw(st.sampled_from(self.all_leases(self.live, self.lapsed) + self.ended))
        gone = self.run(self.store.renew({name: [lease]}))
        assert gone == ((lease,) if (name, lease) in self.ended else ())
        if lease in self.lapsed[name]:
            self.lapsed[name].remove(lease)
            self.live[name].add(lease)

    @rule(name=st.sampled_from(NAMES), limit=st.integers(1, 4))
    def change_limit(self, name, limit):
        view = next(worker for worker in self.run(self.store.view()).workers if worker.id == name)
        assert self.run(
            self.store.write_limit(name, view.incarnation, limit, "test", seen=view.limit_version)
        )
        self.limit[name] = limit

    @invariant()
    def the_view_counts_what_lives(self):
        view = self.run(self.store.view())
        assert {worker.id: worker.leases for worker in view.workers} == {
            name: len(self.live[name]) for name in NAMES
        }


HISTORIES = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_any_history_on_a_real_server_keeps_the_limits(redis_url):
    run_state_machine_as_test(lambda: Leases(lambda: connect(redis_url)), settings=HISTORIES)


def test_any_history_on_the_fake_keeps_the_limits():
    def fake():
        return fakeredis.FakeAsyncRedis(decode_responses=True, server=fakeredis.FakeServer())

    run_state_machine_as_test(lambda: Leases(fake), settings=HISTORIES)


async def ask_from_eight_processes(redis_url, worker):
    """Ask for 500 leases at once; returns how many were granted, and how many of them as trials."""
    counts = [63] * 4 + [62] * 4
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.acquirers",
            redis_url,
            f"p{number}",
            str(count),
            worker,
            cwd=Path(__file__).parents[2],
            stdout=asyncio.subprocess.PIPE,
        )
        for number, count in enumerate(counts)
    ]
    said = [(await process.communicate())[0].split() for process in processes]
    return sum(int(granted) for granted, _ in said), sum(int(trials) for _, trials in said)


async def test_eight_processes_that_ask_for_500_leases_get_the_limit(valkey, redis_url):
    store = FleetStore(valkey)
    await make_ready(store, NAMES[0], 37)
    assert await ask_from_eight_processes(redis_url, NAMES[0]) == (37, 0)
    (worker,) = (await store.view()).workers
    assert worker.leases == 37


async def test_one_of_500_callers_gets_the_half_open_trial(valkey, redis_url):
    store = FleetStore(valkey)
    await make_ready(store, NAMES[0], 1000)
    await store.trip(NAMES[0], None, "test", seconds=0.001)
    assert await ask_from_eight_processes(redis_url, NAMES[0]) == (1, 1)
