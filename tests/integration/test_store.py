"""The door to Redis, over a real Valkey and fakeredis alike: the fake is trusted as far as it agrees."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import structlog

from workers import breaker as pure
from workers import keys
from workers.breaker import Breaker, BreakerPolicy, BreakerState, Verdict
from workers.errors import UnknownWorker
from workers.evidence import NONE, Evidence
from workers.fleet import WorkerState
from workers.leases import Ask, End, Grant, lease_id
from workers.load import Load, LoadSource
from workers.spec import WorkerSpec
from workers.store import FleetStore

pytestmark = pytest.mark.integration

A, B = "127.0.0.1:1", "127.0.0.1:2"


@pytest.fixture(params=["valkey", "fake_redis"])
def store(request):
    client = request.getfixturevalue(request.param)
    return FleetStore(client, rng=random.Random(1))


async def ready(store, *names, limit=16):
    for name in names:
        registered = await store.register(WorkerSpec(url=f"http://{name}"))
        await store.write_state(name, registered.incarnation, WorkerState.READY, models=["m"])
        assert await store.write_limit(name, registered.incarnation, limit, "test", seen=1)


async def worker(store, name):
    return next(view for view in (await store.view()).workers if view.id == name)


async def test_the_same_url_in_four_spellings_is_one_worker(store):
    outcomes = [
        (await store.register(WorkerSpec(url=f"http://127.0.0.1:1{end}"))).outcome
        for end in ("", "/", "/v1", "/v1/")
    ]
    assert outcomes == ["created", "kept", "kept", "kept"]
    assert [view.id for view in (await store.view()).workers] == [A]


async def test_a_replaced_worker_lives_the_next_incarnation_and_carries_no_memo(store):
    await ready(store, A)
    first = await worker(store, A)
    assert await store.set_memo(A, first.incarnation, "404", 600)
    second = await store.register(WorkerSpec(url=f"http://{A}"), replace=True)
    assert second.incarnation > first.incarnation
    assert await store.memos([A]) == {}
    assert not await store.set_memo(A, first.incarnation, "late answer of the old process", 600)
    assert await store.memos([A]) == {}


async def test_the_models_that_a_person_gave_stand_above_those_that_the_worker_names(store):
    await store.register(WorkerSpec(url=f"http://{A}", models=("alias",)))
    await ready(store, B)
    given, named = await worker(store, A), await worker(store, B)
    await store.write_state(A, given.incarnation, WorkerState.READY, models=["m"])
    assert ((await worker(store, A)).models, given.models_given) == ({"alias"}, True)
    assert (named.models, named.models_given) == ({"m"}, False)


async def test_a_removed_worker_leaves_no_key_behind(store):
    await ready(store, A)
    await store.acquire([Ask(lease_id("d", 1, 5), (A,))])
    assert await store.remove(A)
    assert not await store.remove(A)
    assert [key async for key in store.client.scan_iter(match=keys.WORKER.of(A) + "*")] == []
    assert (await store.view()).workers == ()


async def test_a_newer_load_is_never_overwritten_by_an_older(store):
    await ready(store, A)
    incarnation = (await worker(store, A)).incarnation
    newer = Load(source=LoadSource.NATIVE, sampled_at=200.0, received_at=200.0, running=2)
    assert await store.write_load(A, incarnation, newer)
    assert not await store.write_load(A, incarnation, newer.model_copy(update={"sampled_at": 100.0}))
    assert not await store.write_load(A, incarnation + 1, newer.model_copy(update={"sampled_at": 300.0}))
    assert (await worker(store, A)).load == newer


async def test_a_load_of_a_time_that_is_still_to_come_is_overwritten(store):
    """Redis' clock went back, as in a failover to a host whose clock is behind."""
    await ready(store, A)
    incarnation, now_s = (await worker(store, A)).incarnation, await store.now()
    ahead = Load(source=LoadSource.NATIVE, sampled_at=now_s + 60, received_at=now_s + 60, running=2)
    assert await store.write_load(A, incarnation, ahead)
    behind = ahead.model_copy(update={"sampled_at": now_s, "received_at": now_s})
    assert await store.write_load(A, incarnation, behind)
    assert (await worker(store, A)).load == behind


async def test_unknown_stays_unknown_in_redis(store):
    await ready(store, A)
    load = Load(source=LoadSource.METRICS, sampled_at=1.5, received_at=2.5, running=0)
    await store.write_load(A, (await worker(store, A)).incarnation, load)
    fields = await store.client.hgetall(keys.LOAD.of(A))
    assert fields == {"source": "metrics", "sampled_at": "1.5", "received_at": "2.5", "running": "0"}


