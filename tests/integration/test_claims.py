"""RQ's bookkeeping as a dispatcher does it, over a real server: nothing foreign runs, nothing is lost."""

from __future__ import annotations

import sys
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
import rq.executions
import rq.registry
import structlog
from redis.exceptions import ConnectionError as Lost
from redis.exceptions import TimeoutError as Stalled
from rq import Callback, Queue, Retry, Worker
from rq.command import send_stop_job_command
from rq.job import Job, JobStatus
from rq.registry import FailedJobRegistry, StartedJobRegistry
from rq.results import Result
from rq.serializers import JSONSerializer
from rq.suspension import resume, suspend
from rq.utils import utcformat
from rq.webhook import Webhook

from dispatcher import queues
from dispatcher.claims import AGING_S, MOST_OTHERS, REST_S, JobClaims
from dispatcher.presence import CLAIM_TTL_S
from dispatcher.running import FUNCTIONS
from workers.connection import connect_sync
from workers.errors import SettingsError, StoreUnavailable

pytestmark = pytest.mark.integration

NAMES = ("high", "default", "low")
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def connection(redis_url):
    client = connect_sync(redis_url)
    yield client
    client.close()


@pytest.fixture
def make_claims(connection):
    made = []

    def make(name="d1", **changes):
        given = {"functions": FUNCTIONS, "on_stop": lambda job_id: None} | changes
        claims = JobClaims(connection, NAMES, name=name, **given)
        claims.open()
        made.append(claims)
        return claims

    yield make
    for claims in made:
        claims.close()


def fetch(connection, job_id):
    return Job.fetch(job_id, connection=connection, serializer=JSONSerializer)


def waiting(connection, name="default"):
    return [key.decode() for key in connection.lrange(f"rq:queue:{name}", 0, -1)]


def intermediate(connection, name="default"):
    return [key.decode() for key in connection.lrange(f"rq:queue:{name}:intermediate", 0, -1)]


def started(connection, name="default"):
    return StartedJobRegistry(name, connection=connection, serializer=JSONSerializer)


def expire_claims(connection, name="default"):
    """What passing time does to claims that nobody keeps alive."""
    key = started(connection, name).key
    for member, _ in connection.zrange(key, 0, -1, withscores=True):
        connection.zadd(key, {member: 1})


# -- an ordinary life ----------------------------------------------------------------------------------------


def test_a_claimed_job_is_started_registered_and_in_no_queue(make_claims, connection):
    job_id = queues.enqueue_request(connection, "default", BODY)
    claimed = make_claims().claim()
    assert (claimed.id, claimed.function) == (job_id, "dispatcher.jobs.run_request")
    assert (claimed.args, claimed.kwargs["url"]) == ((BODY,), "/v1/chat/completions")
    assert (waiting(connection), intermediate(connection)) == ([], [])
    assert started(connection).get_job_ids(cleanup=False) == [job_id]
    assert fetch(connection, job_id).get_status() == JobStatus.STARTED
    assert fetch(connection, job_id).worker_name == "d1"


def test_a_job_of_a_process_that_dies_before_registering_it_stands_in_the_intermediate_queue(
    make_claims, connection, monkeypatch
):
    """A pop that holds the job nowhere but in this process loses it when the process dies [rq/rq#1716]."""
    job_id = queues.enqueue_request(connection, "low", BODY)
    queues.enqueue_shards(connection, "default", "batch_1", [0])
    claims = make_claims()

    def die(job):
        raise KeyboardInterrupt

    monkeypatch.setattr(claims, "prepare_execution", die)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            claims.claim()
    assert (intermediate(connection, "default"), intermediate(connection, "low")) == (["batch_1-0"], [job_id])


def test_a_finished_inline_job_keeps_its_result_for_rq_s_api(make_claims, connection):
    plain = Queue("default", connection=connection, serializer=JSONSerializer)
    job = plain.enqueue("dispatcher.jobs.run_request", BODY, timeout_s=5)
    claims = make_claims()
    claimed = claims.claim()
    assert claimed.kwargs == {"timeout_s": 5}
    claims.finish(claimed, {"status_code": 200, "body": {"id": "x"}})
    job.refresh()
    assert job.get_status() == JobStatus.FINISHED
    assert job.return_value(refresh=True) == {"status_code": 200, "body": {"id": "x"}}
    assert job.latest_result().type == Result.Type.SUCCESSFUL
    assert started(connection).get_job_ids(cleanup=False) == []
    assert claims.executions == {}


