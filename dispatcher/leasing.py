"""The leases that one dispatcher holds: asked for, renewed while their requests run, settled once.

Whom to ask for them is `placement`'s subject. Whatever the store does, no lease is lost: what could not be
settled is settled later, and what may have been granted without our hearing of it is freed.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import structlog

from dispatcher.scheduler.decision import Chosen
from dispatcher.scheduler.question import Need
from workers.breaker import Verdict
from workers.fleet import WorkerView
from workers.leases import Ask, End, Grant, Refusal, lease_id
from workers.store import FleetStore

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class Pair:
    """Two attempts for one request. ``charged``: what the account of second attempts was charged for them."""

    charged: float

    def settle(self) -> float:
        """What was charged, once: the other of the two has nothing to give back."""
        charged, self.charged = self.charged, 0.0
        return charged


@dataclass(slots=True, eq=False)
class Held:
    """A lease that a request holds, until `Placement.give_back`."""

    lease: str
    worker_id: str
    url: str
    api_key_env: str | None
    api_key_file: str | None
    epoch: int
    tokens: int
    granted_s: float
    """On Redis' clock."""
    answer_tokens: int
    """What its answer may have at most, or is thought to have."""
    decision: Chosen | None = field(repr=False)
    """None: a second attempt, which `hedges` placed."""
    need: Need = field(repr=False)
    trial: bool = False
    """Whether it is the one request that a half-open breaker let through."""
    join: Callable[[Held], None] | None = field(default=None, repr=False)
    """How a second attempt joins its request; None: none may, or one has."""
    pair: Pair | None = field(default=None, repr=False)
    """Of one of two attempts for a request: what both have in common; None: nothing was charged for them."""
    call_off: Callable[[], None] | None = field(default=None, repr=False)
    """How its request is called off while it is sent; None: it is not, or was."""


class Leasing:
    """One dispatcher's leases. `owner` names it in them; it is used by no other, and by none after it."""

    def __init__(self, store: FleetStore, owner: str) -> None:
        self.held: dict[str, Held] = {}
        """By the lease's id."""
        self._store = store
        self._owner = owner
        self._serials = itertools.count(1)
        self._ends: list[tuple[Held, End]] = []
        self._in_doubt: list[End] = []
        """Leases that were asked for and perhaps granted, though no answer came."""

    def asks(self, wishes: Sequence[tuple[Need, tuple[str, ...]]]) -> list[Ask]:
        """What to ask for requests, each with its candidates, best first."""
        return [
            Ask(lease_id(self._owner, next(self._serials), need.cost_tokens), candidates)
            for need, candidates in wishes
        ]

    def hold(
        self, ask: Ask, grant: Grant, worker: WorkerView, need: Need, decision: Chosen | None, *, now_s: float
    ) -> Held:
        """Keep what was granted. `decision` None: it is a second attempt; `now_s`: Redis' clock."""
        held = Held(
            lease=ask.lease,
            worker_id=grant.worker_id,
            url=worker.url,
            api_key_env=worker.api_key_env,
            api_key_file=worker.api_key_file,
            epoch=grant.epoch,
            tokens=need.cost_tokens,
            granted_s=now_s,
            answer_tokens=need.answer_tokens,
            decision=decision,
            need=need,
            trial=grant.trial,
        )
        self.held[held.lease] = held
        return held

    async def take(self, asks: Sequence[Ask]) -> list[Grant | tuple[Refusal, ...]]:
        """Ask the store. Raises StoreUnavailable; what it granted all the same the next settling frees."""
        try:
            return await self._store.acquire(asks)
        except BaseException:
            self._in_doubt += [
                End(ask.lease, name, 0, Verdict.NEUTRAL, "its grant got lost")
                for ask in asks
                for name in ask.candidates
            ]
            raise

    def end(self, held: Held, end: End) -> bool:
        """Have a lease settled with the next settling; False: it is ended already."""
        if self.held.pop(held.lease, None) is None:
            return False
        self._ends.append((held, end))
        return True

    async def settle(self) -> list[tuple[Held, End]]:
        """Tell the store what has ended; returns it. Raises StoreUnavailable, and is repeated then."""
        ends, self._ends = self._ends, []
        in_doubt, self._in_doubt = self._in_doubt, []
        if not ends and not in_doubt:
            return []
        try:
            await self._store.settle([end for _, end in ends] + in_doubt)
        except BaseException:  # a cancellation too: this service ends, and settles at last
            self._ends = ends + self._ends  # settling again changes nothing
            self._in_doubt = in_doubt + self._in_doubt
            raise
        return ends

    async def renew(self) -> None:
        """Keep all leases for another term. Raises StoreUnavailable."""
        by_worker: dict[str, list[str]] = defaultdict(list)
        for held in self.held.values():
            by_worker[held.worker_id].append(held.lease)
        gone = [lease for lease in await self._store.renew(by_worker) if lease in self.held]
        if gone:
            log.warning("leases ended before they were renewed", count=len(gone))