async def test_a_lease_is_taken_on_the_first_candidate_with_room(store):
    await ready(store, A, B, limit=1)
    asks = [Ask(lease_id("d", n, 10), (A, B)) for n in range(3)]
    first, second, third = await store.acquire(asks)
    assert (first, second) == (Grant(A, 0, trial=False), Grant(B, 0, trial=False))
    assert [(refusal.worker_id, refusal.why) for refusal in third] == [(A, "full"), (B, "full")]
    assert [view.leases for view in (await store.view()).workers] == [1, 1]


async def test_a_call_that_is_sent_again_gets_the_same_answer_and_takes_nothing_more(store):
    await ready(store, A, B, limit=1)
    asks = [Ask(lease_id("d", number, 10), (A, B)) for number in range(2)]
    answers = await store.acquire(asks)
    await store.client.zadd(keys.LEASES.of(A), {asks[0].lease: await store.now() + 1.0})
    assert await store.acquire(asks) == answers == [Grant(A, 0, trial=False), Grant(B, 0, trial=False)]
    assert [view.leases for view in (await store.view()).workers] == [1, 1]
    expiry = await store.client.zscore(keys.LEASES.of(A), asks[0].lease)
    assert expiry > await store.now() + 1.0  # the time that the first answer took is not lost


async def test_a_trial_that_is_asked_for_again_is_the_same_trial(store):
    await ready(store, A)
    await store.trip(A, None, "test", seconds=0.001)
    while (await store.now()) < (await worker(store, A)).breaker_open_until:
        pass  # Redis' clock moves on
    ask = Ask(lease_id("d", 1, 1), (A,))
    (first,) = await store.acquire([ask])
    assert await store.acquire([ask]) == [first] == [Grant(A, first.epoch, trial=True)]
    await store.settle([End(ask.lease, A, first.epoch, Verdict.SUCCESS)])
    assert (await worker(store, A)).breaker is BreakerState.CLOSED


async def test_leases_since_the_sample_are_counted_with_their_tokens_and_no_others(store):
    await ready(store, A)
    await store.acquire([Ask(lease_id("d", 1, 7), (A,))])
    now = await store.now()
    await store.write_load(
        A,
        (await worker(store, A)).incarnation,
        Load(source=LoadSource.NATIVE, sampled_at=now, received_at=now),
    )
    await store.acquire([Ask(lease_id("d", 2, 30), (A,)), Ask(lease_id("e", 1, 12), (A,))])
    view = await worker(store, A)
    assert (view.leases, view.leases_since_sample, view.tokens_since_sample) == (3, 2, 42)


async def test_settling_twice_frees_one_lease_and_feeds_the_breaker_once(store):
    await ready(store, A)
    lease = lease_id("d", 1, 7)
    await store.acquire([Ask(lease, (A,))])
    end = End(lease, A, 0, Verdict.FAILURE, "reset")
    assert [await store.settle([end]), await store.settle([end])] == [1, 0]
    assert (await store.client.hget(keys.BREAKER.of(A), "failures")) == "1"
    assert (await worker(store, A)).leases == 0


async def test_failures_of_what_was_sent_before_a_worker_was_replaced_do_not_count(store):
    await ready(store, A)
    leases = [lease_id("d", number, 1) for number in range(3)]
    grants = await store.acquire([Ask(lease, (A,)) for lease in leases])
    await store.trip(A, None, "the old one stalled", seconds=60)
    await store.register(WorkerSpec(url=f"http://{A}"), replace=True)
    await store.write_state(A, (await worker(store, A)).incarnation, WorkerState.READY, models=["m"])
    (new,) = await store.acquire([Ask(lease_id("d", 9, 1), (A,))])
    assert new.epoch > max(grant.epoch for grant in grants)
    ends = [
        End(lease, A, grant.epoch, Verdict.FAILURE, "reset")
        for lease, grant in zip(leases, grants, strict=True)
    ]
    assert await store.settle(ends) == 3
    view = await worker(store, A)
    assert (view.breaker, view.breaker_trips) == (BreakerState.CLOSED, 0)
    assert await store.client.hget(keys.BREAKER.of(A), "failures") == "0"