def test_a_job_that_waited_longer_than_its_ttl_is_not_run(make_claims, connection):
    plain = Queue("default", connection=connection, serializer=JSONSerializer)
    gone = plain.enqueue("dispatcher.jobs.run_request", BODY, ttl=100)
    stays = plain.enqueue("dispatcher.jobs.run_request", BODY, ttl=100)
    connection.delete(gone.key)  # what Redis does when the ttl is over
    assert make_claims().claim().id == stays.id
    assert waiting(connection) == []


def test_a_job_s_own_time_is_known_and_goes_on_when_it_is_handed_back(make_claims, connection):
    plain = Queue("default", connection=connection, serializer=JSONSerializer)
    claims = make_claims()
    for given, timeout_s in ((7, 7.0), (180, None), (None, None), (-1, None)):
        plain.enqueue("dispatcher.jobs.run_request", BODY, job_timeout=given)
        claimed = claims.claim()
        assert claimed.timeout_s == timeout_s
        claims.finish(claimed, {})
    job = plain.enqueue("dispatcher.jobs.run_request", BODY)
    queued_at = job.enqueued_at - timedelta(seconds=50)
    connection.hset(job.key, "enqueued_at", utcformat(queued_at))
    claims.hand_back(claims.claim())
    assert claims.claim().waited_s >= 50


def test_a_finished_shard_leaves_no_trace(make_claims, connection):
    queues.enqueue_shards(connection, "default", "batch_1", [0])
    claims = make_claims()
    claims.finish(claims.claim())
    assert list(connection.keys("rq:*batch_1*")) == []


def test_a_dispatcher_is_seen_by_rq_while_it_lives(make_claims, connection):
    claims = make_claims()
    assert [worker.name for worker in Worker.all(connection)] == ["d1"]
    queues.enqueue_request(connection, "default", BODY)
    claimed = claims.claim()
    (worker,) = Worker.all(connection)
    assert (worker.get_state(), worker.queue_names()) == ("busy", list(NAMES))
    claims.finish(claimed)
    (worker,) = Worker.all(connection)
    assert worker.get_state() == "idle"
    claims.close()
    assert Worker.all(connection) == []


def test_a_second_dispatcher_of_the_same_name_is_refused(make_claims):
    make_claims("same")
    with pytest.raises(SettingsError, match="same"):
        make_claims("same")


def test_opening_may_be_repeated(make_claims, connection):
    claims = make_claims()
    claims.open()
    assert [worker.name for worker in Worker.all(connection)] == ["d1"]


def test_suspension_is_seen(make_claims, connection):
    claims = make_claims()
    assert not claims.suspended()
    suspend(connection)
    assert claims.suspended()
    resume(connection)
    assert not claims.suspended()


