"""Who of the waiting goes where: scouts first, patience for a faster worker, then a decision.

Taking the leases that are asked for here is done by whoever runs the passes, and so is telling the fleet of
leases that ended. How a worker is chosen for one request is `scheduler`'s subject, the order of waiting
`backlog`'s.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from random import Random
from typing import Generic, TypeVar

from dispatcher.backlog import Backlog, Waiting
from dispatcher.scheduler.decision import Busy, Chosen, NoWorker, NoWorkerReason, decide
from dispatcher.scheduler.fleet import FleetModel
from dispatcher.scheduler.outlook import WORTH_IT, Outlook, Underway
from dispatcher.scheduler.question import Need
from dispatcher.scheduler.strategies import Strategies
from workers.fleet import FleetView

Granted = TypeVar("Granted")

MOST_ASKS = 256
"""Leases asked for in one step: bounds how long Redis is busy with it."""
_WAITING_PER_SLOT = 0.5
_LEAST_WAITING = 16
_MOST_PATIENT = 256
"""Requests that wait for a faster worker and are not counted as waiting: others may go meanwhile."""
_MOST_STRANDED = 4096
"""Requests without any worker that may wait before nothing more is brought: bounds what they hold."""
_SCOUTS = 4
"""Leases that a worker of unknown speed gets until its first answer, or until it has had its time."""
_SCOUTING_S = 2.0
_SCOUT_COST = 4.0
"""A scout costs at most so many times the cheapest request seen: it shall be back soon."""


@dataclass(frozen=True, slots=True)
class _Room:
    """Who could take one more request. `fastest`: their highest speed; None: nobody's, or one is unknown."""

    names: Sequence[str]
    fastest: float | None


@dataclass(frozen=True, slots=True)
class _Declined:
    """Room that everybody of this urgency or less rather waits than takes: on workers up to this speed."""

    speed: float
    urgency: int