async def test_leases_that_nobody_renews_end_by_themselves(store):
    await ready(store, A, limit=1)
    store.lease_ttl_s = 0.001
    await store.acquire([Ask(lease_id("dead", 1, 1), (A,))])
    while (await worker(store, A)).leases:
        pass  # Redis' clock moves on
    (grant,) = await store.acquire([Ask(lease_id("alive", 1, 1), (A,))])
    assert isinstance(grant, Grant)


async def test_renewing_keeps_a_lease_and_names_those_that_are_gone(store):
    await ready(store, A)
    kept, gone = lease_id("d", 1, 1), lease_id("d", 2, 1)
    await store.acquire([Ask(kept, (A,))])
    before = await store.client.zscore(keys.LEASES.of(A), kept)
    assert await store.renew({A: [kept, gone]}) == (gone,)
    assert await store.client.zscore(keys.LEASES.of(A), kept) >= before
    assert await store.client.zscore(keys.LEASES.of(A), gone) is None


async def test_a_burst_of_refusals_halves_the_limit_once(store):
    await ready(store, A, limit=16)
    leases = [lease_id("d", n, 1) for n in range(8)]
    await store.acquire([Ask(lease, (A,)) for lease in leases])
    await store.settle([End(lease, A, 0, Verdict.NEUTRAL, "queue full", halve=True) for lease in leases])
    view = await worker(store, A)
    assert (view.limit, view.limit_reason, view.breaker) == (8, "queue full", BreakerState.CLOSED)


async def test_a_deferral_is_never_shortened_by_a_later_smaller_one(store):
    await ready(store, A)
    leases = [lease_id("d", n, 1) for n in range(2)]
    await store.acquire([Ask(lease, (A,)) for lease in leases])
    await store.settle([End(leases[0], A, 0, Verdict.NEUTRAL, "429", defer_s=60)])
    until = (await worker(store, A)).deferred_until
    await store.settle([End(leases[1], A, 0, Verdict.NEUTRAL, "429", defer_s=5)])
    assert (await worker(store, A)).deferred_until == until
    (refused,) = await store.acquire([Ask(lease_id("d", 3, 1), (A,))])
    assert [(r.why, r.again_at) for r in refused] == [("deferred", until)]


async def test_a_draining_worker_takes_no_lease_and_the_monitor_cannot_undo_it(store):
    await ready(store, A)
    await store.drain(f"http://{A}/v1", deadline_s=60)
    view = await worker(store, A)
    await store.write_state(A, view.incarnation, WorkerState.READY)
    (refused,) = await store.acquire([Ask(lease_id("d", 1, 1), (A,))])
    assert [refusal.why for refusal in refused] == ["not ready"]
    with pytest.raises(UnknownWorker):
        await store.drain(B, deadline_s=1)


async def test_a_limit_changed_meanwhile_is_not_overwritten(store):
    await ready(store, A)
    seen = await worker(store, A)
    assert await store.write_limit(A, seen.incarnation, 32, "grows", seen=seen.limit_version)
    assert not await store.write_limit(A, seen.incarnation, 99, "stale", seen=seen.limit_version)
    assert (await worker(store, A)).limit == 32


async def test_evidence_is_counted_together_for_the_limit_that_it_is_about(store):
    await ready(store, A, B)
    since = {name: (await worker(store, name)).limit_since for name in (A, B)}
    assert (await worker(store, A)).evidence == NONE
    notes = [(A, since[A], Evidence(3, 300, 1.5, 48)), (B, since[B] - 1, Evidence(9, 900, 9.0, 90))]
    assert await store.note_evidence(notes) == 1
    assert await store.note_evidence(notes[:1]) == 1
    assert (await worker(store, A)).evidence == Evidence(6, 600, 3.0, 96)
    assert (await worker(store, B)).evidence == NONE
    assert await store.note_evidence([("127.0.0.1:9", since[A], Evidence(1, 1, 1.0, 1))]) == 0
    assert not await store.client.exists(keys.LIMIT.of("127.0.0.1:9"))


async def test_evidence_goes_with_the_limit_that_it_was_about(store):
    async def with_evidence():
        view = await worker(store, A)
        assert await store.note_evidence([(A, view.limit_since, Evidence(5, 50, 5.0, 5))]) == 1
        return view

    await ready(store, A, limit=16)
    view = await with_evidence()
    assert await store.write_limit(A, view.incarnation, 24, "try 24", seen=view.limit_version)
    assert (await worker(store, A)).evidence == NONE
    await with_evidence()
    await store.acquire([Ask(lease_id("d", 1, 1), (A,))])
    await store.settle([End(lease_id("d", 1, 1), A, 0, Verdict.NEUTRAL, "429", halve=True)])
    assert (await worker(store, A)).evidence == NONE
    view = await with_evidence()
    assert await store.write_limit(A, view.incarnation, view.limit, "measure", seen=view.limit_version)
    assert (await worker(store, A)).evidence == NONE
    view = await with_evidence()
    await store.next_incarnation(A, view.incarnation, "restarted")
    assert (await worker(store, A)).evidence == NONE