# -- what is not ours ----------------------------------------------------------------------------------------


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module that must never be imported."""
    (tmp_path / "forebay_trap.py").write_text("def spring(*args, **kwargs): raise AssertionError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "forebay_trap.spring"
    sys.modules.pop("forebay_trap", None)


def test_a_job_that_names_another_function_is_failed_and_never_imported(make_claims, connection, trap):
    plain = Queue("default", connection=connection, serializer=JSONSerializer)
    strange = plain.enqueue(trap, retry=Retry(max=3))
    ours = queues.enqueue_request(connection, "default", BODY)
    assert make_claims().claim().id == ours
    strange.refresh()
    assert strange.get_status() == JobStatus.FAILED
    assert "a dispatcher does not run 'forebay_trap.spring'" in strange.latest_result().exc_string
    assert FailedJobRegistry("default", connection=connection).get_job_ids() == [strange.id]
    assert "forebay_trap" not in sys.modules
    assert (waiting(connection), intermediate(connection)) == ([], [])


@pytest.mark.parametrize("gone", [False, True])
def test_among_many_jobs_that_nobody_here_can_run_a_claim_does_away_with_few_and_says_so(
    make_claims, connection, trap, gone
):
    """Each takes some round trips, and the beats that keep claims alive wait in the same thread."""
    plain = Queue("default", connection=connection, serializer=JSONSerializer)
    strange = plain.enqueue_many([Queue.prepare_data(trap) for _ in range(2 * MOST_OTHERS + 5)])
    if gone:
        connection.delete(*(job.key for job in strange))
    ours = queues.enqueue_request(connection, "default", BODY)
    [last] = plain.enqueue_many([Queue.prepare_data(trap)])
    claims = make_claims()
    for left in (MOST_OTHERS + 7, 7):
        assert claims.claim() is None
        assert claims.more_waits
        assert len(waiting(connection)) == left
    assert claims.claim().id == ours
    assert not claims.more_waits
    assert claims.claim() is None
    assert not claims.more_waits
    assert fetch(connection, last.id).get_status() == JobStatus.FAILED


def test_a_queue_full_of_others_jobs_keeps_no_other_queue_from_being_served(make_claims, connection, trap):
    Queue("high", connection=connection, serializer=JSONSerializer).enqueue_many(
        [Queue.prepare_data(trap) for _ in range(MOST_OTHERS + 1)]
    )
    ours = queues.enqueue_request(connection, "default", BODY)
    claims = make_claims()
    assert claims.claim().id == ours
    assert len(waiting(connection, "high")) == 1


def test_pickled_data_is_failed_and_never_unpickled(make_claims, connection, trap):
    job = Queue("default", connection=connection).enqueue(trap, "argument")
    assert make_claims().claim() is None
    assert connection.hget(Job.key_for(job.id), "status") == b"failed"
    assert "JSONSerializer" in job.latest_result().exc_string
    assert "forebay_trap" not in sys.modules


def test_callbacks_and_webhooks_of_a_job_are_never_called(make_claims, connection, trap, monkeypatch):
    sent = []
    monkeypatch.setattr("rq.webhook.Webhook.send", lambda hook, job, **more: sent.append(hook.url))
    plain = Queue("default", connection=connection, serializer=JSONSerializer)
    callbacks = {f"on_{end}": Callback(trap) for end in ("success", "failure", "stopped")}
    hooks = [Webhook(url="http://127.0.0.1:9/", job_status=status) for status in ("finished", "failed")]
    for _ in range(3):
        plain.enqueue("dispatcher.jobs.run_request", BODY, webhooks=hooks, **callbacks)
    claims = make_claims()
    claims.finish(claims.claim(), {"status_code": 200})
    claims.fail(claims.claim(), RuntimeError("x"), retry=False)
    claims.stop(claims.claim())
    assert "forebay_trap" not in sys.modules
    assert sent == []


def test_a_dispatcher_is_born_once_though_it_did_not_hear_so(make_claims, connection, monkeypatch):
    born = JobClaims.register_birth

    def unheard(claims):
        born(claims)
        raise Lost("gone")

    claims = JobClaims(connection, NAMES, name="d1", functions=FUNCTIONS, on_stop=print)
    with monkeypatch.context() as patch:
        patch.setattr(JobClaims, "register_birth", unheard)
        with pytest.raises(StoreUnavailable):
            claims.open()
    claims.open()
    claims.close()


def test_a_dispatcher_can_close_while_redis_is_away(make_claims, monkeypatch):
    claims = make_claims()

    def gone(*_):
        raise Lost("gone")

    with monkeypatch.context() as patch:
        patch.setattr(claims, "register_death", gone)
        patch.setattr(claims.pubsub, "unsubscribe", gone)
        with pytest.raises(StoreUnavailable):
            claims.close()


@pytest.mark.parametrize("beat", [None, {"last_heartbeat": 1.0}], ids=["no record", "a late heartbeat's"])
def test_a_job_whose_first_dispatcher_died_a_while_ago_can_be_finished(make_claims, connection, beat):
    queues.enqueue_shards(connection, "default", "batch_1", [0])
    make_claims("dead").claim()
    expire_claims(connection)
    heir = make_claims("heir")
    heir.maintain()
    claimed = heir.claim()
    [dead] = set(connection.zrange(f"rq:executions:{claimed.id}", 0, -1)) - {claimed.execution.id.encode()}
    record = f"rq:execution:{claimed.id}:{dead.decode()}"
    connection.delete(record)  # as time does, a minute before the name
    if beat:  # the first dispatcher was only slow
        connection.hset(record, mapping=beat)
    heir.finish(claimed)
    assert connection.keys(f"rq:*{claimed.id}*") == []
    assert started(connection).get_job_ids(cleanup=False) == []


def test_callbacks_of_a_job_whose_dispatcher_died_are_never_called(make_claims, connection, trap):
    plain = Queue("default", connection=connection, serializer=JSONSerializer)
    plain.enqueue("dispatcher.jobs.run_request", BODY, on_failure=Callback(trap))
    make_claims("dead").claim()
    expire_claims(connection)
    make_claims("other").maintain()
    assert "forebay_trap" not in sys.modules


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((BODY, 1), {}), ((BODY,), {"colour": "red"})], ids=["none", "many", "odd"]
)
def test_a_job_whose_arguments_do_not_fit_is_failed_once(make_claims, connection, args, kwargs):
    plain = Queue("default", connection=connection, serializer=JSONSerializer)
    job = plain.enqueue("dispatcher.jobs.run_request", args=args, kwargs=kwargs, retry=Retry(max=3))
    assert make_claims().claim() is None
    assert job.get_status(refresh=True) == JobStatus.FAILED


@pytest.mark.parametrize(
    "record",
    [
        {"data": b"x", "created_at": b"yesterday"},
        {"data": b"x", "status": b"dancing"},
        {"data": b"x", "timeout": b"soon"},
        {"data": b"x", "retries_left": b"many"},
    ],
    ids=lambda record: "".join(sorted(record)),
)
def test_a_record_that_rq_cannot_read_is_left_out_and_stops_nobody(make_claims, connection, record):
    connection.hset("rq:job:broken", mapping=record)
    connection.rpush("rq:queue:default", "broken")
    ours = queues.enqueue_request(connection, "default", BODY)
    claims = make_claims()
    assert claims.claim().id == ours
    assert intermediate(connection) == []
    claims.maintain()


def test_a_job_that_says_it_is_from_elsewhere_leaves_the_intermediate_queue_too(make_claims, connection):
    job_id = queues.enqueue_request(connection, "default", BODY)
    connection.hset(Job.key_for(job_id), "origin", "elsewhere")
    assert make_claims().claim().id == job_id
    assert intermediate(connection) == []


@pytest.mark.parametrize("spoiled", ["rq:queue:{}", "forebay:v1:queue:{}", "rq:wip:{}"])
@pytest.mark.parametrize("name", ["high", "low"])
def test_a_queue_that_somebody_spoiled_keeps_no_other_from_being_served_and_is_told_once(
    make_claims, connection, name, spoiled
):
    now_s = 0.0
    claims = make_claims(clock=lambda: now_s)
    queues.enqueue_request(connection, name, BODY)
    spoilt = spoiled.format(name)
    connection.delete(spoilt)
    connection.set(spoilt, "x")
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            job_id = queues.enqueue_request(connection, "default", BODY)
            assert claims.claim().id == job_id
            assert claims.claim() is None
            now_s += REST_S
    assert [line["queue"] for line in logs if line["log_level"] == "error"] == [name]
    connection.delete(spoilt)
    job_id = queues.enqueue_request(connection, name, BODY)
    claimed = {claims.claim().id for _ in range(connection.llen(f"rq:queue:{name}"))}
    assert job_id in claimed


def test_an_id_that_is_no_text_is_removed_and_told_and_the_next_job_is_taken(make_claims, connection):
    job_id = queues.enqueue_request(connection, "default", BODY)
    connection.lpush("rq:queue:default", b"\xff")
    claims = make_claims()
    with structlog.testing.capture_logs() as logs:
        assert claims.claim().id == job_id
    assert [line["job"] for line in logs if line["log_level"] == "error"] == ["b'\\xff'"]
    assert (waiting(connection), intermediate(connection)) == ([], [])


# -- deaths --------------------------------------------------------------------------------------------------


def test_the_job_of_a_dead_dispatcher_is_queued_again_at_the_front(make_claims, connection):
    queues.enqueue_shards(connection, "default", "batch_1", [0, 1])
    make_claims("dead").claim()
    expire_claims(connection)
    other = make_claims("other")
    other.maintain()
    assert waiting(connection) == ["batch_1-0", "batch_1-1"]
    assert other.claim().id == "batch_1-0"


@pytest.mark.parametrize("spoilt", ["rq:wip:high", "rq:finished:high", "rq:queue:high:intermediate"])
def test_a_spoiled_key_of_one_queue_keeps_no_other_s_jobs_from_coming_back(make_claims, connection, spoilt):
    job_ids = [queues.enqueue_request(connection, name, BODY) for name in ("default", "low")]
    dead = make_claims("dead")
    for _ in job_ids:
        dead.claim()
    expire_claims(connection, "default")
    expire_claims(connection, "low")
    connection.set(spoilt, "x")
    other = make_claims("other")
    with structlog.testing.capture_logs() as logs:
        for _ in range(2):
            other.maintain()
            other.last_cleaned_at = None
    assert waiting(connection, "default") + waiting(connection, "low") == job_ids
    assert [line["queue"] for line in logs if line["log_level"] == "error"] == ["high"]
    assert not connection.exists("rq:clean_registries:high")


@pytest.fixture
def shift_clock(monkeypatch):
    """Shifts this host's clock, as RQ and ours read it; gives it."""

    def shift(seconds):
        for module in (rq.registry, rq.executions):
            monkeypatch.setattr(module, "current_timestamp", lambda: int(time.time() + seconds))
        return lambda: time.time() + seconds

    return shift


