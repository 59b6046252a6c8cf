"""Redis loses what it was told: what living services and `forebay resume` make of it, step by step."""

from __future__ import annotations

import io
import json

import pytest
from rq import Queue
from rq.job import Job
from rq.serializers import JSONSerializer
from rq.worker import BaseWorker
from typer.testing import CliRunner

from dispatcher import queues
from dispatcher.batches.errors import DamagedFileError
from dispatcher.batches.ledger import Ledger, Tally
from dispatcher.batches.parts import Entry, PartWriter, done_lines
from dispatcher.batches.plan import open_plan
from dispatcher.batches.record import BatchStatus
from dispatcher.batches.results import Usage
from dispatcher.claims import JobClaims
from dispatcher.finaliser import Finaliser
from dispatcher.keeper import Keeper
from dispatcher.running import FUNCTIONS
from dispatcher.upkeep import LOCK_S, UNREGISTERED_S
from forebay import Forebay
from forebay.cli.main import app
from forebay.errors import UnknownBatch
from forebay.submission import Options, prepare
from monitor.configured import ConfiguredWorkers
from workers.connection import connect_sync
from workers.errors import Fenced
from workers.spec import WorkerSpec
from workers.store import FleetStore

pytestmark = pytest.mark.integration

LINES = 12
A, B = "10.0.0.1:8000", "10.0.0.2:8000"


@pytest.fixture
def server(redis_url):
    client = connect_sync(redis_url)
    yield client
    client.close()


@pytest.fixture
def forebay(redis_url, tmp_path):
    with Forebay(redis_url, str(tmp_path / "storage")) as client:
        yield client


@pytest.fixture
def batch(forebay):
    request = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 5}}
    lines = [json.dumps({"custom_id": f"c{number}"} | request) for number in range(LINES)]
    source = io.BytesIO("\n".join(lines).encode())
    now_s = forebay._portal.call(forebay.desk.ledger.now)
    record = prepare(forebay.desk.storage, source, name="in", options=Options(), now_s=now_s, slots=1)
    return forebay.publish(record.id).id


@pytest.fixture
def make_claims(server):
    made = []

    def make(name="d1"):
        claims = JobClaims(server, ("default",), name=name, functions=FUNCTIONS, on_stop=lambda _: None)
        claims.open()
        made.append(claims)
        return claims

    yield make
    for claims in made:
        claims.close()


def waiting(server):
    return [key.decode() for key in server.lrange("rq:queue:default", 0, -1)]


def answer(forebay, batch, shard):
    """What a dispatcher does with a shard: durable results, then a report."""
    portal, ledger, files = forebay._portal, forebay.desk.ledger, forebay.desk.storage.files(batch)
    claim = portal.call(ledger.claim, batch, shard, "test")
    writer = PartWriter(files, shard, f"{claim.number}.test")
    planned = open_plan(files).shard(shard)
    for request in planned:
        writer.add(Entry(request.line, True, Usage(1, 2), json.dumps({"line": request.line}).encode()))
    writer.flush()
    tally = Tally(len(planned), 0, len(planned), 2 * len(planned), 10)
    portal.call(lambda: ledger.progress(claim, "test", tally, done=True))


def answer_all(forebay, batch):
    for shard in range(forebay.status(batch).forebay.shards):
        answer(forebay, batch, shard)


def finalise(forebay, batch):
    forebay._portal.call(Finaliser(forebay.desk.storage, forebay.desk.ledger).run, batch)


# -- a dispatcher that lives on ------------------------------------------------------------------------------


def test_a_living_dispatcher_appears_to_rq_again_and_takes_jobs(make_claims, server, batch):
    claims = make_claims()
    assert claims.claim() is not None
    server.flushall()
    claims.beat([])
    [seen] = BaseWorker.all(connection=server, serializer=JSONSerializer)
    assert (seen.name, seen.queue_names()) == ("d1", ["default"])
    assert seen.birth_date.timestamp() == pytest.approx(claims.birth_date.timestamp(), abs=1)
    assert BaseWorker.count(queue=Queue("default", connection=server)) == 1
    queues.enqueue_shards(server, "default", "batch_2", [0])
    assert claims.claim().id == "batch_2-0"


