"""The replay: a workload on modelled workers in virtual time, placed by the dispatcher's own code.

Late binding as in a dispatcher: requests wait in its `Backlog`, passes assign them (`dispatcher.assignment`)
and place second attempts (`dispatcher.hedging`), on views of the fleet that are as old as a dispatcher's. Not
modelled: failures, the way over network and store, what a worker serves, and whoever else uses the engines.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias, cast

from dispatcher.assignment import MOST_ASKS, Assignment
from dispatcher.backlog import Backlog, Waiting
from dispatcher.hedges import Candidate
from dispatcher.hedging import Hedging
from dispatcher.scheduler.fleet import FleetModel
from dispatcher.scheduler.outlook import Underway
from dispatcher.scheduler.strategies import Strategies
from dispatcher.speeds import Speeds
from forebay.policy import engine as engines
from forebay.policy.engine import Engine, EngineSpec
from forebay.policy.watched import Polling, WatchedWorker
from forebay.policy.workload import Request, Workload
from workers.fleet import FleetView

_PASS_S = 0.005
"""From one pass to the next at least: what ends meanwhile is settled together, as it is while a real pass
waits for the store."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How a replay goes. Times are in seconds.

    `cold`: the fleet is new, so speeds and slots have to be learned on the way; else they are known.
    `stale_after_s` and `dead_after_s`: ages at which a load fades and is unknown.
    """

    seed: int = 1
    cold: bool = False
    hedge: bool = True
    view_interval_s: float = 0.1
    stale_after_s: float = 3.0
    dead_after_s: float = 10.0
    polling: Polling = field(default_factory=Polling)


@dataclass(slots=True, eq=False)
class Ticket:
    """A request from its coming to its end. `leased_s`: when it first got a lease."""

    request: Request
    joined_s: float
    leased_s: float = math.nan
    attempts: list[Attempt] = field(default_factory=list)
    ended_s: float = math.nan

    def done(self) -> bool:
        """Nobody gives up waiting."""
        return False


@dataclass(slots=True, eq=False)
class Attempt:
    """One lease, and the sequence that runs under it. `won`: its answer is the request's."""

    key: int
    ticket: Ticket
    worker: WatchedWorker
    granted_s: float
    second: bool = False
    won: bool = False
    tokens: int = 0
    """Written for it in the end, or until it was aborted."""


@dataclass(frozen=True, slots=True)
class Replayed:
    """What happened, whole."""

    elapsed_s: float
    tickets: Sequence[Ticket]
    """In the order of sending."""
    workers: Sequence[WatchedWorker]


_Place: TypeAlias = "asyncio.Future[Ticket]"