@pytest.mark.parametrize("off_s", [30, -30])
def test_a_host_whose_clock_is_off_takes_no_job_and_takes_nobody_s_over(
    make_claims, connection, shift_clock, off_s
):
    """RQ stamps claims with one host's clock and holds them against another's."""
    held = queues.enqueue_request(connection, "default", BODY)
    assert make_claims("living").claim().id == held
    left = queues.enqueue_request(connection, "default", BODY)
    before = connection.zrange(started(connection).key, 0, -1, withscores=True)
    off = make_claims("off", host_clock=shift_clock(off_s))
    off.beat([])
    off.maintain()
    assert off.claim() is None
    assert off.clock_is_off
    assert not off.more_waits
    assert waiting(connection) == [left]
    assert connection.zrange(started(connection).key, 0, -1, withscores=True) == before


def test_a_clock_that_goes_wrong_and_right_again_is_seen_with_the_next_beat(make_claims, connection):
    job_id = queues.enqueue_request(connection, "default", BODY)
    off_s = [0]
    claims = make_claims(host_clock=lambda: time.time() + off_s[0])
    assert not claims.clock_is_off
    off_s[0] = 30
    claims.beat([])
    assert claims.clock_is_off
    off_s[0] = 0
    claims.beat([])
    assert claims.claim().id == job_id


