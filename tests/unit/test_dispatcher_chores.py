"""What a dispatcher does again and again beside its work: no failure of it ends the dispatcher."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from dispatcher.service import _MOST_REST_S, _REST_S, Dispatcher
from dispatcher.settings import DispatcherSettings
from workers.errors import StoreUnavailable


@pytest.fixture
async def dispatcher(tmp_path):
    made = Dispatcher(DispatcherSettings(storage=str(tmp_path)))
    yield made
    await made._close(None)


async def logged(dispatcher, *endings):
    """The levels of what is logged while a chore ends so, one after the other."""
    left, over = list(endings), asyncio.Event()

    async def chore():
        if not left:
            over.set()
        elif (ending := left.pop(0)) is not None:
            raise ending

    with structlog.testing.capture_logs() as logs:
        doing = asyncio.create_task(dispatcher._every(0.0, chore))
        await asyncio.wait_for(over.wait(), 10)
        doing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doing
    return [line["log_level"] for line in logs]


async def test_a_chore_that_fails_is_told_once_until_it_went_well_and_done_again(dispatcher):
    wrong = ValueError("spoiled")
    assert await logged(dispatcher, wrong, wrong, None, wrong, wrong) == ["error", "error"]


async def test_a_chore_that_redis_does_not_answer_waits(dispatcher):
    away = StoreUnavailable("away")
    assert await logged(dispatcher, away, away) == ["warning", "warning"]


class Spoiled:
    """Claims that fail twice in a way that nobody foresaw, then give a job."""

    clock_is_off = False

    def __init__(self):
        self.left = [ValueError("spoiled"), ValueError("spoiled")]

    def suspended(self):
        return False

    def claim(self, queues):
        if self.left:
            raise self.left.pop()
        return "a job"


class Held:
    """The jobs of a dispatcher, which ends with the first."""

    def __init__(self, dispatcher):
        self.dispatcher, self.begun = dispatcher, []

    def start(self, claimed, group):
        self.begun.append((claimed, group))
        self.dispatcher.end()


async def test_whatever_keeps_jobs_from_being_taken_is_waited_out(dispatcher, monkeypatch):
    monkeypatch.setattr("dispatcher.service.PAUSE_S", (0.0, 0.0))
    held = Held(dispatcher)
    with structlog.testing.capture_logs() as logs:
        await asyncio.wait_for(dispatcher._claim_jobs(Spoiled(), held, None), 10)
    assert held.begun == [("a job", None)]
    assert [line["event"] for line in logs] == ["cannot take jobs now"] * 2


class Wrong(Spoiled):
    """Claims of a host whose clock is wrong until it was looked at so often; then they give a job."""

    def __init__(self, dispatcher):
        self.left = []
        self.dispatcher, self.looks, self.ready = dispatcher, 3, set()

    @property
    def clock_is_off(self):
        self.ready.add(self.dispatcher._takes_jobs)
        self.looks -= 1
        return self.looks > 0


async def test_while_the_host_s_clock_is_wrong_the_dispatcher_is_not_ready(dispatcher, monkeypatch):
    monkeypatch.setattr("dispatcher.service._IDLE_S", (0.0, 0.0))
    held, wrong = Held(dispatcher), Wrong(dispatcher)
    dispatcher._takes_jobs = True
    await asyncio.wait_for(dispatcher._claim_jobs(wrong, held, None), 10)
    assert held.begun == [("a job", None)]
    assert wrong.ready == {True, False}
    assert dispatcher._takes_jobs


async def test_shards_that_feed_keep_back_only_what_is_not_more_urgent(dispatcher):
    assert dispatcher._queues_with_room == 3
    dispatcher._shards.feeding[1] = 2
    assert dispatcher._queues_with_room == 1
    dispatcher._shards.blocked[1] = 1
    assert dispatcher._queues_with_room == 3
    dispatcher._shards.feeding[0] = 1
    assert dispatcher._queues_with_room == 1


async def test_beside_shards_that_wait_for_room_another_is_taken_only_after_a_while(dispatcher):
    shards, now_s = dispatcher._shards, 0.0
    shards.clock, shards.begun_s = lambda: now_s, 0.0
    shards.feeding[1] = shards.blocked[1] = 3
    now_s = 3 * _REST_S - 0.1
    assert dispatcher._queues_with_room == 1
    now_s = 3 * _REST_S
    assert dispatcher._queues_with_room == 3
    shards.feeding[1] = shards.blocked[1] = 60
    assert dispatcher._queues_with_room == 1
    now_s = _MOST_REST_S
    assert dispatcher._queues_with_room == 3
