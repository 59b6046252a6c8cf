"""Makes the faults of a schedule happen to an installation, and tells of each when it began and ended.

Only processes that the installation started are touched, by their ids. Which faults there are, and when, is
``schedule``'s subject.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import assert_never

import httpx

from forebay.simulator.faults import AnswerFault, BaseFault, CutBodyFault, HangFault, ResetFault
from tests.chaos.installation import Installation
from tests.chaos.places import EnginePlace, Place, ended_badly, has_ended
from tests.chaos.schedule import Fault, Kind, Role
from tests.expired import let_claims_run_out
from workers.connection import translated
from workers.errors import StoreUnavailable

_DRAIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Happened:
    """A fault that was injected. Times are seconds since the start of the schedule."""

    fault: Fault
    began_s: float
    ended_s: float
    note: str = ""


class Actor:
    """Plays one schedule."""

    def __init__(
        self,
        installation: Installation,
        rng: Random,
        *,
        clock: Callable[[], float],
        cancel: Callable[[Random], Awaitable[str]],
        waiting: Callable[[], list[Place]],
        hasten: bool,
    ) -> None:
        """``clock``: seconds since the start. ``cancel`` cancels a batch and says which. ``waiting``:
        clients that wait for a batch. ``hasten``: claims of killed or stopped dispatchers run out at once, as
        they do by themselves after 20 seconds.
        """
        self.happened: list[Happened] = []
        self.complaints: list[str] = []
        """What the installation did not survive as it should, in words."""
        self._installation = installation
        self._rng = rng
        self._clock = clock
        self._cancel = cancel
        self._waiting = waiting
        self._hasten = hasten

    async def play(self, faults: Sequence[Fault], told: Callable[[Happened], None]) -> None:
        """Let all happen in their time; returns when the last has ended."""
        async with httpx.AsyncClient(timeout=2.0) as client, asyncio.TaskGroup() as group:
            for fault in faults:
                await asyncio.sleep(max(0.0, fault.at_s - self._clock()))
                group.create_task(self._happen(fault, client, told))

    async def _happen(
        self, fault: Fault, client: httpx.AsyncClient, told: Callable[[Happened], None]
    ) -> None:
        began_s = self._clock()
        note = await self._inflict(fault, client)
        happened = Happened(fault, began_s, self._clock(), note)
        self.happened.append(happened)
        told(happened)

    async def _inflict(self, fault: Fault, client: httpx.AsyncClient) -> str:
        """One fault from its begin to its end; returns what there is to say of it."""
        match fault.kind.role:
            case Role.DISPATCHER:
                return await self._to_dispatcher(self._installation.dispatchers[fault.whom], fault)
            case Role.MONITOR:
                return await self._to_service(self._installation.monitors[fault.whom], fault)
            case Role.ENGINE:
                return await self._to_engine(self._installation.engines[fault.whom], fault, client)
            case Role.FLEET:
                return await self._to_fleet(fault, client)
            case Role.REDIS:
                return await self._to_redis(fault)
            case Role.BATCH:
                return await self._cancel(self._rng)
            case Role.CLIENT:
                return self._to_client()
            case _:
                assert_never(fault.kind.role)

    async def _to_dispatcher(self, place: Place, fault: Fault) -> str:
        if fault.kind is Kind.DISPATCHER_ROLL:
            return await self._roll(place)
        return await self._to_service(place, fault)

    async def _to_service(self, place: Place, fault: Fault) -> str:
        life = place.life
        if fault.kind in (Kind.DISPATCHER_STOP, Kind.MONITOR_STOP):
            await self._stand_still(place, fault.for_s)
            return life
        place.kill()
        await self._let_run_out(place)
        await asyncio.sleep(fault.for_s)
        place.start()
        return life

    async def _stand_still(self, place: Place, for_s: float) -> None:
        place.signal(signal.SIGSTOP)
        await self._let_run_out(place)
        await asyncio.sleep(for_s)
        place.signal(signal.SIGCONT)

    async def _let_run_out(self, place: Place) -> None:
        if self._hasten and place in self._installation.dispatchers:
            with contextlib.suppress(StoreUnavailable):  # then they run out by themselves
                await asyncio.to_thread(self._run_out, place.life)

    def _run_out(self, life: str) -> None:
        with translated():
            let_claims_run_out(self._installation.desk.connection, life)

    async def _roll(self, place: Place) -> str:
        """A new one begins, and the old one drains by itself meanwhile."""
        old = place.child
        old.terminate()
        place.start()
        if not await has_ended(old, _DRAIN_S):
            self.complaints.append(f"{old.name} does not end at SIGTERM")
        elif complaint := ended_badly(old):
            self.complaints.append(complaint)
        return old.name

    async def _to_engine(self, place: EnginePlace, fault: Fault, client: httpx.AsyncClient) -> str:
        match fault.kind:
            case Kind.ENGINE_KILL:
                place.kill()
                await asyncio.sleep(fault.for_s)
                await place.begin()
            case Kind.ENGINE_STOP:
                await self._stand_still(place, fault.for_s)
            case _:
                await place.suffer(client, _engine_fault(fault, self._rng))
                await asyncio.sleep(fault.for_s)
        return place.life

    async def _to_fleet(self, fault: Fault, client: httpx.AsyncClient) -> str:
        storm = _engine_fault(fault, self._rng)
        await asyncio.gather(*(engine.suffer(client, storm) for engine in self._installation.engines))
        await asyncio.sleep(fault.for_s)
        return ""

    async def _to_redis(self, fault: Fault) -> str:
        place, note = self._installation.redis, ""
        match fault.kind:
            case Kind.REDIS_STOP:
                await self._stand_still(place, fault.for_s)
                return note
            case Kind.REDIS_RESTART:
                place.child.terminate()
                await has_ended(place.child, _DRAIN_S)
            case Kind.REDIS_LOSE:
                place.kill()
                note = f"{place.lose(fault.lost_s)} bytes lost"
            case _:
                place.kill()
        await asyncio.sleep(fault.for_s)
        await place.begin()
        return note

    def _to_client(self) -> str:
        waiting = self._waiting()
        if not waiting:
            return "nobody waited"
        place = self._rng.choice(waiting)
        life = place.life
        place.kill()
        place.start()
        return life


def _engine_fault(fault: Fault, rng: Random) -> BaseFault:
    match fault.kind:
        case Kind.ENGINE_HANG:
            return HangFault(for_s=fault.for_s)
        case Kind.ENGINE_CUT:
            return CutBodyFault(for_s=fault.for_s)
        case Kind.ENGINE_RESET:
            return ResetFault(for_s=fault.for_s)
        case Kind.ENGINE_503 | Kind.FLEET_503:
            return AnswerFault(status=503, for_s=fault.for_s, queue_full=rng.random() < 0.5)
        case Kind.ENGINE_429 | Kind.FLEET_429:
            return AnswerFault(status=429, for_s=fault.for_s, retry_after=rng.choice((None, "1", "2")))
        case _:
            raise AssertionError(f"{fault.kind} is no fault that an engine plays")