async def test_evidence_that_cannot_be_read_is_none_and_hides_nobody(store):
    await ready(store, A)
    good = {"answers": "5", "answer_tokens": "50", "answer_ms": "500", "answer_leases": "80"}
    await store.client.hset(keys.LIMIT.of(A), mapping=good)
    assert (await worker(store, A)).evidence == Evidence(5, 50, 0.5, 80)
    for spoiled in ({"answers": "many"}, {"answers": "5", "answer_ms": "nan"}):
        await store.client.hset(keys.LIMIT.of(A), mapping=spoiled)
        assert (await worker(store, A)).evidence == NONE


async def test_only_one_trial_is_granted_fleet_wide(store):
    await ready(store, A, limit=50)
    await store.trip(A, None, "test", seconds=0.001)
    while (await store.now()) < (await worker(store, A)).breaker_open_until:
        pass  # Redis' clock moves on
    answers = await store.acquire([Ask(lease_id(f"d{n}", 1, 1), (A,)) for n in range(50)])
    assert [answer.trial for answer in answers if isinstance(answer, Grant)] == [True]


async def test_a_healed_worker_restarts_with_a_low_limit(store):
    await ready(store, A, limit=50)
    await store.trip(A, None, "test", seconds=0.001)
    while (await store.now()) < (await worker(store, A)).breaker_open_until:
        pass  # Redis' clock moves on
    lease = lease_id("d", 1, 1)
    (grant,) = await store.acquire([Ask(lease, (A,))])
    await store.settle([End(lease, A, grant.epoch, Verdict.SUCCESS)])
    view = await worker(store, A)
    assert (view.breaker, view.limit) == (BreakerState.CLOSED, store.policy.restart_limit)


async def test_another_observer_of_the_same_restart_changes_nothing(store):
    await ready(store, A)
    seen = (await worker(store, A)).incarnation
    first = await store.next_incarnation(A, seen, "start time changed")
    assert await store.next_incarnation(A, seen, "start time changed") == first > seen
    assert await store.next_incarnation(B, 1, "never registered") == 0


async def test_a_new_life_starts_from_a_first_limit_whatever_the_last_one_had_learned(store):
    await ready(store, A, limit=200)
    seen = await worker(store, A)
    await store.next_incarnation(A, seen.incarnation, "start time changed")
    view = await worker(store, A)
    assert (view.limit, view.limit_reason, view.limit_version) == (16, "first limit of a new life", 1)
    assert not await store.write_limit(A, seen.incarnation, 400, "late", seen=1)


async def test_a_new_life_has_the_limit_that_a_person_gave(store):
    given = await store.register(WorkerSpec(url=f"http://{A}", max_running=8))
    await store.write_limit(A, given.incarnation, 9, "test", seen=1)
    await store.next_incarnation(A, given.incarnation, "start time changed")
    assert (await worker(store, A)).limit == 8


async def test_a_monitor_whose_heartbeat_is_still_to_come_is_not_live(store):
    await store.client.zadd(keys.MONITORS.of(), {"of a clock ahead": await store.now() + 60})
    assert await store.monitor_heartbeat("one", 3.0) == ("one",)


async def test_live_monitors_are_named_and_silent_ones_forgotten(store):
    assert await store.monitor_heartbeat("b", 60) == ("b",)
    assert await store.monitor_heartbeat("a", 60) == ("a", "b")
    await store.client.zadd(keys.MONITORS.of(), {"b": 1})
    assert await store.monitor_heartbeat("a", 60) == ("a",)