def test_a_dispatcher_whose_record_ran_out_in_a_long_outage_has_a_whole_one_again(make_claims, server):
    claims = make_claims()
    server.delete(claims.key)
    claims.beat([])
    assert {b"birth", b"queues", b"state", b"hostname"} <= set(server.hkeys(claims.key))
    assert 0 < server.ttl(claims.key) <= 20


def test_a_dispatcher_that_redis_knows_is_not_registered_twice(make_claims, server):
    claims = make_claims()
    server.hset(claims.key, "hostname", "as it was")
    claims.beat([])
    assert server.hget(claims.key, "hostname") == b"as it was"


def test_the_end_of_a_claim_that_redis_lost_leaves_the_job_of_its_name_alone(make_claims, server):
    queues.enqueue_shards(server, "default", "batch_1", [0])
    claims = make_claims()
    held = claims.claim()
    server.flushall()
    queues.enqueue_shards(server, "default", "batch_1", [0])
    claims.finish(held)
    assert Job.fetch("batch_1-0", connection=server, serializer=JSONSerializer).get_status() == "queued"
    assert make_claims("d2").claim().id == "batch_1-0"


def test_an_acknowledged_job_that_is_still_ours_goes(make_claims, server):
    queues.enqueue_shards(server, "default", "batch_1", [0])
    claims = make_claims()
    claims.finish(claims.claim())
    assert not Job.exists("batch_1-0", connection=server)
    assert waiting(server) == []


async def test_a_shard_whose_report_redis_lost_is_left_open_and_one_that_is_done_is_not(valkey):
    ledger = Ledger(valkey)
    fields = {"status": "in_progress", "shards": "2", "shards_done": "0"}
    await ledger.open("batch_1", 1.0, fields)
    claim = await ledger.claim("batch_1", 0, "d1")
    assert await ledger.left_open("batch_1", 0)
    await ledger.progress(claim, "d1", Tally(), done=True)
    assert not await ledger.left_open("batch_1", 0)
    assert await ledger.left_open("batch_1", 1)
    await ledger.move("batch_1", "cancelling", among=["in_progress"])
    assert not await ledger.left_open("batch_1", 1)
    assert not await ledger.left_open("batch_2", 0)


# -- claims and parts ----------------------------------------------------------------------------------------


def test_a_claim_from_before_is_fenced_although_claims_are_counted_anew(forebay, batch, server):
    portal, ledger = forebay._portal, forebay.desk.ledger
    old = portal.call(ledger.claim, batch, 0, "old")
    server.flushall()
    forebay.resume(batch)
    new = portal.call(ledger.claim, batch, 0, "new")
    assert new.number == old.number
    with pytest.raises(Fenced):
        portal.call(lambda: ledger.progress(old, "old", Tally(completed=1), done=True))
    portal.call(lambda: ledger.progress(new, "new", Tally(completed=1), done=True))


async def test_one_dispatcher_writes_parts_of_the_same_claim_number_twice(redis_url, tmp_path, valkey):
    """It lived on while Redis lost its claims: its parts of then are never overwritten, nor in the way."""
    with Forebay(redis_url, str(tmp_path)) as forebay:
        request = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
        lines = [json.dumps({"custom_id": f"c{number}"} | request) for number in range(2)]
        batch = forebay.submit(io.BytesIO("\n".join(lines).encode())).id
        files = forebay.desk.storage.files(batch)
    ledger = Ledger(valkey)
    for line in (1, 2):
        await ledger.client.delete(f"forebay:v1:batch:{batch}:shards")
        claim = await ledger.claim(batch, 0, "d1")
        assert claim.number == 1
        keeper = Keeper(files, ledger, claim, owner="d1", part_lines=1, part_age_s=1)
        keeper.add(Entry(line, True, Usage(1, 1), b"{}"), 1, late=False)
        keeper.close()
        await keeper.run()
    assert done_lines(files, 0) == {1: True, 2: True}
    assert "trouble" not in (await ledger.entry(batch)).fields


# -- upkeep of queues ----------------------------------------------------------------------------------------


def popped(server):
    queues.enqueue_shards(server, "default", "batch_1", [0])
    server.lmove("rq:queue:default", "rq:queue:default:intermediate")
    return "rq:queue:default:intermediate:first_seen:batch_1-0"


