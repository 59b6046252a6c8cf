"""Inline requests: how much time each gets, and what its answer becomes; requests' lives are played."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dispatcher.attempts import Answered, Course, Unanswered
from dispatcher.inline import InlineRunner
from dispatcher.inline_request import InlineRequestError
from dispatcher.reply import Reply

NOW_S = 1000.0
BODY = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


class Lives:
    """Answers every request alike, and remembers it."""

    def __init__(self, answer):
        self.answer = answer
        self.seen = []

    async def run(self, request):
        self.seen.append(request)
        return self.answer


def answered(body=b'{"id": "x"}', status=200):
    return Answered(Reply(status, body, 0.1), Course("w:1", 1, 0.0, 0.1))


def job(*, waited_s=0.0, timeout_s=None):
    return SimpleNamespace(id="job-1", waited_s=waited_s, timeout_s=timeout_s)


async def run(lives, given, body=BODY, **kwargs):
    runner = InlineRunner(None, lives, deadline_s=3600.0, clock=lambda: NOW_S)
    return await runner.run(given, 0, body, **kwargs)


@pytest.mark.parametrize(
    ("given", "timeout_s", "seconds"),
    [
        (job(), None, 3600.0),
        (job(waited_s=5000.0), None, 3600.0),  # what waits in a long queue for nothing in particular
        (job(waited_s=10.0), 60.0, 50.0),
        (job(waited_s=70.0), 60.0, -10.0),
        (job(timeout_s=30.0), None, 30.0),
        (job(timeout_s=7200.0), None, 7200.0),
        (job(timeout_s=30.0), 20, 20.0),
        (job(timeout_s=30.0), 40, 30.0),
        (job(), 10**400, 366 * 86_400.0),
    ],
)
async def test_a_request_has_the_time_that_who_queued_it_gave(given, timeout_s, seconds):
    lives = Lives(answered())
    await run(lives, given, timeout_s=timeout_s)
    assert [one.deadline_s - NOW_S for one in lives.seen] == [seconds]


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf"), True, "60", [60], {}])
async def test_a_time_that_is_none_is_refused(timeout_s):
    lives = Lives(answered())
    with pytest.raises(InlineRequestError, match="timeout_s must be a number of seconds above 0"):
        await run(lives, job(), timeout_s=timeout_s)
    assert lives.seen == []


async def test_an_answer_is_the_result_and_one_that_is_no_json_its_text():
    assert (await run(Lives(answered()), job()))["body"] == {"id": "x"}
    result = await run(Lives(answered(b"<html>\xff", 502)), job())
    assert (result["status_code"], result["body"]) == (502, "<html>\ufffd")


async def test_no_answer_is_an_error_with_its_code():
    with pytest.raises(InlineRequestError, match="request_timeout: too late"):
        await run(Lives(Unanswered("request_timeout", "too late", Course())), job())
