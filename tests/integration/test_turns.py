"""Which job of a queue is next, over a real server: batches by turns, others first, each job once."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import pytest

from dispatcher.turns import Turns
from workers import keys
from workers.connection import connect_sync

pytestmark = pytest.mark.integration

QUEUE = "rq:queue:default"
INTERMEDIATE = f"{QUEUE}:intermediate"
LATER_S = 9e9
A, B, C = (f"batch_{letter * 24}" for letter in "abc")
MEMORY = [key.of("default") for key in (keys.QUEUE_MEMORY, keys.QUEUE_TURNS, keys.QUEUE_EXPRESS)]


@pytest.fixture
def connection(redis_url):
    client = connect_sync(redis_url)
    yield client
    client.close()


class Desk:
    """One queue, as RQ and we use it."""

    def __init__(self, connection, look_s=1e9):
        self.connection = connection
        self.turns = Turns(connection, look_s=look_s)

    def knows(self, batch, *, share=1.0, expires_at=LATER_S, costs="", cost_total=100, shards=1):
        fields = {"share": share, "expires_at": expires_at, "shard_costs": costs}
        self.connection.hset(
            keys.BATCH.of(batch), mapping=fields | {"cost_total": cost_total, "shards": shards}
        )

    def push(self, *jobs, front=False):
        (self.connection.lpush if front else self.connection.rpush)(QUEUE, *jobs)

    def push_shards(self, batch, count, first=0, **terms):
        self.knows(batch, **terms)
        self.push(*(f"{batch}-{shard}" for shard in range(first, first + count)))

    def take(self):
        return self.turns.take("default", QUEUE, INTERMEDIATE)

    def take_many(self, count):
        return [self.take() for _ in range(count)]

    @property
    def waiting(self):
        return [job.decode() for job in self.connection.lrange(QUEUE, 0, -1)]

    @property
    def taken(self):
        return [job.decode() for job in self.connection.lrange(INTERMEDIATE, 0, -1)]


@pytest.fixture
def desk(connection):
    return Desk(connection)


def batch_of(job):
    return job.rpartition("-")[0]


def test_an_empty_queue_has_no_next_job_and_nothing_is_remembered_of_it(desk, connection):
    assert desk.take() is None
    desk.push_shards(A, 1)
    assert desk.take() == f"{A}-0"
    assert connection.exists(*MEMORY) > 0
    assert desk.take() is None
    assert connection.exists(*MEMORY) == 0


def test_what_is_taken_stands_in_the_intermediate_queue_as_rq_would_put_it_there(desk):
    desk.push_shards(A, 3)
    desk.push("inline")
    assert desk.take_many(2) == ["inline", f"{A}-0"]
    assert desk.taken == ["inline", f"{A}-0"]
    assert desk.waiting == [f"{A}-1", f"{A}-2"]


def test_jobs_that_are_no_shards_go_first_in_their_order_wherever_they_stand(desk):
    desk.push_shards(A, 2)
    desk.push("inline-1")
    desk.push_shards(B, 2)
    desk.push(f"{B}-finalise", front=True)
    # An id as RQ makes them, whose last part happens to be digits only.
    desk.push("0b7a52cb-8b8f-4be0-9a87-123456789012")
    assert desk.take_many(3) == [f"{B}-finalise", "inline-1", "0b7a52cb-8b8f-4be0-9a87-123456789012"]
    desk.push("inline-2")
    desk.push("inline-0", front=True)
    assert desk.take_many(2) == ["inline-0", "inline-2"]


def test_a_small_batch_behind_a_large_one_takes_turns_with_it(desk):
    desk.push_shards(A, 200)
    taken = desk.take_many(20)
    desk.push_shards(B, 10)
    taken = desk.take_many(20)
    assert Counter(map(batch_of, taken)) == {A: 10, B: 10}
    assert [job for job in taken if batch_of(job) == B] == [f"{B}-{shard}" for shard in range(10)]


def test_a_batch_that_comes_later_does_not_catch_up_on_what_others_had_before(desk):
    desk.push_shards(A, 200)
    desk.take_many(100)
    desk.push_shards(B, 200)
    assert Counter(map(batch_of, desk.take_many(40))) == {A: 20, B: 20}


def test_a_batch_that_was_away_does_not_save_up(desk):
    desk.push_shards(A, 200)
    desk.push_shards(B, 1)
    desk.take_many(50)
    desk.push_shards(B, 100, first=1)
    assert Counter(map(batch_of, desk.take_many(40))) == {A: 20, B: 20}


@pytest.mark.parametrize("look_s", [0.0, 1e9], ids=["noticed at once", "noticed at its turn"])
def test_leaving_for_a_moment_does_not_shed_what_a_batch_had(connection, look_s):
    desk = Desk(connection, look_s)
    desk.push_shards(A, 80)
    desk.knows(B, share=0.1)
    for shard in range(20):
        desk.push(f"{B}-{shard}")
        desk.take_many(2)
        if f"{B}-{shard}" in desk.waiting:
            desk.connection.lrem(QUEUE, 1, f"{B}-{shard}")
        desk.take()  # it is away now
    assert sum(batch_of(job) == B for job in desk.taken) <= 7


def test_shards_go_by_share(desk):
    for batch, share in ((A, 1), (B, 3), (C, 0.5)):
        desk.push_shards(batch, 100, share=share)
    assert Counter(map(batch_of, desk.take_many(90))) == pytest.approx({A: 20, B: 60, C: 10}, abs=1)


def test_what_counts_is_what_shards_cost(desk):
    desk.push_shards(A, 100, costs="0:900,2:300")
    desk.push_shards(B, 100, costs="0:100")
    taken = desk.take_many(4 * 6 + 2 * 10)
    assert Counter(map(batch_of, taken)) == pytest.approx({A: 8, B: 36}, abs=1)


def test_of_batches_that_had_as_much_the_nearer_deadline_goes_first_then_the_earlier(desk):
    desk.push_shards(A, 3, expires_at=LATER_S + 300)
    desk.push_shards(B, 3, expires_at=LATER_S + 100)
    desk.push_shards(C, 3, expires_at=LATER_S + 300)
    assert [batch_of(job) for job in desk.take_many(6)] == [B, A, C, B, A, C]


def test_a_batch_whose_time_is_over_costs_the_others_nothing(desk):
    """Nothing of it is sent any more; and it has waited long enough for its end."""
    desk.push_shards(A, 3)
    desk.push_shards(B, 3, expires_at=1000)
    assert [batch_of(job) for job in desk.take_many(6)] == [B, B, B, A, A, A]


def test_a_batch_that_is_not_known_has_its_turn_too(desk):
    desk.push(f"{A}-0", f"{A}-1")
    desk.push_shards(B, 2)
    assert sorted(desk.take_many(4)) == [f"{A}-0", f"{A}-1", f"{B}-0", f"{B}-1"]


def test_a_shard_that_comes_back_to_the_front_is_the_first_of_its_batch(desk):
    desk.push_shards(A, 10)
    desk.take_many(3)
    desk.push(f"{A}-1", front=True)
    assert desk.take_many(3) == [f"{A}-1", f"{A}-3", f"{A}-4"]


def test_a_shard_that_is_queued_anew_at_the_back_is_found(desk):
    desk.push_shards(A, 3)
    desk.take_many(3)
    desk.push_shards(B, 1)
    desk.push(f"{A}-0")
    assert sorted(desk.take_many(2)) == [f"{A}-0", f"{B}-0"]


def test_jobs_that_vanish_from_the_queue_stop_nobody(desk, connection):
    desk.push_shards(A, 10)
    desk.push("inline")
    desk.push_shards(B, 3)
    desk.take()
    desk.push("inline-2", "inline-3")
    desk.take()
    for job in (f"{A}-0", f"{A}-1", f"{B}-2", "inline-3", *(f"{A}-{shard}" for shard in range(5, 10))):
        connection.lrem(QUEUE, 1, job)
    left = desk.waiting
    assert sorted(desk.take_many(len(left))) == sorted(left)
    assert desk.take() is None


@pytest.mark.parametrize("lost", MEMORY)
def test_what_is_remembered_may_be_lost_at_any_moment(desk, connection, lost):
    desk.turns = Turns(connection, look_s=0.0)
    desk.push_shards(A, 5)
    desk.push_shards(B, 5)
    desk.push("inline-1", "inline-2")
    desk.take_many(4)
    connection.delete(lost)
    left = desk.waiting
    assert sorted(desk.take_many(len(left))) == sorted(left)


def test_a_change_in_the_middle_of_the_queue_is_noticed_at_the_next_look_through_all_of_it(connection):
    for look_s, expected in ((1e9, f"{A}-1"), (0.0, "inline")):
        connection.flushall()
        desk = Desk(connection, look_s)
        desk.push_shards(A, 5)
        desk.take()
        connection.linsert(QUEUE, "BEFORE", f"{A}-3", "inline")
        connection.lrem(QUEUE, 1, f"{A}-2")
        assert desk.take() == expected


def test_a_batch_that_was_finalised_is_forgotten(desk, connection):
    desk.push_shards(A, 1, share=0.001)
    desk.push_shards(B, 9)
    assert f"{A}-0" in desk.take_many(3)
    desk.take()
    assert connection.hexists(MEMORY[0], A)
    desk.push(f"{A}-finalise", front=True)
    assert desk.take() == f"{A}-finalise"
    assert not connection.hexists(MEMORY[0], A)
    assert connection.zscore(MEMORY[1], A) is None


class Reference:
    """The rule without its bookkeeping: all of the queue is read each time."""

    def __init__(self, queue):
        self.queue = queue

    def may_be_next(self):
        others = [job for job in self.queue if not job.startswith("batch_") or job.endswith("finalise")]
        if others:
            return {others[0]}
        first = {}
        for job in self.queue:
            first.setdefault(batch_of(job), job)
        return set(first.values())


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_to_a_queue_each_job_is_taken_once_and_batches_stay_level(connection, seed):
    rng = random.Random(seed)
    desk = Desk(connection, look_s=rng.choice([0.0, 1e9]))
    shares = {A: 1.0, B: 2.0, C: 0.5}
    for batch, share in shares.items():
        desk.push_shards(batch, 60, share=share, costs="0:10")
    had, since = defaultdict(float), 0
    pushed = set(desk.waiting)
    for step in range(150):
        match rng.random():
            case chance if chance < 0.1:
                desk.push(f"inline-{step}", front=rng.random() < 0.5)
                pushed.add(f"inline-{step}")
            case chance if chance < 0.2 and (
                handed_back := [j for j in desk.taken if j.startswith("batch_")]
            ):
                job = rng.choice(handed_back)
                connection.lrem(INTERMEDIATE, 1, job)
                desk.push(job, front=True)
            case _:
                allowed = Reference(desk.waiting).may_be_next()
                job = desk.take()
                assert job in allowed
                if (batch := batch_of(job)) in shares:
                    had[batch] += 10 / shares[batch]
                    since += 1
        if min(Counter(map(batch_of, desk.waiting))[batch] for batch in shares) == 0:
            break
        assert max(had.values(), default=0) - min(had[batch] for batch in shares) <= 10 / 0.5 + 10
    assert since > 60
    while desk.take() is not None:
        pass
    assert sorted(desk.taken) == sorted(pushed)