def test_a_claim_that_is_kept_alive_stays(make_claims, connection):
    queues.enqueue_shards(connection, "default", "batch_1", [0])
    alive = make_claims("alive")
    claimed = alive.claim()
    key = started(connection).key
    connection.zadd(key, {claimed.execution.composite_key: datetime.now(UTC).timestamp() + 1})
    alive.beat([claimed])
    left = connection.zscore(key, claimed.execution.composite_key) - datetime.now(UTC).timestamp()
    assert CLAIM_TTL_S - 2 < left <= CLAIM_TTL_S + 1
    make_claims("other").maintain()
    assert waiting(connection) == []


def test_a_claim_that_ran_out_is_not_brought_back_by_a_late_heartbeat(make_claims, connection):
    queues.enqueue_shards(connection, "default", "batch_1", [0])
    slow = make_claims("slow")
    claimed = slow.claim()
    expire_claims(connection)
    make_claims("other").maintain()
    slow.beat([claimed])
    assert started(connection).get_job_ids(cleanup=False) == []
    assert waiting(connection) == ["batch_1-0"]


def test_a_job_that_was_popped_and_never_registered_comes_back(make_claims, connection):
    job_id = queues.enqueue_request(connection, "default", BODY)
    connection.lmove("rq:queue:default", "rq:queue:default:intermediate")
    claims = make_claims()
    claims.maintain()
    assert claims.claim() is None
    long_ago = (datetime.now(UTC) - timedelta(minutes=2)).timestamp()
    connection.set(f"rq:queue:default:intermediate:first_seen:{job_id}", long_ago)
    claims.last_cleaned_at = None
    claims.maintain()
    assert intermediate(connection) == []
    assert claims.claim().id == job_id