@pytest.mark.parametrize("seed", range(6))
async def test_the_breaker_in_redis_follows_the_pure_table(store, seed, monkeypatch):
    """Random histories; the clock of the pure twin is read off what the script stored."""
    rng = random.Random(seed)
    policy = BreakerPolicy(base_s=0.002, cap_s=0.01, rate_minimum=6, trial_s=0.004, restart_limit=1000)
    store = FleetStore(store.client, policy=policy, rng=random.Random(0))
    monkeypatch.setattr(store, "_jitter", lambda: 0.0)
    await ready(store, A, limit=1000)
    twin, running, serial = Breaker(), {}, 0
    for _ in range(150):
        if running and rng.random() < 0.6:
            lease = rng.choice(sorted(running))
            verdict = rng.choice(list(Verdict))
            epoch = running.pop(lease)
            before = await store.now()
            await store.settle([End(lease, A, epoch, verdict, "why")])
            twin = pure.report(twin, lease, epoch, verdict, before, policy, reason="why")
        else:
            serial += 1
            lease = lease_id("d", serial, 1)
            (answer,) = await store.acquire([Ask(lease, (A,))])
            stored = await store.client.hgetall(keys.BREAKER.of(A))
            if isinstance(answer, Grant):
                running[lease] = answer.epoch
                now = float(stored["trial_until"]) - policy.trial_s if answer.trial else await store.now()
            else:
                now = twin.open_until - 1e-6 if twin.state is BreakerState.OPEN else twin.trial_until - 1e-6
            twin, admission = pure.admit(twin, lease, now, policy)
            assert (admission.admitted, admission.trial) == (
                isinstance(answer, Grant),
                isinstance(answer, Grant) and answer.trial,
            )
        stored = await store.client.hgetall(keys.BREAKER.of(A))
        if stored:
            assert (stored["state"], int(stored["epoch"]), int(stored["trips"]), int(stored["failures"])) == (
                twin.state,
                twin.epoch,
                twin.trips,
                twin.failures,
            )
            assert stored["trial"] == twin.trial
            twin = replace(
                twin,
                open_until=float(stored["open_until"]),
                trial_until=float(stored["trial_until"]),
                healthy_since=float(stored["healthy_since"]),
            )


# -- what somebody spoiled -----------------------------------------------------------------------------------

LOAD = Load(source=LoadSource.NATIVE, sampled_at=1.0, received_at=1.0, running=2)


async def loaded(store, *names):
    await ready(store, *names)
    for name in names:
        assert await store.write_load(name, (await worker(store, name)).incarnation, LOAD)


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("token_rate", "inf"),
        ("running", "many"),
        ("source", "tea leaves"),
        *(("sampled_at", text) for text in ("yesterday", "nan", "inf", "")),
    ],
)
async def test_a_load_that_cannot_be_read_is_unknown_until_the_next_and_hides_nobody_elses(
    store, field, text
):
    await loaded(store, A, B)
    await store.client.hset(keys.LOAD.of(A), field, text)
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            assert [one.load for one in (await store.view()).workers] == [None, LOAD]
    assert [(line["worker"], line["record"]) for line in logs] == [(A, "load")]
    assert await store.write_load(A, (await worker(store, A)).incarnation, LOAD)
    assert [one.load for one in (await store.view()).workers] == [LOAD, LOAD]


async def test_what_a_newer_version_adds_to_a_load_spoils_nothing(store):
    await loaded(store, A)
    await store.client.hset(keys.LOAD.of(A), "temperature", "80")
    assert (await worker(store, A)).load == LOAD


@pytest.mark.parametrize(
    ("key", "field", "text"),
    [
        (keys.WORKER, "state", "asleep"),
        (keys.WORKER, "incarnation", "first"),
        (keys.WORKER, "models", "[1"),
        (keys.WORKER, "weight", "nan"),
        (keys.LIMIT, "value", "inf"),
        (keys.LIMIT, "since", "-inf"),
        (keys.BREAKER, "state", "ajar"),
    ],
)
async def test_a_worker_whose_record_cannot_be_read_is_left_out_and_hides_nobody_else(
    store, key, field, text
):
    await loaded(store, A, B)
    was = await store.client.hget(key.of(A), field)
    await store.client.hset(key.of(A), field, text)
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            assert [one.id for one in (await store.view()).workers] == [B]
    assert [(line["worker"], line["record"]) for line in logs] == [(A, "record")]
    await (store.client.hset(key.of(A), field, was) if was else store.client.hdel(key.of(A), field))
    assert [one.id for one in (await store.view()).workers] == [A, B]


async def test_a_record_without_a_url_is_no_worker(store):
    await ready(store, A, B)
    await store.client.hdel(keys.WORKER.of(A), "url")
    assert [one.id for one in (await store.view()).workers] == [B]


async def test_a_memo_that_cannot_be_read_is_none(store):
    await ready(store, A, B)
    for name in (A, B):
        assert await store.set_memo(name, (await worker(store, name)).incarnation, "404", 600)
    await store.client.hset(keys.MEMO.of(A), "until", "soon")
    assert set(await store.memos([A, B])) == {B}