class Assignment(Generic[Granted]):
    """One dispatcher's passes, and what has to be remembered from one to the next."""

    def __init__(self, strategies: Strategies, rng: Random) -> None:
        self.fleet = FleetModel(FleetView(now_s=0.0, generation=0))
        """As seen last; whoever takes a lease or gives one back tells it."""
        self.patient = 0
        """Requests that wait for a faster worker, as counted when all were last asked."""
        self.without_worker: NoWorkerReason | None = None
        """Why the last pass found no worker for somebody waiting, however idle; None: there was one."""
        self._strategies = strategies
        self._rng = rng
        self._speeds: Mapping[str, float] = {}
        self._top_speed = 0.0
        self._scouting_since: dict[str, float] = {}
        self._scouted: frozenset[str] = frozenset()
        self._cheapest = float("inf")
        self._stranded: set[Hashable] = set()
        """Lanes for which there was no worker when they were last decided for."""
        self._declined: dict[str | None, _Declined] = {}
        """By model, until the next look: what all declined would be declined again, and asking costs time."""
        self._rooms: dict[str | None, _Room] = {}
        """By model, until the next lease or pass."""
        self._outlook: Outlook | None = None
        self._underway: Iterable[Underway] = ()
        self._now_s = 0.0

    def note(self, need: Need) -> None:
        """Hear of a request that comes to wait."""
        self._cheapest = min(self._cheapest, need.cost_tokens)

    def look(self, fleet: FleetModel, speeds: Mapping[str, float], now_s: float) -> None:
        """Go by a new view of the fleet. `speeds`: tokens per second and sequence, where they are known."""
        self.fleet, self._speeds = fleet, speeds
        self._top_speed = max(speeds.values(), default=0.0)
        self._declined.clear()
        self._send_scouts_only(set(fleet.ids) - speeds.keys(), now_s)

    def _send_scouts_only(self, unknown: AbstractSet[str], now_s: float) -> None:
        """Give workers of unknown speed a few short requests first: the long ones shall go where they belong.

        A worker that does not answer in time, or whose answers have no tokens, is no longer held back.
        """
        self._scouted = frozenset(
            name for name in unknown if now_s - self._scouting_since.setdefault(name, now_s) < _SCOUTING_S
        )
        for name in self._scouted:
            self.fleet.cap_limit(name, _SCOUTS)

    def assign(
        self, backlog: Backlog[Granted], underway: Iterable[Underway], now_s: float
    ) -> list[tuple[Waiting[Granted], Chosen]]:
        """Take out of the backlog whoever shall have a lease now, with the decision; most urgent first.

        The fleet counts these leases as taken already.
        """
        asks: list[tuple[Waiting[Granted], Chosen]] = []
        closed: set[Hashable] = set()
        patient: list[Waiting[Granted]] = []
        all_were_asked = True
        self.without_worker = None
        self._begin_pass(underway, now_s)
        while len(asks) < MOST_ASKS and (waiting := backlog.first(closed)) is not None:
            if self._declined_by_all(waiting):
                all_were_asked = False
                closed.add(backlog.lane(waiting))
                backlog.rejoin(waiting)
            elif self._better_waits(waiting.need):
                patient.append(waiting)
            elif (decision := self._decided(waiting)) is not None:
                asks.append((waiting, decision))
            else:
                closed.add(backlog.lane(waiting))
                backlog.rejoin(waiting)
        if all_were_asked and len(asks) < MOST_ASKS:
            self._note_patient(patient)
        for waiting in patient:
            backlog.rejoin(waiting)
        return asks

    def has_room(self, backlog: Backlog[Granted]) -> bool:
        """Whether more requests should be brought: few are waiting for the slots that there are.

        Those for whom there is no worker at all do not count, within bounds: others need not wait for them.
        """
        slots = float(self.fleet.limit.sum()) if len(self.fleet) else 0.0
        impatient = len(backlog) - min(self.patient, _MOST_PATIENT)
        stranded = backlog.count(self._stranded)
        enough = max(_LEAST_WAITING, _WAITING_PER_SLOT * slots)
        return impatient - stranded < enough and stranded < _MOST_STRANDED

    def _begin_pass(self, underway: Iterable[Underway], now_s: float) -> None:
        self._underway, self._now_s = underway, now_s
        self._outlook = None
        self._rooms.clear()

    def _room(self, model: str | None) -> _Room:
        room = self._rooms.get(model)
        if room is None:
            names = self.fleet.with_room(model, self._now_s)
            speeds = [speed for name in names if (speed := self._speeds.get(name)) is not None]
            fastest = max(speeds) if speeds and len(speeds) == len(names) else None
            room = self._rooms[model] = _Room(names, fastest)
        return room

    def _declined_by_all(self, waiting: Waiting[Granted]) -> bool:
        declined = self._declined.get(waiting.need.model)
        if declined is None or waiting.urgency < declined.urgency:
            return False
        fastest = self._room(waiting.need.model).fastest
        return fastest is not None and WORTH_IT * fastest <= declined.speed

    def _note_patient(self, patient: Sequence[Waiting[Granted]]) -> None:
        self.patient = len(patient)
        found: dict[str | None, _Declined] = {}
        for waiting in patient:  # the most urgent of each model comes first
            fastest = self._room(waiting.need.model).fastest
            if fastest is not None:
                found.setdefault(waiting.need.model, _Declined(fastest, waiting.urgency))
        self._declined.update(found)

    def _decided(self, waiting: Waiting[Granted]) -> Chosen | None:
        """Decide for one request; None: it has to wait, and its lane with it."""
        lane = Backlog.lane(waiting)
        self._stranded.discard(lane)
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
        return None

    def _better_waits(self, need: Need) -> bool:
        room = self._room(need.model)
        if not room.names:
            return False  # then deciding says who is busy, and until when
        if self._scouted.issuperset(room.names):
            return not self._is_scout(need)
        if room.fastest is None or room.fastest >= WORTH_IT * self._top_speed:
            return False  # nobody is so much faster that waiting could be worth it
        if self._outlook is None:
            self._outlook = Outlook(self._now_s, self._speeds, self._underway)
        return self._outlook.better_waits(
            answer_tokens(need), room.names, self.fleet.names_serving(need.model)
        )

    def _is_scout(self, need: Need) -> bool:
        return need.cost_tokens <= _SCOUT_COST * self._cheapest

    def _asked(self, need: Need) -> Need:
        """The need as it is decided: who is scouted takes no long request while there are others."""
        if self._scouted and not self._is_scout(need):
            return replace(need, tried=need.tried | self._scouted)
        return need


def answer_tokens(need: Need) -> int:
    """What the answer may have: the ceiling, else what the plan expects."""
    return need.asked_tokens or max(1, need.cost_tokens - need.prompt_tokens)
