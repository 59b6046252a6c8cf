"""A dispatcher as users of RQ know workers: jobs, registries, commands and `rq`'s own command line."""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

import pytest
from rq import Queue, Retry, Worker
from rq.command import send_stop_job_command
from rq.job import Job
from rq.registry import (
    CanceledJobRegistry,
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ScheduledJobRegistry,
    StartedJobRegistry,
)
from rq.scheduler import RQScheduler
from rq.serializers import JSONSerializer

from dispatcher import queues
from tests.acceptance.conftest import MODEL, row

pytestmark = pytest.mark.acceptance

RUN_REQUEST = "dispatcher.jobs.run_request"
LONG = 5000
"""Tokens of an answer that no test waits for."""


class User:
    """A program that knows RQ and nothing of us but the function's name."""

    def __init__(self, rig, queue="default"):
        self.rig = rig
        self.redis = rig.rq_redis
        self.queue = Queue(queue, connection=self.redis, serializer=JSONSerializer)

    def body(self, text, tokens=2):
        message = {"role": "user", "content": text}
        return {"model": MODEL, "messages": [message], "max_tokens": tokens, "ignore_eos": True}

    def ask(self, text, tokens=2, *, kwargs=None, **options):
        return self.queue.enqueue(
            RUN_REQUEST, args=(self.body(text, tokens),), kwargs=kwargs or {}, **options
        )

    async def becomes(self, job, *statuses):
        await self.rig.until(lambda: job.get_status(refresh=True) in statuses, f"{job.id} becomes {statuses}")

    def state_of(self, dispatcher):
        return self.redis.hget(f"rq:worker:{dispatcher}", "state").decode()

    def registry(self, kind):
        return kind(self.queue.name, connection=self.redis, serializer=JSONSerializer)

    def ids(self, kind):
        return self.registry(kind).get_job_ids(cleanup=False)


@pytest.fixture
async def rq_user(rig):
    """A user, an engine that is ready without a monitor, and a dispatcher."""
    await rig.ready_engine(slots=8, tokens_per_s=100.0)
    rig.dispatcher("d1", watch_interval_s=0.1)
    return User(rig)


def prompts_of(engine):
    return [record.prompt for record in engine.stats.log]


async def test_inline_requests_are_cancelled_stopped_and_queued_again_as_any_job(rig, rq_user):
    user, [engine] = rq_user, rig.engines
    running, stopped = user.ask("runs", LONG), user.ask("stops", LONG, retry=Retry(max=3))
    await rig.until(lambda: engine.load().running == 2, "two are with the engine")
    assert {user.ids(StartedJobRegistry)[0], user.ids(StartedJobRegistry)[1]} == {running.id, stopped.id}

    send_stop_job_command(user.redis, stopped.id, serializer=JSONSerializer)
    await user.becomes(stopped, "stopped")
    await rig.until(lambda: engine.load().running == 1, "the engine was told to stop")
    assert stopped.id in user.ids(FailedJobRegistry)
    assert stopped.latest_result().exc_string == "stopped by a command"
    assert stopped.return_value(refresh=True) is None

    # RQ's cancel is for jobs that wait; one that runs goes on to its end.
    running.cancel()
    assert running.get_status(refresh=True) == "canceled"
    assert running.id in user.ids(CanceledJobRegistry)
    assert engine.load().running == 1
    send_stop_job_command(user.redis, running.id, serializer=JSONSerializer)
    await rig.until(lambda: engine.load().running == 0, "the engine was told to stop")

    stopped.requeue()
    await rig.until(lambda: prompts_of(engine).count("stops") == 2, "it is sent once more")
    send_stop_job_command(user.redis, stopped.id, serializer=JSONSerializer)
    await user.becomes(stopped, "stopped")

    impossible = user.ask("never", kwargs={"url": "/v1/files"}, retry=Retry(max=3))
    foreign = user.queue.enqueue("os.getcwd")
    for job, why in ((impossible, "url must be one of"), (foreign, "does not run 'os.getcwd'")):
        await user.becomes(job, "failed")
        assert why in job.latest_result().exc_string
        assert job.id in user.ids(FailedJobRegistry)
    assert impossible.retries_left == 3  # trying again could not mend it
    engine_worker = await rig.worker(engine.url)
    assert engine_worker.leases == 0