def seen_before(server, mark, seconds):
    server.set(mark, float(server.get(mark)) - seconds, keepttl=True)


def test_a_job_that_its_killed_dispatcher_popped_and_never_registered_is_queued_within_30_s(
    make_claims, server
):
    mark = popped(server)
    claims = make_claims()
    claims.maintain()
    assert waiting(server) == []
    seen_before(server, mark, UNREGISTERED_S + 0.1)
    claims.last_cleaned_at = None
    claims.maintain()
    assert waiting(server) == ["batch_1-0"]
    # Upkeep comes with a heartbeat, so two of them are at most the one and the other apart.
    assert 2 * (claims.maintenance_interval + claims.job_monitoring_interval) <= 30
    assert claims.maintenance_interval > UNREGISTERED_S


def test_a_job_that_somebody_has_just_popped_is_left_to_them(make_claims, server):
    mark = popped(server)
    claims = make_claims()
    claims.maintain()
    seen_before(server, mark, UNREGISTERED_S - 2)
    claims.last_cleaned_at = None
    claims.maintain()
    assert waiting(server) == []
    assert 0 < server.ttl(mark) <= 60  # it says nothing of the next time that the job is popped


def test_whoever_dies_during_upkeep_does_not_keep_others_from_it_for_long(make_claims, server):
    dead, living = make_claims("dead"), make_claims("living")
    assert dead.queues[0].acquire_maintenance_lock()
    assert not living.queues[0].acquire_maintenance_lock()
    assert 0 < server.ttl(living.queues[0].registry_cleaning_key) <= LOCK_S <= 20


# -- forebay resume ------------------------------------------------------------------------------------------


def test_a_lost_batch_comes_back_from_its_files_with_all_jobs(forebay, batch, server):
    shards = waiting(server)
    server.flushall()
    with pytest.raises(UnknownBatch):
        forebay.status(batch)
    resumed = forebay.resume(batch)
    assert (resumed.known, resumed.queued, resumed.workers) == (False, len(shards), 0)
    assert resumed.record.status is BatchStatus.IN_PROGRESS
    assert waiting(server) == shards


def test_a_new_deadline_is_for_lost_batches_only(forebay, batch, server):
    before = forebay.status(batch).expires_at
    assert forebay.resume(batch, window="1h").record.expires_at == before
    server.flushall()
    assert forebay.resume(batch).record.expires_at == before
    server.flushall()
    assert forebay.resume(batch, window="1h").record.expires_at < before


def test_a_lost_batch_that_had_ended_is_known_again_as_it_ended(forebay, batch, server):
    answer_all(forebay, batch)
    finalise(forebay, batch)
    ended = forebay.status(batch)
    assert ended.status is BatchStatus.COMPLETED
    server.flushall()
    resumed = forebay.resume(batch)
    assert (resumed.known, resumed.queued, resumed.record) == (False, 0, ended)
    assert waiting(server) == []
    assert len(list(forebay.results(batch))) == LINES


def test_jobs_that_nobody_could_take_up_any_more_are_queued_again(forebay, batch, server, make_claims):
    shards = waiting(server)
    claims = make_claims()
    held = claims.claim()
    dead = claims.claim()  # its record says started, and nobody holds it: its end was lost in a failover
    claims.drop(dead)
    server.lrem("rq:queue:default", 1, shards[-1])
    resumed = forebay.resume(batch)
    assert (resumed.known, resumed.queued) == (True, 2)
    assert sorted([*waiting(server), held.id]) == sorted(shards)
    assert forebay.resume(batch).queued == 0


def test_a_lost_finaliser_is_queued_again(forebay, batch, server):
    answer_all(forebay, batch)
    server.delete("rq:queue:default")
    assert forebay.resume(batch).queued == 1
    assert waiting(server) == [queues.finalise_job_id(batch)]
    assert forebay.resume(batch).queued == 0


def test_what_was_lost_is_listed_newest_first_and_what_is_known_is_not(forebay, batch, server):
    assert forebay.forgotten() == []
    server.flushall()
    assert [record.id for record in forebay.forgotten()] == [batch]
    (forebay.desk.storage.files(batch)).remove("batch.json")
    assert forebay.forgotten() == []


