"""Late binding: requests wait here until a worker has room, then lease the one that will finish them soonest.

One task does it all, in passes: free the leases of what has ended, look at the fleet if the last look is
old, assign as many of the waiting as there is room for, take their leases in one step. Being alone, it never
counts a lease twice. Who of the waiting goes where is `assignment`'s subject, the leases themselves
`leasing`'s, what a request does with its own `attempts`'.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Iterator
from random import Random

import structlog

from dispatcher.assignment import MOST_ASKS, Assignment
from dispatcher.backlog import Backlog, Waiting
from dispatcher.demand import Courtesy
from dispatcher.hedges import Candidate, Hedge
from dispatcher.hedging import Hedging
from dispatcher.leasing import Held, Leasing, Pair
from dispatcher.lookout import Lookout
from dispatcher.recall import Recall
from dispatcher.scheduler.decision import Chosen, NoWorkerReason
from dispatcher.scheduler.fleet import FleetModel
from dispatcher.scheduler.outlook import Underway
from dispatcher.scheduler.question import Need
from dispatcher.scheduler.strategies import Strategies
from dispatcher.speeds import Speeds
from workers.breaker import Verdict
from workers.errors import StoreUnavailable
from workers.leases import Ask, End, Grant
from workers.store import FleetStore

log = structlog.get_logger(__name__)

_OUTAGE_PAUSE_S = (0.1, 5.0)
_WATCH_S = 1.0
"""How old a look may get while requests are in flight and nobody waits: their workers may stand still."""


class Closing(Exception):
    """This dispatcher ends: who has no lease yet gets none. The request stays as it was for the next."""


class Placement:
    """Who of the waiting goes where, now."""

    def __init__(
        self,
        store: FleetStore,
        lookout: Lookout,
        strategies: Strategies,
        speeds: Speeds,
        hedging: Hedging,
        *,
        owner: str,
        rng: Random,
    ) -> None:
        """`owner` names this dispatcher in its leases; it is used by no other, and by none after it."""
        self._assignment: Assignment[Held] = Assignment(strategies, rng)
        self._speeds = speeds
        self._lookout = lookout
        self.hedging = hedging
        self._backlog: Backlog[Held] = Backlog()
        self._leasing = Leasing(store, owner)
        self._recall = Recall()
        self._wake = asyncio.Event()
        self._passed = asyncio.Event()
        """Set for a moment after each pass, and after each announcement: there may be room."""
        self._closing = False

    # -- what a request does --------------------------------------------------------------------------------

    async def lease(
        self, need: Need, urgency: int, *, batch_id: str | None = None, share: float = 1.0
    ) -> Held:
        """Wait for a lease, as long as it takes. Cancelling gives up the place, or the lease just granted.

        Batches of one urgency get leases in proportion to their `share`; who is of none goes before them.
        Raises Closing.
        """
        if self._closing:
            raise Closing
        if batch_id is not None:  # what comes by itself is no measure for a batch's lines
            self._assignment.note(need)
        granted: asyncio.Future[Held] = asyncio.get_running_loop().create_future()
        self._backlog.join(need, urgency, granted, batch_id=batch_id, share=share)
        self._wake.set()
        try:
            return await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self.give_back(granted.result(), Verdict.NEUTRAL, "cancelled")
            raise

    def give_back(
        self, held: Held, verdict: Verdict, reason: str = "", *, defer_s: float = 0.0, halve: bool = False
    ) -> None:
        """End an attempt: its lease is freed and its worker's breaker told, with the next pass."""
        end = End(held.lease, held.worker_id, held.epoch, verdict, reason, defer_s, halve)
        if self._leasing.end(held, end):
            self._wake.set()
            if held.pair is not None and verdict is not Verdict.SUCCESS:
                self._account_for_lost(held, held.pair)

    def _account_for_lost(self, held: Held, pair: Pair) -> None:
        speed = self._lookout.speeds.get(held.worker_id)
        if speed is not None:
            wrote = (self._lookout.now() - held.granted_s) * speed
            self.hedging.lost_one(pair.settle(), min(max(0.0, wrote), held.answer_tokens))

    # -- what the service asks ------------------------------------------------------------------------------

    async def room(self, models: Collection[str | None], urgency: int) -> Collection[str | None]:
        """Wait until more requests for one of these models should be brought here; returns for which.

        Few that are as urgent, or more so, are waiting for the slots that there are. Those for whom there is
        no worker at all do not count, within bounds: others need not wait for them. Who has to wait for
        something before they join tells so at once (`announced`). Never waits once `close` was called.
        """
        while not self._closing:
            with_room = [
                model for model in models if self._assignment.has_room_for(model, self._backlog, urgency)
            ]
            if with_room:
                return with_room
            await self._passed.wait()
        return models

    @contextlib.contextmanager
    def announced(self, coming: Counter[str | None], urgency: int) -> Iterator[None]:
        """Have so many requests, by model, count as waiting for whoever asks for `room`, while they are read.

        Else all who wait for room would see the same, and each bring as many. `has_room` does not count them:
        a storage that is slow shall keep no job from being taken.
        """
        announced = Counter({(model, urgency): count for model, count in coming.items()})
        self._backlog.announced += announced
        try:
            yield
        finally:
            self._backlog.announced -= announced
            self._tell_passed()

    async def any_room(self, urgency: int | None = None) -> None:
        """Wait until `has_room`."""
        while not self.has_room(urgency):
            await self._passed.wait()

    def saw_answer(
        self, worker_id: str, tokens: int | None, seconds: float | None, allowed: int | None
    ) -> None:
        """Learn how fast a worker writes: an answer of so many tokens, of those allowed, took so long."""
        self.hedging.wrote(tokens or 0)
        self._lookout.saw_answer(worker_id, tokens, seconds)
        if self._speeds.saw(worker_id, tokens, seconds, allowed=allowed):
            self._lookout.outdated = True  # it need not be scouted any more
            self._wake.set()

    def note_left(self, *, nothing: bool) -> None:
        """Hear whether nothing is left to start, here and in the queues: then second attempts are due."""
        if nothing and not self.hedging.due:
            self._wake.set()  # faster workers may idle already
        self.hedging.due = nothing

    def close(self) -> None:
        """Grant no lease any more: all who wait, and whoever comes, get Closing."""
        self._closing = True
        self._tell_passed()
        self._send_away()

    def _send_away(self) -> None:
        while (waiting := self._backlog.first()) is not None:
            waiting.granted.set_exception(Closing())

    def has_room(self, urgency: int | None = None) -> bool:
        """Whether more requests of this urgency should be brought here, whatever they ask for; None: any."""
        return self._closing or self._assignment.has_room(self._backlog, urgency) or self.others_idle

    @property
    def others_idle(self) -> bool:
        """Whether workers idle that serve nothing of what waits here: other requests may be for them."""
        return self._assignment.others_idle(self._backlog, self._lookout.now())

    @property
    def workers(self) -> Collection[str]:
        """Ids of the workers that there are, as they were seen last."""
        return self._lookout.workers.keys()

    @property
    def waiting(self) -> int:
        """Requests that wait for a lease."""
        return len(self._backlog)

    @property
    def in_flight(self) -> int:
        """Leases held by this dispatcher."""
        return len(self._leasing.held)

    @property
    def without_worker(self) -> NoWorkerReason | None:
        """Why the last pass found no worker for somebody waiting, however idle; None: there was one."""
        return self._assignment.without_worker if self._backlog else None

    # -- the passes -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Make passes until cancelled. An outage of Redis, or a pass that fails, is waited out; what is held
        stays held.
        """
        pause_s = _OUTAGE_PAUSE_S[0]
        while True:
            await self._woken()
            self._wake.clear()
            try:
                if pause_s > _OUTAGE_PAUSE_S[0]:
                    # What ran out meanwhile still runs: it is not free for others.
                    await self._leasing.renew()
                await self._pass()
            except StoreUnavailable as error:
                log.warning("cannot place requests now", error=str(error), retry_in_s=pause_s)
            except Exception:  # a mistake of ours, or a key that somebody spoiled, must not end all that runs
                log.exception("cannot place requests now", retry_in_s=pause_s)
            else:
                pause_s = _OUTAGE_PAUSE_S[0]
                continue
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _OUTAGE_PAUSE_S[1])
            self._wake.set()

    async def settle_all(self) -> None:
        """Free what has ended, now: for the end of the service. Raises StoreUnavailable."""
        await self._settle()

    async def renew(self) -> None:
        """Keep all leases for another term. Raises StoreUnavailable."""
        await self._leasing.renew()

    async def _woken(self) -> None:
        try:
            async with asyncio.timeout(self._look_every_s):
                await self._wake.wait()
        except TimeoutError:
            pass

    @property
    def _look_every_s(self) -> float | None:
        """How old a look at the fleet may get; None: it does not matter now."""
        if self._attentive:
            return self._lookout.interval_s
        return max(_WATCH_S, self._lookout.interval_s) if self._leasing.held else None

    @property
    def _attentive(self) -> bool:
        """Whether what happens elsewhere matters now: somebody waits, or might get a second attempt."""
        return bool(self._backlog) or (
            self.hedging.due and any(held.join for held in self._leasing.held.values())
        )

    async def _pass(self) -> None:
        await self._settle()
        every_s = self._look_every_s
        if every_s is not None and self._lookout.is_older_than(every_s):
            await self._look()
            self._call_off_the_lost()
        asks = self._assignment.assign(
            self._backlog, map(_underway, self._leasing.held.values()), self._lookout.now()
        )
        if asks:
            try:
                await self._acquire(asks)
            finally:
                if self._closing:  # who was refused went back to wait, after `close` had sent all away
                    self._send_away()
        elif (
            self.hedging.due and not self._backlog and not self._closing and not self._assignment.others_wait
        ):
            await self._hedge()
        self._tell_passed()

    async def _settle(self) -> None:
        for held, end in await self._leasing.settle():
            self._fleet.gave_back(held.worker_id, held.tokens, granted_s=held.granted_s)
            if end.defer_s:
                self._fleet.deferred(held.worker_id, self._lookout.now() + end.defer_s)

    async def _look(self) -> None:
        """Go by a new look at the fleet, and by what waits at other dispatchers."""
        fleet = await self._lookout.look()
        self._assignment.look(fleet, self._lookout.speeds, fleet.view.now_s)
        self._recall.look(fleet.view)
        others = await self._lookout.exchange(self._assignment.demand(self._backlog))
        if others is not None:
            held = Counter(held.worker_id for held in self._leasing.held.values()) if others else None
            self._assignment.make_way(Courtesy(others, held))

    def _call_off_the_lost(self) -> None:
        """Have requests come back whose workers are given up. What is held is older than the last look."""
        called_off: Counter[tuple[str, str]] = Counter()
        for held in self._leasing.held.values():
            why = self._recall.why(held.worker_id, held.granted_s, trial=held.trial)
            if why is not None and held.call_off is not None:
                called_off[held.worker_id, why] += 1
                call_off, held.call_off = held.call_off, None
                call_off()
        for (worker, why), count in called_off.items():
            log.warning("requests are called off", worker=worker, why=why, count=count)

    @property
    def _fleet(self) -> FleetModel:
        return self._assignment.fleet

    async def _acquire(self, asks: list[tuple[Waiting[Held], Chosen]]) -> None:
        leases = self._leasing.asks([(waiting.need, decision.candidates) for waiting, decision in asks])
        try:
            answers = await self._leasing.take(leases)
        except BaseException:
            self._assignment.take_back(self._backlog, asks)
            raise
        refused = False
        for (waiting, decision), ask, answer in zip(asks, leases, answers, strict=True):
            tokens = waiting.need.cost_tokens
            if isinstance(answer, Grant):
                if answer.worker_id != decision.pick:
                    self._fleet.gave_back(decision.pick, tokens)
                    self._fleet.took(answer.worker_id, tokens)
                self._deliver(waiting, self._hold(ask, answer, waiting.need, decision))
                continue
            refused = True
            self._fleet.gave_back(decision.pick, tokens)
            for refusal in answer:
                self._fleet.refused(refusal.worker_id, refusal.why, refusal.again_at)
            self._backlog.rejoin(waiting)
        if refused or len(asks) == MOST_ASKS:
            self._wake.set()  # others may have room, and more may be waiting

    def _hold(self, ask: Ask, grant: Grant, need: Need, decision: Chosen | None) -> Held:
        worker = self._lookout.workers[grant.worker_id]
        held = self._leasing.hold(ask, grant, worker, need, decision, now_s=self._lookout.now())
        log.debug(
            "leased",
            worker=held.worker_id,
            tokens=held.answer_tokens,
            waiting=len(self._backlog),
            patient=self._backlog.patient,
        )
        return held

    def _deliver(self, waiting: Waiting[Held], held: Held) -> None:
        if self._closing and not waiting.granted.done():
            waiting.granted.set_exception(Closing())
        if waiting.granted.done():
            self.give_back(held, Verdict.NEUTRAL, "nobody waits for it any more")
        else:
            waiting.granted.set_result(held)

    # -- second attempts ------------------------------------------------------------------------------------

    async def _hedge(self) -> None:
        """Give running requests that gain by it a second attempt on a faster worker."""
        now_s = self._lookout.now()
        free = {name: self._fleet.free_slots(name) for name in self._fleet.with_room(None, now_s)}
        running = [
            Candidate(
                held.lease,
                held.worker_id,
                held.granted_s,
                held.answer_tokens,
                self._fleet.names_for(held.need),
            )
            for held in self._leasing.held.values()
            if held.join is not None
        ]
        if not free or not running:
            return
        for hedge in self.hedging.pick(running, free, self._lookout.speeds, now_s):
            first = self._leasing.held.get(hedge.lease)
            if first is not None:  # else it ended while another's second attempt was being placed
                await self._join(first, hedge)

    async def _join(self, first: Held, hedge: Hedge) -> None:
        need, worker_id = first.need, hedge.worker_id
        [ask] = self._leasing.asks([(need, (worker_id,))])
        [answer] = await self._leasing.take([ask])
        if not isinstance(answer, Grant):
            return
        self._fleet.took(worker_id, need.cost_tokens)
        second = self._hold(ask, answer, need, None)
        join, first.join = first.join, None
        if join is None:  # its request has ended meanwhile
            self.give_back(second, Verdict.NEUTRAL, "came too late")
            return
        charged = self.hedging.made_one(first.answer_tokens, idle=hedge.idle)
        first.pair = second.pair = None if charged is None else Pair(charged)
        log.debug("second attempt", first=first.worker_id, second=worker_id)
        join(second)

    def _tell_passed(self) -> None:
        self._passed.set()
        self._passed.clear()


def _underway(held: Held) -> Underway:
    return Underway(held.worker_id, held.granted_s, held.answer_tokens)
