"""One request's life: leases are played, replies come from a mock of the network."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest

from dispatcher.attempts import Answered, Attempts, Request, Unanswered
from dispatcher.outcome import Label
from dispatcher.placement import Closing
from dispatcher.retry import RetryPolicy
from dispatcher.scheduler.question import Need
from dispatcher.scheduler.strategies import SchedulerPolicy, Strategies
from dispatcher.send import Sender
from workers.breaker import Verdict

OK = httpx.Response(200, json={"id": "x"})


class Leases:
    """Grants at once, on the first worker that was not tried; remembers what came back."""

    def __init__(self, *names):
        self.names = names or ("a:1", "b:1")
        self.asked = []
        self.granted = []
        self.back = []
        self.held = 0
        self.never = False
        self.closing = False

    async def lease(self, need, urgency, *, batch_id=None, share=1.0):
        self.asked.append(need)
        if self.closing:
            raise Closing
        if self.never:
            await asyncio.Event().wait()
        fresh = [name for name in self.names if name not in need.tried] or list(self.names)
        self.held += 1
        held = SimpleNamespace(
            lease=f"d:{len(self.asked)}|1",
            worker_id=fresh[0],
            url=f"http://{fresh[0]}",
            api_key_env="A_KEY",
            api_key_file=None,
        )
        self.granted.append(held)
        return held

    def give_back(self, held, verdict, reason="", *, defer_s=0.0, halve=False):
        self.held -= 1
        self.back.append((held.worker_id, verdict, reason, defer_s, halve))


class Network:
    """Answers from a list, in turn; the last one for ever."""

    def __init__(self, *replies):
        self.replies = list(replies)
        self.seen = []

    async def __call__(self, request):
        self.seen.append(request)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        if callable(reply):
            return await reply(request)
        return reply


def make(network, leases, *, seen=None, **changes):
    given = {
        "request_timeout_s": 600.0,
        "slowest_rate": 5.0,
        "rng": random.Random(1),
        "onlooker": (lambda one: None) if seen is None else seen.append,
    } | changes
    policy = RetryPolicy(base_s=0.001, cap_s=0.002)
    return Attempts(
        leases, Sender(httpx.MockTransport(network)), Strategies(SchedulerPolicy()), policy, **given
    )


def request(seconds=60.0, **changes):
    need = Need(model="m", prompt_tokens=3, asked_tokens=4, cost_tokens=7, **changes)
    return Request(
        id="r1",
        path="/v1/chat/completions",
        body=b'{"model": "m"}',
        need=need,
        urgency=1,
        deadline_s=asyncio.get_running_loop().time() + seconds,
        late_code="batch_expired",
    )


async def test_an_answer_is_the_end_and_the_worker_hears_of_success(monkeypatch):
    monkeypatch.setenv("A_KEY", "secret")
    network, leases, seen = Network(OK), Leases(), []
    answer = await make(network, leases, seen=seen).run(request())
    assert isinstance(answer, Answered)
    assert (answer.reply.status, answer.course.worker, answer.course.attempts) == (200, "a:1", 1)
    assert leases.back == [("a:1", Verdict.SUCCESS, "ok", 0.0, False)]
    (sent,) = network.seen
    assert (str(sent.url), sent.content) == ("http://a:1/v1/chat/completions", b'{"model": "m"}')
    assert (sent.headers["authorization"], sent.headers["x-request-id"]) == ("Bearer secret", "r1")
    assert [one.outcome.label for one in seen] == [Label.OK]


async def test_a_failure_is_tried_elsewhere_and_charged_to_its_own_worker():
    network, leases = Network(httpx.ReadError("reset"), OK), Leases()
    answer = await make(network, leases).run(request())
    assert (answer.course.worker, answer.course.attempts) == ("b:1", 2)
    assert [(worker, verdict) for worker, verdict, *_ in leases.back] == [
        ("a:1", Verdict.FAILURE),
        ("b:1", Verdict.SUCCESS),
    ]
    assert [need.tried for need in leases.asked] == [frozenset(), {"a:1"}]


async def test_a_key_that_no_header_can_carry_is_not_sent_and_the_request_goes_elsewhere(monkeypatch):
    monkeypatch.setenv("A_KEY", "\u201csecret\u201d")
    network, leases = Network(httpx.Response(401), OK), Leases()
    answer = await make(network, leases).run(request())
    assert (answer.reply.status, answer.course.worker) == (200, "b:1")
    assert "authorization" not in network.seen[0].headers
    assert leases.back[0] == ("a:1", Verdict.NEUTRAL, "unauthorized", 10.0, False)


async def test_a_worker_that_no_request_can_be_written_to_takes_none_from_the_others():
    network, leases = Network(httpx.InvalidURL("no URL"), OK), Leases()
    answer = await make(network, leases).run(request())
    assert (answer.reply.status, answer.course.worker) == (200, "b:1")
    assert leases.back[0] == ("a:1", Verdict.FAILURE, "unsendable", 0.0, False)


async def test_attempts_are_bounded_and_every_one_gives_its_lease_back():
    network, leases = Network(httpx.Response(500)), Leases()
    answer = await make(network, leases).run(request())
    assert isinstance(answer, Unanswered)
    assert (answer.code, answer.course.attempts) == ("max_attempts", 5)
    assert (len(leases.back), leases.held) == (5, 0)


async def test_a_full_worker_charges_nothing_and_is_deferred_with_its_limit_halved():
    busy = httpx.Response(429, headers={"retry-after": "2"})
    network, leases = Network(*[busy] * 9, OK), Leases("a:1")
    answer = await make(network, leases).run(request())
    assert (answer.reply.status, answer.course.attempts) == (200, 10)
    assert leases.back[0] == ("a:1", Verdict.NEUTRAL, "busy", 2.0, True)
    assert leases.asked[5].tried == frozenset()


async def test_a_refusal_of_the_request_is_final_with_its_body():
    network, leases = Network(httpx.Response(400, content=b'{"error": "too long"}')), Leases()
    answer = await make(network, leases).run(request())
    assert (answer.reply.status, answer.reply.body) == (400, b'{"error": "too long"}')
    assert (answer.course.attempts, leases.back[0][1]) == (1, Verdict.NEUTRAL)


async def test_a_worker_that_does_not_serve_the_model_is_left_alone_for_a_while():
    gone = httpx.Response(404, json={"error": {"message": "The model `m` does not exist."}})
    network, leases = Network(gone, OK), Leases()
    answer = await make(network, leases).run(request())
    assert answer.course.worker == "b:1"
    assert leases.back[0][3] == 10.0


async def test_who_gets_no_lease_in_time_is_late():
    leases = Leases()
    leases.never = True
    answer = await make(Network(OK), leases).run(request(seconds=0.01))
    assert isinstance(answer, Unanswered)
    assert (answer.code, answer.course.attempts, answer.course.worker) == ("batch_expired", 0, None)


async def test_a_request_whose_time_is_over_is_not_sent():
    network, leases = Network(OK), Leases()
    answer = await make(network, leases).run(request(seconds=-1.0))
    assert (answer.code, network.seen, leases.asked) == ("batch_expired", [], [])


async def test_a_lease_that_comes_when_the_time_is_over_is_given_back_unused():
    class Late(Leases):
        async def lease(self, need, urgency, **whose):
            held = await super().lease(need, urgency)
            now.append(2000.0)
            return held

    now = [1000.0]
    network, leases = Network(OK), Late()
    asked = replace(request(), deadline_s=1500.0)
    answer = await make(network, leases, clock=lambda: now[-1]).run(asked)
    assert (answer.code, answer.course.attempts, network.seen) == ("batch_expired", 0, [])
    assert [(verdict, reason) for _, verdict, reason, *_ in leases.back] == [(Verdict.NEUTRAL, "cancelled")]


async def test_a_request_that_is_tried_again_has_the_time_that_is_left_and_no_more():
    async def slow(_):
        now.append(now[-1] + 400.0)
        return httpx.Response(500)

    now = [1000.0]
    network, leases = Network(slow), Leases()
    asked = replace(request(), deadline_s=1500.0)
    answer = await make(network, leases, clock=lambda: now[-1]).run(asked)
    assert (answer.code, answer.course.attempts, leases.held) == ("batch_expired", 2, 0)


async def test_a_reply_that_does_not_come_in_time_is_late_and_no_failure_of_the_worker():
    async def never(_):
        await asyncio.Event().wait()

    network, leases = Network(never), Leases()
    answer = await make(network, leases).run(request(seconds=0.02))
    assert answer.code == "batch_expired"
    assert [(verdict, reason) for _, verdict, reason, *_ in leases.back] == [(Verdict.NEUTRAL, "timeout")]


async def test_a_reply_that_does_not_come_in_the_time_we_planned_is_a_failure():
    async def never(_):
        await asyncio.Event().wait()

    network, leases = Network(never, OK), Leases()
    attempts = make(network, leases, request_timeout_s=0.01, slowest_rate=1e6)
    assert (await attempts.run(request())).course.worker == "b:1"
    assert leases.back[0][:3] == ("a:1", Verdict.FAILURE, "timeout")


async def test_cancelling_closes_the_request_and_frees_its_lease_without_a_verdict():
    begun, closed = asyncio.Event(), []

    async def slow(_):
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            closed.append(True)
            raise

    leases, seen = Leases(), []
    task = asyncio.create_task(make(Network(slow), leases, seen=seen).run(request()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed == [True]
    assert leases.back == [("a:1", Verdict.NEUTRAL, "cancelled", 0.0, False)]
    assert [one.outcome.label for one in seen] == [Label.CANCELLED]


async def test_who_is_called_off_closes_its_request_and_goes_elsewhere_without_a_verdict():
    begun, closed = asyncio.Event(), []

    async def still(_):
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            closed.append(True)
            raise

    leases, seen = Leases(), []
    task = asyncio.create_task(make(Network(still, OK), leases, seen=seen).run(request()))
    await begun.wait()
    leases.granted[0].call_off()
    answer = await task
    assert (answer.course.worker, answer.course.attempts, closed) == ("b:1", 2, [True])
    assert [back[:3] for back in leases.back] == [
        ("a:1", Verdict.NEUTRAL, "recalled"),
        ("b:1", Verdict.SUCCESS, "ok"),
    ]
    assert [one.outcome.charged for one in seen] == [True, False]
    assert [held.call_off for held in leases.granted] == [None, None]


async def test_who_is_cancelled_while_it_is_called_off_stays_cancelled():
    begun = asyncio.Event()

    async def still(_):
        begun.set()
        await asyncio.Event().wait()

    leases = Leases()
    task = asyncio.create_task(make(Network(still), leases).run(request()))
    await begun.wait()
    leases.granted[0].call_off()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert leases.back == [("a:1", Verdict.NEUTRAL, "cancelled", 0.0, False)]


async def test_the_end_of_the_service_is_passed_on():
    leases = Leases()
    leases.closing = True
    with pytest.raises(Closing):
        await make(Network(OK), leases).run(request())


async def test_an_unknown_strategy_is_the_request_s_own_fault():
    leases = Leases()
    answer = await make(Network(OK), leases).run(request(strategy="by-horoscope"))
    assert (answer.code, leases.asked) == ("invalid_strategy", [])
    assert "by-horoscope" in answer.message


async def test_an_attempt_that_fails_for_a_fault_of_ours_still_frees_its_lease():
    leases = Leases()
    with pytest.raises(ZeroDivisionError):
        await make(Network(ZeroDivisionError()), leases).run(request())
    assert leases.held == 0


async def test_a_request_that_must_be_alone_is_sent_when_nothing_else_is_and_what_comes_before_is_done():
    noted, begun, let_go = [], asyncio.Event(), asyncio.Event()

    async def slow_at_first(sent):
        begun.set()
        await let_go.wait()
        return OK

    network, leases = Network(slow_at_first, OK), Leases()
    attempts = make(network, leases)

    async def note():
        noted.append((len(network.seen), let_go.is_set()))

    other = asyncio.create_task(attempts.run(request()))
    await begun.wait()
    lone = asyncio.create_task(attempts.run(replace(request(), alone=note)))
    for _ in range(20):  # as far as it gets
        await asyncio.sleep(0)
    assert (leases.held, noted) == (2, [])
    let_go.set()
    assert all(isinstance(answer, Answered) for answer in await asyncio.gather(other, lone))
    assert noted == [(1, True)]