# -- the command ---------------------------------------------------------------------------------------------


@pytest.fixture
def command(redis_url, tmp_path, monkeypatch):
    monkeypatch.setenv("FOREBAY_REDIS_URL", redis_url)
    monkeypatch.setenv("FOREBAY_STORAGE", str(tmp_path / "storage"))

    def run(*words):
        ended = CliRunner().invoke(app, ["resume", *words])
        return ended.exit_code, ended.stdout, ended.stderr

    return run


def test_the_command_says_what_it_did_and_that_workers_are_missing(command, batch, server):
    server.flushall()
    code, out, said = command(batch, "--json")
    assert (code, json.loads(out)["status"]) == (0, "in_progress")
    assert f"{batch} is known again" in said
    assert "forebay workers add URL" in said
    assert "forebay.toml" in said


def test_the_command_says_when_there_is_nothing_to_do(command, forebay, batch, server):
    forebay.workers.add(f"http://{A}")
    code, _, said = command(batch, "--window", "1h")
    assert code == 0
    assert "in_progress and nothing of it is missing" in said
    assert "its deadline stays" in said
    assert "workers add" not in said
    answer_all(forebay, batch)
    finalise(forebay, batch)
    code, _, said = command(batch)
    assert (code, "has ended (completed); there is nothing to resume" in said) == (0, True)


def test_the_command_knows_no_batch_without_files(command):
    code, _, said = command("batch_nobody")
    assert code == 2
    assert "no batch batch_nobody is known, nor are its files in this storage" in said


def test_the_command_without_an_id_lists_what_was_lost(command, batch, server):
    assert "Redis knows every batch in" in command()[1]
    server.flushall()
    assert batch in command()[1]
    assert [record["id"] for record in json.loads(command("--json")[1])] == [batch]


def test_a_record_that_cannot_be_read_is_named_and_hides_no_other_batch(command, forebay, batch, server):
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    bad = forebay.submit(io.BytesIO(json.dumps(request).encode())).id
    forebay.desk.storage.files(bad).write("batch.json", b"{")
    server.flushall()
    wrong = f"batch.json of {bad} is no record"
    code, out, said = command()
    assert (code, batch in out, bad in out, wrong in said) == (0, True, False, True)
    code, out, said = command("--json")
    assert ([record["id"] for record in json.loads(out)], wrong in said) == ([batch], True)
    assert [record.id for record in forebay.forgotten()] == [batch]
    with pytest.raises(DamagedFileError, match=wrong):
        forebay.resume(bad)
    code, _, said = command(bad)
    assert (code, wrong in said) == (4, True)
    forebay.resume(batch)
    code, out, said = command()
    assert (code, out, wrong in said) == (0, "", True)


# -- a monitor that lives on ---------------------------------------------------------------------------------


async def test_a_living_monitor_registers_the_workers_of_its_file_and_flags_again(valkey, tmp_path):
    path = tmp_path / "forebay.toml"
    path.write_text(f'[[worker]]\nurl = "http://{A}"\n', encoding="utf-8")
    store = FleetStore(valkey)
    workers = ConfiguredWorkers(path, [WorkerSpec(url=f"http://{B}")])
    await workers.tell(store)
    await valkey.flushall()
    await workers.tell(store)
    assert [(worker.id, worker.origin) for worker in (await store.view()).workers] == [
        (A, str(path)),
        (B, ""),
    ]


async def test_a_worker_that_was_not_lost_is_left_as_it_is(valkey, tmp_path):
    """A failover lost the last registration, and with it one step of the counter."""
    path = tmp_path / "forebay.toml"
    path.write_text("".join(f'[[worker]]\nurl = "http://{worker}"\n' for worker in (A, B)), encoding="utf-8")
    store = FleetStore(valkey)
    workers = ConfiguredWorkers(path)
    await workers.tell(store)
    await store.drain(A, deadline_s=300)
    await store.remove(B)
    await valkey.set("forebay:v1:workers:generation", 1)
    await workers.tell(store)
    states = {worker.id: worker.state.value for worker in (await store.view()).workers}
    assert states == {A: "draining", B: "starting"}
