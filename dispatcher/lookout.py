"""What one dispatcher knows of the fleet between passes: its last look, and what others told with it.

What is made of a look belongs to `assignment` and `recall`; when one is needed, to `placement`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from dispatcher.demand import Demand
from dispatcher.scheduler.fleet import FleetModel
from dispatcher.shared_demand import SharedDemand
from dispatcher.shared_speeds import SharedSpeeds
from dispatcher.speeds import Speeds
from dispatcher.witness import Witness
from workers.fleet import FleetView, WorkerView
from workers.store import FleetStore

_LOOKING = 0.2
"""The most of its time that a dispatcher looks at the fleet: of a large one every look is work."""
_HOLDS_LOOKS = 3.0
"""How long what waits here is told to others: so many times as long as it is from one look to the next."""


class Lookout:
    """One dispatcher's look at the fleet. Methods that ask Redis raise StoreUnavailable."""

    def __init__(
        self,
        store: FleetStore,
        speeds: Speeds,
        *,
        interval_s: float,
        stale_after_s: float = 3.0,
        dead_after_s: float = 10.0,
        shared_speeds: SharedSpeeds | None = None,
        shared_demand: SharedDemand | None = None,
        witness: Witness | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`interval_s`: the least time from one look to the next, while looks are needed.

        `shared_speeds` is where other dispatchers tell how fast workers are, `shared_demand` where they tell
        what waits there, `witness` learns of silent workers; None: there is nobody to hear.
        """
        self.workers: Mapping[str, WorkerView] = {}
        """As seen last, by id."""
        self.speeds: Mapping[str, float] = {}
        """Tokens per second of one answer, of the workers whose speed is known."""
        self.outdated = True
        """What was seen is to be looked at anew, however young it is."""
        self._store = store
        self._learned = speeds
        self._interval_s = interval_s
        self._stale_after_s = stale_after_s
        self._dead_after_s = dead_after_s
        self._shared_speeds = shared_speeds
        self._shared_demand = shared_demand
        self._witness = witness
        self._clock = clock
        self._seen_at = clock()
        self._redis_s = 0.0
        self._took_s = 0.0

    def now(self) -> float:
        """Redis' clock, in seconds: as the last look told it, and the time since."""
        return self._redis_s + (self._clock() - self._seen_at)

    @property
    def interval_s(self) -> float:
        """From one look to the next: as is set; more where looks take long, but not so much that loads grow
        stale meanwhile.
        """
        spared_s = min(self._took_s / _LOOKING, self._stale_after_s / 3)
        return max(self._interval_s, spared_s)

    def is_older_than(self, seconds: float) -> bool:
        """Whether it is time to look again, where the last look may be so old."""
        return self.outdated or self._clock() - self._seen_at >= seconds

    async def look(self) -> FleetModel:
        """Look at the whole fleet; returns it as decisions see it."""
        began_at = self._clock()
        view = await self._store.view()
        self._seen_at, self._redis_s, self.outdated = self._clock(), view.now_s, False
        self.workers = {worker.id: worker for worker in view.workers}
        self._learned.keep_only(self.workers.keys())
        self.speeds = await self._know_speeds(view)
        if self._witness is not None:
            self._witness.look(view.workers, view.now_s)
        fleet = FleetModel(
            view,
            speeds=self.speeds,
            stale_after_s=self._stale_after_s,
            dead_after_s=self._dead_after_s,
        )
        self._took_s = self._clock() - began_at
        return fleet

    async def _know_speeds(self, view: FleetView) -> dict[str, float]:
        if self._shared_speeds is not None and not all(map(self._learned.has_seen, self.workers)):
            await self._shared_speeds.listen(view.now_s)
        speeds = {worker.id: self._learned.of(worker) for worker in view.workers}
        return {name: speed for name, speed in speeds.items() if speed is not None}

    async def exchange(self, mine: Sequence[Demand]) -> list[tuple[Demand, ...]] | None:
        """Tell other dispatchers what waits here; returns what waits at each. None: there are none to ask."""
        if self._shared_demand is None:
            return None
        began_at = self._clock()
        others = await self._shared_demand.exchange(mine, _HOLDS_LOOKS * self.interval_s)
        self._took_s += self._clock() - began_at
        return others

    def saw_answer(self, worker_id: str, tokens: int | None, seconds: float | None) -> None:
        """Hear of an answer: so many tokens came of a worker in so long."""
        if self._witness is not None:
            self._witness.saw(worker_id, tokens, seconds, self.now())