def test_who_was_taken_over_ends_only_its_own_execution(make_claims, connection):
    """Were the old execution left to run out, maintenance would take the job from who holds it now."""
    queues.enqueue_shards(connection, "default", "batch_1", [0])
    slow, fast = make_claims("slow"), make_claims("fast")
    old = slow.claim()
    connection.rpush("rq:queue:default", old.id)
    new = fast.claim()
    slow.drop(old)
    assert connection.zrange(started(connection).key, 0, -1) == [new.execution.composite_key.encode()]
    assert slow.executions == {}


ENDS = {
    "finish": lambda claims, claimed: claims.finish(claimed, {"status_code": 500}),
    "fail": lambda claims, claimed: claims.fail(claimed, RuntimeError("x"), retry=False),
    "fail and retry": lambda claims, claimed: claims.fail(claimed, RuntimeError("x"), retry=True),
    "stop": lambda claims, claimed: claims.stop(claimed),
    "hand back": lambda claims, claimed: claims.hand_back(claimed),
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_who_was_taken_over_tells_no_end_of_a_job_that_has_its_answer(make_claims, connection, end):
    job_id = queues.enqueue_request(connection, "default", BODY)
    slow, fast = make_claims("slow"), make_claims("fast")
    old = slow.claim()
    expire_claims(connection)
    fast.maintain()
    fast.finish(fast.claim(), {"status_code": 200})
    end(slow, old)
    job = fetch(connection, job_id)
    assert (job.get_status(), job.return_value()) == (JobStatus.FINISHED, {"status_code": 200})
    assert [result.type for result in job.results()] == [Result.Type.SUCCESSFUL]
    assert FailedJobRegistry("default", connection=connection).get_job_ids() == []
    assert (waiting(connection), slow.executions) == ([], {})


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_who_was_taken_over_leaves_the_job_to_who_runs_it(make_claims, connection, end):
    queues.enqueue_shards(connection, "default", "batch_1", [0])
    slow, fast = make_claims("slow"), make_claims("fast")
    old = slow.claim()
    expire_claims(connection)
    fast.maintain()
    new = fast.claim()
    end(slow, old)
    assert fetch(connection, new.id).get_status() == JobStatus.STARTED
    assert connection.zrange(started(connection).key, 0, -1) == [new.execution.composite_key.encode()]
    assert (waiting(connection), slow.executions) == ([], {})


# -- other ends ----------------------------------------------------------------------------------------------


def test_handing_back_charges_no_retry_and_keeps_the_place_at_the_front(make_claims, connection):
    queues.enqueue_shards(connection, "default", "batch_1", [0, 1])
    claims = make_claims()
    before = fetch(connection, "batch_1-0").retries_left
    for _ in range(3):
        claimed = claims.claim()
        assert claimed.id == "batch_1-0"
        claims.hand_back(claimed)
    assert waiting(connection) == ["batch_1-0", "batch_1-1"]
    assert fetch(connection, "batch_1-0").retries_left == before
    assert fetch(connection, "batch_1-0").get_status() == JobStatus.QUEUED
    assert started(connection).get_job_ids(cleanup=False) == []


def test_a_shard_s_job_is_taken_up_again_after_any_number_of_deaths_and_an_inline_request_as_often_as_it_says(
    make_claims, connection
):
    queues.enqueue_shards(connection, "default", "batch_1", [0])
    inline = queues.enqueue_request(connection, "default", BODY)
    claims = make_claims()
    before = {name: fetch(connection, name).retries_left for name in ("batch_1-0", inline)}
    for _ in range(3):
        while claims.claim() is not None:
            pass
        expire_claims(connection)
        claims.last_cleaned_at = None
        claims.maintain()
    left = {name: fetch(connection, name).retries_left for name in before}
    assert left == {"batch_1-0": before["batch_1-0"], inline: before[inline] - 3}
    taken = {claimed.id: claimed for claimed in (claims.claim(), claims.claim())}
    claims.fail(taken["batch_1-0"], RuntimeError("a fault"), retry=True)
    assert fetch(connection, "batch_1-0").retries_left == before["batch_1-0"] - 1


def test_a_job_that_failed_is_retried_as_often_as_it_asks(make_claims, connection):
    plain = Queue("default", connection=connection, serializer=JSONSerializer)
    job = plain.enqueue("dispatcher.jobs.run_request", BODY, retry=Retry(max=1))
    claims = make_claims()
    claims.fail(claims.claim(), RuntimeError("once"), retry=True)
    assert job.get_status(refresh=True) == JobStatus.QUEUED
    claims.fail(claims.claim(), RuntimeError("twice"), retry=True)
    assert job.get_status(refresh=True) == JobStatus.FAILED
    assert claims.claim() is None
    assert "twice" in job.latest_result().exc_string


def test_a_job_that_cannot_be_done_is_not_retried(make_claims, connection):
    job_id = queues.enqueue_request(connection, "default", BODY)
    claims = make_claims()
    claims.fail(claims.claim(), RuntimeError("never"), retry=False)
    assert fetch(connection, job_id).get_status() == JobStatus.FAILED
    assert waiting(connection) == []


@pytest.mark.parametrize(
    "end",
    [
        lambda claims, claimed: claims.finish(claimed),
        lambda claims, claimed: claims.fail(claimed, RuntimeError("x"), retry=False),
        lambda claims, claimed: claims.stop(claimed),
    ],
    ids=["finish", "fail", "stop"],
)
def test_a_job_that_is_deleted_while_it_runs_is_forgotten(make_claims, connection, end):
    queues.enqueue_shards(connection, "default", "batch_1", [0])
    claims = make_claims()
    claimed = claims.claim()
    fetch(connection, claimed.id).delete()
    end(claims, claimed)
    assert claims.executions == {}
    assert started(connection).get_job_ids(cleanup=False) == []
    assert connection.smembers("rq:worker:d1:executions") == set()
    assert claims.claim() is None


def test_stop_job_reaches_who_holds_it_and_it_is_not_retried(make_claims, connection):
    asked, heard = [], threading.Event()

    def on_stop(job_id):
        asked.append(job_id)
        heard.set()

    job_id = queues.enqueue_request(connection, "default", BODY)
    claims = make_claims(on_stop=on_stop)
    claimed = claims.claim()
    send_stop_job_command(connection, job_id, serializer=JSONSerializer)
    assert heard.wait(10)
    claims.stop(claimed)
    assert asked == [job_id]
    job = fetch(connection, job_id)
    assert (job.get_status(), job.ended_at is not None) == (JobStatus.STOPPED, True)
    assert (waiting(connection), claims.executions) == ([], {})


def test_a_stalled_server_does_not_end_the_listening(make_claims, monkeypatch):
    monkeypatch.setattr("dispatcher.presence._DEAF_S", 0.0)
    claims = make_claims()
    for passing in (Stalled("no answer"), Lost("gone"), ConnectionResetError()):
        claims._pubsub_exception_handler(passing, claims.pubsub, claims.pubsub_thread)
    with pytest.raises(ZeroDivisionError):
        claims._pubsub_exception_handler(ZeroDivisionError(), claims.pubsub, claims.pubsub_thread)


def test_showing_idleness_never_makes_a_step_that_was_done_fail(make_claims, connection, monkeypatch):
    """Else whoever repeats steps until they succeed would queue the job twice."""
    queues.enqueue_shards(connection, "default", "batch_1", [0])
    claims = make_claims()
    claimed = claims.claim()

    def away(state, pipeline=None):
        raise StoreUnavailable("away")

    monkeypatch.setattr(claims, "set_state", away)
    claims.hand_back(claimed)
    assert waiting(connection) == ["batch_1-0"]


# -- turns ---------------------------------------------------------------------------------------------------


def test_the_most_urgent_queue_is_served_first_and_one_passed_over_for_long_once(make_claims, connection):
    for name in ("low", "high", "default"):
        queues.enqueue_shards(connection, name, f"batch_{name}", range(4))
    now_s = 0.0
    claims = make_claims(clock=lambda: now_s)
    assert [claims.claim().queue.name for _ in range(2)] == ["high", "high"]
    now_s = AGING_S / 2
    assert claims.claim().queue.name == "high"
    now_s = AGING_S + 1
    assert [claims.claim().queue.name for _ in range(3)] == ["default", "low", "high"]
    assert [claims.claim().queue.name for _ in range(3)] == ["default", "default", "default"]


def test_of_the_most_urgent_queues_only_their_jobs_are_taken(connection, make_claims):
    queues.enqueue_request(connection, "default", {"messages": []})
    claims = make_claims()
    assert claims.claim(1) is None
    urgent = queues.enqueue_request(connection, "high", {"messages": []})
    assert claims.claim(1).id == urgent
    assert claims.claim(0) is None
    assert claims.claim() is not None
