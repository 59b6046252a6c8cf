"""One request's life: wait for a lease, send, see what came back, and again until an answer is final.

This is the only retry loop. What an end means stands in `outcome`, what follows in `retry`, where the next
attempt goes is `placement`'s subject, where the answer is kept that of whoever asked (`shard`, `inline`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from random import Random
from typing import assert_never

import structlog

from dispatcher.leasing import Held
from dispatcher.outcome import CANCELLED, Outcome, RequestFate, classify
from dispatcher.placement import Placement
from dispatcher.race import Race
from dispatcher.reply import Failure, FailureKind, Reply
from dispatcher.retry import (
    GiveUp,
    GiveUpCode,
    History,
    RetryPolicy,
    Settled,
    TryAgain,
    next_step,
    read_timeout_s,
)
from dispatcher.scheduler.question import Need
from dispatcher.scheduler.strategies import Strategies
from dispatcher.send import Sender
from dispatcher.solitude import Solitude
from workers.credentials import key_if_there
from workers.errors import SettingsError

log = structlog.get_logger(__name__)

_LEFT_ALONE_S = 10.0
"""How long a worker that refuses us, or does not serve what is written of it, is left alone by everybody."""


@dataclass(frozen=True, slots=True)
class Request:
    """One inference call. `deadline_s` is on the monotonic clock; what is late then ends with `late_code`."""

    id: str
    path: str
    body: bytes
    need: Need
    urgency: int
    deadline_s: float
    late_code: str
    hedge: bool = False
    """Whether a second attempt may be made of it while the first runs."""
    alone: Callable[[], Awaitable[object]] | None = None
    """Of a request that may be sent only while nothing else is: awaited then, before each attempt."""
    custom_id: str = ""
    """What its author calls it; for records only."""
    batch_id: str | None = None
    share: float = 1.0
    """How much its batch gets beside others."""
    batch_lines: int = 1


@dataclass(frozen=True, slots=True)
class Course:
    """How a request went: its last worker (None: none was asked), attempts sent, times in seconds."""

    worker: str | None = None
    attempts: int = 0
    queued_s: float = 0.0
    latency_s: float | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """An HTTP answer that is final, whatever its status."""

    reply: Reply
    course: Course


@dataclass(frozen=True, slots=True)
class Unanswered:
    """There is no HTTP answer, and there will be none."""

    code: str
    message: str
    course: Course


@dataclass(frozen=True, slots=True)
class _Attempted:
    """What came back of one attempt, from whom."""

    answer: Reply | Failure
    outcome: Outcome
    held: Held


@dataclass(frozen=True, slots=True)
class Turn:
    """Which of a request's attempts one is, from 1, and how long it waited for its lease.

    None: it did not wait, it is a second attempt beside one that runs.
    """

    number: int
    waited_s: float | None


@dataclass(frozen=True, slots=True)
class Seen:
    """One attempt as an onlooker sees it: for metrics and records, never for decisions."""

    request: Request
    held: Held
    outcome: Outcome
    elapsed_s: float
    turn: Turn
    answer: Reply | Failure | None = None
    """What came back; None: it was cancelled."""


class Attempts:
    """Runs requests to their end."""

    def __init__(
        self,
        placement: Placement,
        sender: Sender,
        strategies: Strategies,
        policy: RetryPolicy,
        *,
        request_timeout_s: float,
        slowest_rate: float,
        rng: Random,
        onlooker: Callable[[Seen], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._placement = placement
        self._sender = sender
        self._strategies = strategies
        self._policy = policy
        self._solitude = Solitude()
        self._request_timeout_s = request_timeout_s
        self._slowest_rate = slowest_rate
        self._rng = rng
        self._onlooker = onlooker
        self._clock = clock
        self._wall_clock = wall_clock

    async def run(self, request: Request) -> Answered | Unanswered:
        """The request's end. Cancelling it closes the connection, so that the engine stops working on it."""
        try:
            self._strategies.for_request(request.need)
        except SettingsError as error:
            return Unanswered("invalid_strategy", str(error), Course())
        history, course, need = History(), Course(), request.need
        started_s = self._clock()
        while True:
            asked_s = self._clock()
            held = await self._lease(request, need, asked_s)
            if held is None:
                return Unanswered(request.late_code, "no worker took it before its time was over", course)
            granted_s = self._clock()
            course = replace(
                course,
                worker=held.worker_id,
                attempts=course.attempts + 1,
                queued_s=granted_s - started_s,
            )
            turn = Turn(course.attempts, granted_s - asked_s)
            attempted, attempts = await self._race(request, held, history, turn)
            answer = attempted.answer
            course = replace(
                course,
                worker=attempted.held.worker_id,
                attempts=course.attempts + attempts - 1,
                latency_s=answer.elapsed_s,
            )
            step = next_step(
                attempted.outcome,
                attempted.held.worker_id,
                history,
                now_s=self._clock(),
                deadline_s=request.deadline_s,
                policy=self._policy,
                rng=self._rng,
            )
            match step:
                case Settled():
                    return _final(answer, course)
                case GiveUp(code, message):
                    late = code is GiveUpCode.REQUEST_TIMEOUT
                    return Unanswered(request.late_code if late else code.value, message, course)
                case TryAgain():
                    history = step.history
                    need = replace(request.need, tried=step.aside)
                    await asyncio.sleep(max(0.0, step.not_before_s - self._clock()))
                case _:
                    assert_never(step)

    async def _lease(self, request: Request, need: Need, asked_s: float) -> Held | None:
        """A lease with time left to use it; None: there is none."""
        remaining_s = request.deadline_s - asked_s
        if remaining_s <= 0:
            return None
        try:
            async with asyncio.timeout(remaining_s):
                held = await self._placement.lease(
                    need, request.urgency, batch_id=request.batch_id, share=request.share
                )
        except TimeoutError:
            return None
        if self._clock() < request.deadline_s:
            return held
        self._end(held, CANCELLED)
        return None

    async def _race(
        self, request: Request, held: Held, history: History, turn: Turn
    ) -> tuple[_Attempted, int]:
        """One attempt, or two of which one wins; and how many there were."""
        if not request.hedge:
            return await self._attempt(request, held, history, turn), 1
        race: Race[_Attempted] = Race(_is_usable, _is_done)
        joined: list[Held] = []

        def join(second: Held) -> None:
            if not race.open:
                self._end(second, CANCELLED)
                return
            joined.append(second)
            race.join(
                lambda: self._attempt(request, second, history, Turn(turn.number + 1, None)),
                never_begun=lambda: self._end(second, CANCELLED),
            )

        held.join = join
        try:
            return await race.run(self._attempt(request, held, history, turn)), 1 + len(joined)
        finally:
            held.join = None

    async def _attempt(self, request: Request, held: Held, history: History, turn: Turn) -> _Attempted:
        planned_s = read_timeout_s(
            request.need.asked_tokens, request.need.prompt_tokens, self._request_timeout_s, self._slowest_rate
        )
        outcome, answer = CANCELLED, None
        elapsed_s = 0.0
        try:
            async with self._solitude.sending(request.alone):
                remaining_s = request.deadline_s - self._clock()
                answer = await self._send(request, held, min(planned_s, max(0.001, remaining_s)))
            elapsed_s = answer.elapsed_s
            outcome = classify(
                answer,
                now_s=self._wall_clock(),
                remaining_s=remaining_s,
                own_timeout=planned_s <= remaining_s,
                earlier=history.labels,
            )
            return _Attempted(answer, outcome, held)
        finally:
            self._end(held, outcome)
            self._onlooker(Seen(request, held, outcome, elapsed_s, turn, answer))

    async def _send(self, request: Request, held: Held, timeout_s: float) -> Reply | Failure:
        """Send it, until `held.call_off` is called: that closes the connection, so that the engine stops."""
        began_s = self._clock()
        try:
            async with asyncio.timeout(None) as sending:
                held.call_off = lambda: sending.reschedule(0.0)
                return await self._sender.send(
                    held.url,
                    request.path,
                    request.body,
                    api_key=key_if_there(held.api_key_env, held.api_key_file),
                    timeout_s=timeout_s,
                    request_id=request.id,
                )
        except TimeoutError:
            took_s = self._clock() - began_s
            return Failure(FailureKind.RECALLED, took_s, "its worker stands still, or is gone")
        finally:
            held.call_off = None

    def _end(self, held: Held, outcome: Outcome) -> None:
        defer_s = outcome.defer_s
        if outcome.unready_for_model or outcome.reread_models:
            defer_s = max(defer_s, _LEFT_ALONE_S)
        if outcome.fate not in (RequestFate.DONE, RequestFate.CANCELLED):
            log.debug("attempt ended", worker=held.worker_id, outcome=outcome.label.value)
        self._placement.give_back(
            held, outcome.verdict, outcome.label.value, defer_s=defer_s, halve=outcome.halve_limit
        )


def _is_usable(attempted: _Attempted) -> bool:
    return attempted.outcome.fate in (RequestFate.DONE, RequestFate.FINAL)


def _is_done(attempted: _Attempted) -> bool:
    return attempted.outcome.fate is RequestFate.DONE


def _final(answer: Reply | Failure, course: Course) -> Answered | Unanswered:
    match answer:
        case Reply():
            return Answered(answer, course)
        case Failure(kind, _, detail):
            return Unanswered(kind.value, detail or kind.value, course)
        case _:
            assert_never(answer)