async def test_claiming_is_suspended_and_resumed_and_rq_s_own_command_shows_it_all(rig, rq_user):
    user, [engine] = rq_user, rig.engines
    await rig.until(lambda: Worker.all(connection=user.redis), "the dispatcher shows up")
    await rq(rig, "suspend")
    await rig.until(lambda: user.state_of("d1") == "suspended", "the dispatcher is suspended")
    before = user.ask("asked while suspended")
    cancelled = user.ask("cancelled while it waits")
    cancelled.cancel()
    shown = await rq(rig, "info", "--by-queue", "--raw")
    assert "queue default 1" in shown
    assert "default: d1 (suspended)" in shown
    assert user.state_of("d1") == "suspended"
    await rq(rig, "resume")
    await user.becomes(before, "finished")
    assert cancelled.get_status(refresh=True) == "canceled"
    assert prompts_of(engine) == ["asked while suspended"]

    # What dashboards read: workers with their jobs, queues, registries, jobs with their results.
    held = user.ask("held", LONG, meta={"team": "a"})
    await rig.until(lambda: engine.load().running == 1, "it runs")
    [seen] = Worker.all(connection=user.redis, serializer=JSONSerializer)
    assert (seen.name, seen.get_state(), seen.queue_names()) == ("d1", "busy", ["high", "default", "low"])
    assert seen.successful_job_count == 1
    assert [execution.job_id for execution in held.get_executions()] == [held.id]
    assert {queue.name for queue in Queue.all(connection=user.redis)} == {"default"}
    assert user.ids(FinishedJobRegistry) == [before.id]
    assert Job.fetch(held.id, connection=user.redis, serializer=JSONSerializer).meta == {"team": "a"}
    assert Job.fetch(held.id, connection=user.redis, serializer=JSONSerializer).worker_name == "d1"
    assert before.return_value(refresh=True)["status_code"] == 200
    send_stop_job_command(user.redis, held.id, serializer=JSONSerializer)
    await user.becomes(held, "stopped")
    assert "d1" in await rq(rig, "info", "--only-workers")


async def rq(rig, *words):
    """What RQ's own command says."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rq.cli", *words, "--url", rig.redis_url,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0, output
    return output.decode()


async def test_times_results_dependents_and_schedules_of_jobs_are_what_rq_promises(rig, rq_user):
    user, [engine] = rq_user, rig.engines
    kept = user.ask("kept", result_ttl=100, meta={"team": "a"})
    gone = user.ask("gone", result_ttl=0)
    forever = user.ask("forever", result_ttl=-1)
    failed = user.queue.enqueue(RUN_REQUEST, {"stream": True}, failure_ttl=100)
    short = user.ask("short", LONG, job_timeout=1)
    first = user.ask("first", 40)
    second = user.ask("second", depends_on=first)
    after_failure = user.ask("after failure", depends_on=failed)

    await user.becomes(kept, "finished")
    assert 0 < user.redis.ttl(kept.key) <= 100
    assert kept.get_meta(refresh=True) == {"team": "a"}
    await rig.until(lambda: not user.redis.exists(gone.key), "it leaves nothing behind")
    await user.becomes(forever, "finished")
    assert user.redis.ttl(forever.key) == -1

    await user.becomes(failed, "failed")
    assert 0 < user.redis.ttl(failed.key) <= 100
    await user.becomes(second, "finished")
    prompts = prompts_of(engine)
    assert prompts.index("first") < prompts.index("second")
    assert user.ids(DeferredJobRegistry) == [after_failure.id]

    await user.becomes(short, "failed")
    assert "request_timeout" in short.latest_result().exc_string
    await rig.until(lambda: engine.load().running == 0, "the engine was told to stop")

    later = user.queue.enqueue_in(timedelta(0), RUN_REQUEST, user.body("later"))
    assert user.ids(ScheduledJobRegistry) == [later.id]
    scheduler = RQScheduler([user.queue], connection=user.redis, serializer=JSONSerializer)
    scheduler.acquire_locks()
    scheduler.enqueue_scheduled_jobs()
    scheduler.release_locks()
    await user.becomes(later, "finished")

    # A batch that ends leaves none of its jobs behind.
    before = user.ids(FailedJobRegistry), user.ids(FinishedJobRegistry)
    batch = await rig.submit([row("a"), row("b")], slots=4)
    assert (await rig.ended(batch))[0] == "completed"
    jobs = [queues.shard_job_id(batch, 0), queues.finalise_job_id(batch)]
    await rig.until(lambda: not any(user.redis.exists(f"rq:job:{job}") for job in jobs), "no job is left")
    assert (user.ids(FailedJobRegistry), user.ids(FinishedJobRegistry)) == before