class Replay:
    """One run. It is made for one workload on one fleet, and thrown away after."""

    def __init__(
        self, workload: Workload, fleet: Sequence[EngineSpec], strategies: Strategies, setup: Setup
    ) -> None:
        self._setup = setup
        width = len(str(len(fleet) - 1))
        self._workers = {
            worker.name: worker
            for worker in (
                WatchedWorker(
                    spec.name or f"worker-{number:0{width}}", Engine(spec), setup.polling, told=not setup.cold
                )
                for number, spec in enumerate(fleet)
            )
        }
        arrivals = workload.arrivals or [0.0] * len(workload.requests)
        self._tickets = [
            Ticket(request, arrival_s) for request, arrival_s in zip(workload.requests, arrivals, strict=True)
        ]
        one_by_one = workload.arrivals is not None
        self._coming = deque(self._tickets if one_by_one else ())
        self._shards = deque(_cut(self._tickets, workload.shards) if not one_by_one else ())
        self._unfinished = len(self._tickets)
        self._speeds = Speeds()
        if not setup.cold:
            self._tell_speeds()
        self._hedging = Hedging(self._speeds)
        self._assignment: Assignment[Ticket] = Assignment(strategies, Random(setup.seed))
        self._backlog: Backlog[Ticket] = Backlog()
        self._attempts: dict[int, Attempt] = {}
        self._keys = itertools.count(1)
        self._known_speeds: dict[str, float] = {}
        self._now_s = 0.0
        self._events: list[tuple[float, int, int, str]] = []  # when, serial, attempt that ends or 0, worker
        self._serials = itertools.count()
        self._looked_s = -math.inf
        self._passed_s = -math.inf
        self._pass_s = 0.0

    def run(self) -> Replayed:
        """Let everything run to its end."""
        for number, name in enumerate(self._workers):
            self._at(self._setup.polling.interval_s * number / len(self._workers), 0, name)
        while self._unfinished:
            if self._coming:
                self._pass_s = min(self._pass_s, max(self._coming[0].joined_s, self._passed_s + _PASS_S))
            if self._pass_s <= self._events[0][0]:
                self._now_s = self._pass_s
                self._pass()
            else:
                self._now_s, _, key, name = heapq.heappop(self._events)
                self._happen(key, self._workers[name])
        return Replayed(self._now_s, self._tickets, tuple(self._workers.values()))

    def _tell_speeds(self) -> None:
        for worker in self._workers.values():
            # One token: it counts for next to nothing beside the first answer that is seen.
            self._speeds.saw(worker.name, 1, 1.0 / worker.engine.spec.speed, allowed=1)

    def _at(self, when_s: float, key: int, worker: str) -> None:
        heapq.heappush(self._events, (when_s, next(self._serials), key, worker))

    def _wake(self) -> None:
        self._pass_s = min(self._pass_s, max(self._now_s, self._passed_s + _PASS_S))

    # -- what happens to engines ------------------------------------------------------------------------

    def _happen(self, key: int, worker: WatchedWorker) -> None:
        if not key:
            self._at(worker.poll(self._now_s), 0, worker.name)
        elif (attempt := self._attempts.pop(key, None)) is not None:  # else it was aborted
            self._end(attempt)

    def _begin(self, ticket: Ticket, worker: WatchedWorker, *, second: bool = False) -> None:
        need = ticket.request.need
        attempt = Attempt(next(self._keys), ticket, worker, self._now_s, second=second)
        ticket.attempts.append(attempt)
        self._attempts[attempt.key] = attempt
        worker.leases[attempt.key] = (self._now_s, need.cost_tokens)
        sequence = engines.Sequence(attempt.key, need.prompt_tokens, ticket.request.answer_tokens)
        self._foresee(worker, worker.engine.submit(sequence, self._now_s))

    def _end(self, attempt: Attempt) -> None:
        ticket, worker = attempt.ticket, attempt.worker
        attempt.won, attempt.tokens = True, ticket.request.answer_tokens
        ticket.ended_s = self._now_s
        self._unfinished -= 1
        self._foresee(worker, worker.engine.finish(attempt.key, self._now_s))
        self._give_back(attempt)
        for other in ticket.attempts:
            if other is not attempt:
                self._abort(other)
        self._learn(attempt)
        self._wake()

    def _abort(self, attempt: Attempt) -> None:
        del self._attempts[attempt.key]
        engine = attempt.worker.engine
        attempt.tokens = engine.tokens_of(attempt.key, self._now_s)
        self._foresee(attempt.worker, engine.abort(attempt.key, self._now_s))
        self._give_back(attempt)

    def _foresee(self, worker: WatchedWorker, started: Sequence[engines.Started]) -> None:
        for one in started:
            self._at(one.end_s, one.key, worker.name)

    def _give_back(self, attempt: Attempt) -> None:
        _, tokens = attempt.worker.leases.pop(attempt.key)
        self._assignment.fleet.gave_back(attempt.worker.name, tokens, granted_s=attempt.granted_s)

    def _learn(self, attempt: Attempt) -> None:
        need = attempt.ticket.request.need
        self._hedging.wrote(attempt.tokens)
        seconds = self._now_s - attempt.granted_s
        if self._speeds.saw(attempt.worker.name, attempt.tokens, seconds, allowed=need.asked_tokens):
            self._looked_s = -math.inf  # it need not be scouted any more

    # -- what the dispatcher does -----------------------------------------------------------------------

    def _pass(self) -> None:
        self._feed()
        if self._now_s - self._looked_s >= self._setup.view_interval_s:
            self._look()
        self._passed_s = self._now_s
        self._pass_s = self._now_s + self._setup.view_interval_s
        asks = self._assignment.assign(self._backlog, map(_underway, self._attempts.values()), self._now_s)
        refused = [waiting for waiting, decision in asks if not self._acquire(waiting, decision.candidates)]
        for waiting in refused:
            self._backlog.rejoin(waiting)
        if not asks and self._hedging.due and not len(self._backlog):
            self._hedge()
        if refused or len(asks) == MOST_ASKS or self._feed():
            self._wake()

    def _feed(self) -> bool:
        """Bring who has arrived, and shards while few wait; whether any shard was brought."""
        while self._coming and self._coming[0].joined_s <= self._now_s:
            self._join(self._coming.popleft())
        before = len(self._shards)
        while self._shards and self._assignment.has_room(self._backlog):
            for ticket in self._shards.popleft():
                self._join(ticket)
        self._hedging.due = self._setup.hedge and not self._shards and not self._coming
        return len(self._shards) < before

    def _join(self, ticket: Ticket) -> None:
        request = ticket.request
        self._assignment.note(request.need)
        # Nothing is awaited here: the backlog only asks whether a place was given up.
        self._backlog.join(request.need, request.urgency, cast(_Place, ticket), batch_id=request.batch_id)

    def _look(self) -> None:
        self._looked_s = self._now_s
        views = tuple(worker.view(self._now_s) for worker in self._workers.values())
        speeds = {view.id: self._speeds.of(view) for view in views}
        self._known_speeds = {name: speed for name, speed in speeds.items() if speed is not None}
        fleet = FleetModel(
            FleetView(self._now_s, 1, views),
            speeds=self._known_speeds,
            stale_after_s=self._setup.stale_after_s,
            dead_after_s=self._setup.dead_after_s,
        )
        self._assignment.look(fleet, self._known_speeds, self._now_s)

    def _acquire(self, waiting: Waiting[Ticket], candidates: Sequence[str]) -> bool:
        """Lease the first of the candidates that has room, as the store would; whether one had."""
        fleet, tokens = self._assignment.fleet, waiting.need.cost_tokens
        chosen = next((name for name in candidates if self._workers[name].has_room), None)
        if chosen != candidates[0]:
            fleet.gave_back(candidates[0], tokens)
            if chosen is not None:
                fleet.took(chosen, tokens)
        if chosen is None:
            for name in candidates:
                fleet.refused(name, "limit", None)
            return False
        ticket = cast(Ticket, waiting.granted)
        ticket.leased_s = self._now_s
        self._begin(ticket, self._workers[chosen])
        return True

    def _hedge(self) -> None:
        """Give running requests that gain by it a second attempt on a faster worker."""
        fleet = self._assignment.fleet
        free = {name: fleet.free_slots(name) for name in fleet.with_room(None, self._now_s)}
        everybody = frozenset(self._workers)
        running = {str(one.key): one for one in self._attempts.values() if len(one.ticket.attempts) == 1}
        candidates = [
            Candidate(lease, one.worker.name, one.granted_s, one.ticket.request.need.answer_tokens, everybody)
            for lease, one in running.items()
        ]
        for hedge in self._hedging.pick(candidates, free, self._known_speeds, self._now_s):
            ticket, worker = running[hedge.lease].ticket, self._workers[hedge.worker_id]
            if worker.has_room:
                fleet.took(worker.name, ticket.request.need.cost_tokens)
                self._begin(ticket, worker, second=True)
                self._hedging.made_one(ticket.request.need.answer_tokens)


def _cut(tickets: Sequence[Ticket], sizes: Sequence[int]) -> list[Sequence[Ticket]]:
    ends = list(itertools.accumulate(sizes))
    return [tickets[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _underway(attempt: Attempt) -> Underway:
    return Underway(attempt.worker.name, attempt.granted_s, attempt.ticket.request.need.answer_tokens)


def replay(workload: Workload, fleet: Sequence[EngineSpec], strategies: Strategies, setup: Setup) -> Replayed:
    """Run a workload on a fleet. The same arguments give the same answer; strategies are used once only."""
    return Replay(workload, fleet, strategies, setup).run()
