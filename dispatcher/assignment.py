"""Who of the waiting goes where: scouts first, patience for a faster worker, then a decision.

Taking the leases that are asked for here is done by whoever runs the passes, and so is telling the fleet of
leases that ended. How a worker is chosen for one request is `scheduler`'s subject, the order of waiting
`backlog`'s, how many are brought to wait `quota`'s.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from random import Random
from typing import Generic, TypeVar

from dispatcher import quota
from dispatcher.backlog import Backlog, Waiting
from dispatcher.demand import Courtesy, Demand, Leaving
from dispatcher.scheduler.decision import Busy, Chosen, NoWorker, NoWorkerReason, decide
from dispatcher.scheduler.fleet import FleetModel
from dispatcher.scheduler.outlook import WORTH_IT, Outlook, Underway
from dispatcher.scheduler.question import Need
from dispatcher.scheduler.strategies import Strategies
from workers.fleet import FleetView

Granted = TypeVar("Granted")

MOST_ASKS = 256
"""Leases asked for in one step: bounds how long Redis is busy with it."""
_SCOUTS = 4
"""Leases that a worker of unknown speed gets until its first answer, or until it has had its time."""
_SCOUTING_S = 2.0
_SCOUT_COST = 4.0
"""A scout costs at most so many times the cheapest request seen: it shall be back soon."""

_DECLINED_S = 1.0
"""How long it is remembered that room was declined, while there is none of any kind."""
_SPEED_STEP = -math.log(WORTH_IT)
"""Logarithm of a difference in speed that no request waits for."""
_SCOUTS_ONLY, _OF_UNKNOWN_SPEED = -1_000_000, 1_000_000
"""Kinds of room: what takes scouts only is declined soonest; unknown speed is worth trying, by anybody."""


@dataclass(frozen=True, slots=True)
class _Room:
    """The workers that could take one more request.

    `fastest`: their highest speed; None: there is nobody, or one of unknown speed. `for_scouts`: all of them
    take scouts only. `kind`: faster room is of a higher kind, room of about one speed of one.
    """

    workers: int
    fastest: float | None
    for_scouts: bool
    kind: int


class Assignment(Generic[Granted]):
    """One dispatcher's passes, and what has to be remembered from one to the next."""

    def __init__(self, strategies: Strategies, rng: Random) -> None:
        self.fleet = FleetModel(FleetView(now_s=0.0, generation=0))
        """As seen last; whoever takes a lease or gives one back tells it."""
        self.without_worker: NoWorkerReason | None = None
        """Why the last pass found no worker for somebody waiting, however idle; None: there was one."""
        self._strategies = strategies
        self._rng = rng
        self._speeds: Mapping[str, float] = {}
        self._top_speed = 0.0
        self._scouting_since: dict[str, float] = {}
        self._scouted: frozenset[str] = frozenset()
        self._cheapest: dict[str | None, float] = {}
        """Cost of the cheapest request for a model since none for it waited."""
        self._stranded: set[Hashable] = set()
        """Lanes for which there was no worker when they were last decided for."""
        self._apart: set[Hashable] = set()
        """Lanes that wait for some of their model's workers, while others of them have room."""
        self._ends_at: dict[int, float] = {}
        """When those who wait for a faster worker expect to end, by serial."""
        self._looked = False
        """Whether nobody was asked since the last look."""
        self._busy: set[str | None] = set()
        """Models that nobody has room for in this pass."""
        self._rooms: dict[str | None, _Room] = {}
        """By model, until the next lease or pass."""
        self._outlook: Outlook | None = None
        """Kept from look to look: each slot in it is waited for by one request."""
        self._underway: Iterable[Underway] = ()
        self._now_s = 0.0
        self._courtesy = Courtesy()
        self._unmet: dict[str | None, int] = {}
        """Urgency of the most urgent request that found no room in this pass, by model."""
        self._declined_room: dict[str | None, tuple[float, float]] = {}
        """Speed of the fastest room that all who waited declined, and when, by model."""

    def note(self, need: Need) -> None:
        """Hear of a request that comes to wait."""
        cheapest = self._cheapest.get(need.model, math.inf)
        self._cheapest[need.model] = min(cheapest, need.cost_tokens)

    def look(self, fleet: FleetModel, speeds: Mapping[str, float], now_s: float) -> None:
        """Go by a new view of the fleet. `speeds`: tokens per second and sequence, where they are known."""
        self.fleet, self._speeds = fleet, speeds
        self._top_speed = max(speeds.values(), default=0.0)
        self._outlook = None
        self._ends_at.clear()
        self._looked = True
        ready = {name for name, is_ready in zip(fleet.ids, fleet.ready.tolist(), strict=True) if is_ready}
        self._send_scouts_only(ready, now_s)

    def _send_scouts_only(self, ready: AbstractSet[str], now_s: float) -> None:
        """Give workers of unknown speed a few short requests first: the long ones shall go where they belong.

        A worker that does not answer in time, or whose answers have no tokens, is no longer held back. Its
        time begins when it is ready, and anew when it is again.
        """
        self._scouting_since = {name: self._scouting_since.get(name, now_s) for name in ready}
        self._scouted = frozenset(
            name
            for name, since_s in self._scouting_since.items()
            if name not in self._speeds and now_s - since_s < _SCOUTING_S
        )
        for name in self._scouted:
            self.fleet.cap_limit(name, _SCOUTS)

    def make_way(self, courtesy: Courtesy) -> None:
        """Leave slots to other dispatchers, until it is said anew."""
        self._courtesy = courtesy

    @property
    def others_wait(self) -> bool:
        """Whether requests of other dispatchers found no room."""
        return bool(self._courtesy)

    def demand(self, backlog: Backlog[Granted]) -> list[Demand]:
        """What found no room in the last pass, the most urgent first."""
        found = []
        for model, urgency in sorted(self._unmet.items(), key=lambda item: item[1]):
            count = backlog.count(model, urgency)
            beyond, at_s = self._declined_room.get(model, (0.0, -math.inf))
            if count and self.fleet.has_ready(model):
                fresh = self._now_s - at_s < _DECLINED_S
                found.append(Demand(model, urgency, count, beyond if fresh else 0.0))
        return found

    def assign(
        self, backlog: Backlog[Granted], underway: Iterable[Underway], now_s: float
    ) -> list[tuple[Waiting[Granted], Chosen]]:
        """Take out of the backlog whoever shall have a lease now, with the decision; most urgent first.

        The fleet counts these leases as taken already. Whatever goes wrong, nobody is taken out then.
        """
        asks: list[tuple[Waiting[Granted], Chosen]] = []
        self._begin_pass(backlog, underway, now_s)
        leaving = self._courtesy.begin(self.fleet, now_s)
        try:
            self._serve_in_turn(backlog, leaving, asks)
            self._note_declined_room(asks)
        except BaseException:
            self.take_back(backlog, asks)
            raise
        finally:
            leaving.end()
            self._rooms.clear()
        return asks

    def take_back(self, backlog: Backlog[Granted], asks: Iterable[tuple[Waiting[Granted], Chosen]]) -> None:
        """Have them wait on, as if they had not been assigned."""
        for waiting, decision in asks:
            self.fleet.gave_back(decision.pick, waiting.need.cost_tokens)
            backlog.rejoin(waiting)

    def _serve_in_turn(
        self, backlog: Backlog[Granted], leaving: Leaving, asks: list[tuple[Waiting[Granted], Chosen]]
    ) -> None:
        lanes = self._lanes_with_room(backlog)
        while len(asks) < MOST_ASKS and (waiting := backlog.first(lanes)) is not None:
            decision = None
            try:
                if leaving.before(waiting.urgency):
                    self._rooms.clear()
                decision = self._offer(waiting)
                if decision is not None:
                    asks.append((waiting, decision))
                    continue
                # Who declined room has another lane by now: the others of this one are still asked.
                lane = backlog.lane(waiting)
                lanes.discard(lane)
                if lane not in self._stranded:
                    self._unmet.setdefault(waiting.need.model, waiting.urgency)
            finally:
                if decision is None:
                    backlog.rejoin(waiting)

    def _lanes_with_room(self, backlog: Backlog[Granted]) -> set[Hashable]:
        """The lanes to ask: not those whose model's workers are all full, of which there may be hundreds."""
        lanes, full = set(), {}
        for lane in backlog.lanes():
            if lane.model not in full:
                full[lane.model] = self.fleet.has_ready(lane.model) and not self.fleet.has_room(
                    lane.model, self._now_s
                )
            if not full[lane.model]:
                lanes.add(lane.key)
                continue
            self._stranded.discard(lane.key)
            self._apart.discard(lane.key)
            urgency = self._unmet.get(lane.model, lane.urgency)
            self._unmet[lane.model] = min(urgency, lane.urgency)
        return lanes

    def _offer(self, waiting: Waiting[Granted]) -> Chosen | None:
        """A worker for a request; None: it waits, and its lane with it."""
        if waiting.need.model in self._busy or self._declined(waiting):
            return None
        if self._better_waits(waiting):
            waiting.declined = self._room(waiting.need.model).kind
            return None
        return self._decided(waiting)

    def _note_declined_room(self, asks: list[tuple[Waiting[Granted], Chosen]]) -> None:
        """Room that is left over was declined by all who wait: others leave them faster workers only."""
        for model in {waiting.need.model for waiting, _ in asks}:
            self._declined_room.pop(model, None)
        for model in list(self._unmet):
            room = self._room(model)
            if room.workers and room.fastest is None:
                del self._unmet[model]  # it is for scouts, or of unknown speed: nobody waits in vain
            elif room.workers and room.fastest is not None:
                self._declined_room[model] = (room.fastest, self._now_s)

    @property
    def _not_counted(self) -> AbstractSet[Hashable]:
        return self._stranded | self._apart

    def has_room(self, backlog: Backlog[Granted], urgency: int | None = None) -> bool:
        """Whether more requests should be brought, whatever they ask for. `urgency` None: any."""
        return quota.has_room(backlog, self.fleet, self._not_counted, urgency)

    def has_room_for(self, model: str | None, backlog: Backlog[Granted], urgency: int | None = None) -> bool:
        """Whether more requests for this model should be brought. `urgency` None: any."""
        return quota.has_room_for(model, backlog, self.fleet, self._not_counted, urgency)

    def others_idle(self, backlog: Backlog[Granted], now_s: float) -> bool:
        """Whether somebody idles who serves nothing of what waits."""
        return quota.others_idle(backlog, self.fleet, self._not_counted, now_s)

    def _begin_pass(self, backlog: Backlog[Granted], underway: Iterable[Underway], now_s: float) -> None:
        self._underway, self._now_s = underway, now_s
        self._rooms.clear()
        self._busy.clear()
        self._unmet.clear()
        lanes = {lane.key: lane.model for lane in backlog.lanes()}
        models = set(lanes.values())
        self._cheapest = {model: cost for model, cost in self._cheapest.items() if model in models}
        self._stranded &= lanes.keys()
        self._apart &= lanes.keys()
        self.without_worker = None
        if self._looked:  # all may be otherwise
            self._looked = False
            backlog.ask_again()

    def _room(self, model: str | None) -> _Room:
        room = self._rooms.get(model)
        if room is None:
            free = self.fleet.room(model, self._now_s)
            speeds = self.fleet.speed[free]
            count = len(speeds)
            fastest = float(speeds.max()) if count else math.nan
            scouts = count <= len(self._scouted) and self._all_scouted(model)
            known = None if math.isnan(fastest) else fastest
            room = self._rooms[model] = _Room(count, known, scouts, _kind(known, scouts=scouts))
        return room

    def _all_scouted(self, model: str | None) -> bool:
        return self._scouted.issuperset(self.fleet.with_room(model, self._now_s))

    def _declined(self, waiting: Waiting[Granted]) -> bool:
        """Whether it was asked since the last look if it takes such room, and rather waits."""
        return waiting.declined is not None and self._room(waiting.need.model).kind <= waiting.declined

    def _decided(self, waiting: Waiting[Granted]) -> Chosen | None:
        """Decide for one request; None: it has to wait, and its lane with it."""
        lane = Backlog.lane(waiting)
        self._stranded.discard(lane)
        self._apart.discard(lane)
        need = waiting.need
        strategy = self._strategies.for_request(need)
        match decide(self._asked(need), self.fleet, strategy, self._rng, self._now_s):
            case Chosen() as chosen:
                self.fleet.took(chosen.pick, need.cost_tokens)
                self._rooms.clear()
                return chosen
            case NoWorker(reason):
                self.without_worker = reason
                self._stranded.add(lane)
            case Busy():
                pass
        if not self._room(need.model).workers:
            self._busy.add(need.model)
        elif lane not in self._stranded:
            self._apart.add(lane)
        return None

    def _better_waits(self, waiting: Waiting[Granted]) -> bool:
        need = waiting.need
        room = self._room(need.model)
        if not room.workers:
            return False  # then deciding says who is busy, and until when
        if room.for_scouts:
            return not self._is_scout(need)
        if room.fastest is None or room.fastest >= WORTH_IT * self._top_speed:
            return False  # nobody is so much faster that waiting could be worth it
        return self._ends_sooner(waiting, room.fastest)

    def _ends_sooner(self, waiting: Waiting[Granted], fastest: float) -> bool:
        """Whether it ends sooner in the slot that it waits for, or finds one to wait for."""
        tokens = waiting.need.answer_tokens
        if (ends_at := self._ends_at.get(waiting.serial)) is not None:
            return ends_at - self._now_s < WORTH_IT * tokens / fastest
        if self._outlook is None:
            self._outlook = self._looked_out()
        ends_in_s = self._outlook.wait_for(tokens, fastest, self.fleet.names_for(waiting.need))
        if ends_in_s is not None:
            self._ends_at[waiting.serial] = self._now_s + ends_in_s
        return ends_in_s is not None

    def _looked_out(self) -> Outlook:
        """When slots come free, of workers that will take something then."""
        works = dict(zip(self.fleet.ids, self.fleet.works(self._now_s).tolist(), strict=True))
        underway = (one for one in self._underway if works.get(one.worker_id))
        return Outlook(self._now_s, self._speeds, underway)

    def _is_scout(self, need: Need) -> bool:
        return need.cost_tokens <= _SCOUT_COST * self._cheapest.get(need.model, math.inf)

    def _asked(self, need: Need) -> Need:
        """The need as it is decided: who is scouted takes no long request while there are others."""
        if self._scouted and not self._is_scout(need):
            return replace(need, tried=need.tried | self._scouted)
        return need


def _kind(fastest: float | None, *, scouts: bool) -> int:
    if scouts:
        return _SCOUTS_ONLY
    return _OF_UNKNOWN_SPEED if fastest is None else math.floor(math.log(fastest) / _SPEED_STEP)
