"""One worker's polls, one after the other: look at its view, tick its watch, write what was found.

What is asked and concluded belongs to ``watch``; when, and for which workers, to ``service``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import structlog

from monitor.watch import Findings, StateFinding, Watch, presses
from workers.errors import StoreUnavailable
from workers.fleet import WorkerState, WorkerView
from workers.load import LoadSource

if TYPE_CHECKING:
    import httpx

    from monitor.clock import RedisClock
    from monitor.fleet import FleetWatcher
    from monitor.loads import LoadWriter
    from monitor.settings import MonitorSettings
    from workers.store import FleetStore

log = structlog.get_logger()


class Poller:
    """Belongs to one task. Nothing that a worker or Redis does makes ``turn`` raise."""

    def __init__(
        self,
        worker: str,
        *,
        store: FleetStore,
        loads: LoadWriter,
        fleet: FleetWatcher,
        client: httpx.AsyncClient,
        settings: MonitorSettings,
        clock: RedisClock,
        environ: Mapping[str, str],
        on_poll: Callable[[str, float], None],
    ) -> None:
        self._worker = worker
        self._store = store
        self._loads = loads
        self._fleet = fleet
        self._client = client
        self._settings = settings
        self._clock = clock
        self._environ = environ
        self._on_poll = on_poll
        self._watch: Watch | None = None
        self._reborn = False
        self._look = 0
        self._pressed = False
        """Whether its leases pressed against its limit when it was last polled."""
        self._failing = False

    async def turn(self) -> bool:
        """One poll, begun on a view that shows all that the last one wrote. True: poll again soon."""
        await self._fleet.wait_past(self._look)
        view = self._fleet.views.get(self._worker)
        if view is None:
            return False
        try:
            if view.state is WorkerState.DRAINING:
                await self._end_drain(view)
                return False
            fast = await self._poll(view)
            self._failing = False
            return fast
        except StoreUnavailable as error:
            log.debug("not written: redis does not answer", worker=self._worker, error=str(error))
        except Exception:
            # A mistake of ours with one worker must not end the watch over the others, nor fill the log.
            if not self._failing:
                log.exception("poll failed", worker=self._worker)
            self._failing = True
        return False

    def should_be_early(self) -> bool:
        """Whether the next poll should not wait until it is due.

        So it is when work came since the last poll that fills a limit which is still being learned: every
        moment until it grows, slots may be idle.
        """
        view = self._fleet.views.get(self._worker)
        if view is None or self._watch is None or self._pressed:
            return False
        return self._watch.learns and presses(view)

    async def _end_drain(self, view: WorkerView) -> None:
        over = view.drain_until is not None and self._clock.now() >= view.drain_until
        if (over or not view.leases) and await self._store.remove(view.id, incarnation=view.incarnation):
            log.info("drained worker removed", worker=view.id, leases=view.leases)

    async def _poll(self, view: WorkerView) -> bool:
        loop = asyncio.get_running_loop()
        watch = self._watching(view)
        self._pressed = presses(view)
        started = loop.time()
        found = await watch.tick(view, memo=self._has_memo(view))
        source = found.load.source if found.load is not None else LoadSource.NONE
        self._on_poll(source.value, loop.time() - started)
        await self._write(view, watch, found)
        return found.fast or found.reborn is not None

    def _watching(self, view: WorkerView) -> Watch:
        if self._watch is None or self._watch.incarnation != view.incarnation:
            self._watch = Watch(
                view,
                self._settings,
                self._client,
                now=self._clock.now,
                environ=self._environ,
                reborn=self._reborn,
            )
            self._reborn = False
        return self._watch

    def _has_memo(self, view: WorkerView) -> bool:
        memo = self._fleet.memos.get(view.id)
        return memo is not None and memo.incarnation == view.incarnation and memo.until > self._clock.now()

    async def _write(self, view: WorkerView, watch: Watch, found: Findings) -> None:
        """Write the findings, each fenced by the incarnation that was asked."""
        if found.reborn is not None:
            await self._start_next_life(view, found.reborn, found.state)
            return
        # The limit first: the state may make it ready, and then dispatchers take what they may.
        await self._write_limit(view, found)
        state = found.state
        if state is not None and await self._write_state(view.id, view.incarnation, state, was=view):
            watch.state_was_written(state)
        await self._write_memo(view, found)
        if found.load is not None:
            await self._loads.write(view.id, view.incarnation, found.load)
        if found.stalled and await self._store.trip(view.id, view.incarnation, "stalled"):
            log.warning("worker stalled: its breaker opens", worker=view.id)

    async def _start_next_life(self, view: WorkerView, reason: str, state: StateFinding | None) -> None:
        incarnation = await self._store.next_incarnation(view.id, view.incarnation, reason)
        self._watch, self._reborn = None, True
        log.info("worker lives a new life", worker=view.id, incarnation=incarnation, reason=reason)
        if state is not None:
            await self._write_state(view.id, incarnation, state, was=view)
        self._look = self._fleet.want()

    async def _write_state(
        self, worker: str, incarnation: int, found: StateFinding, *, was: WorkerView
    ) -> bool:
        written = await self._store.write_state(
            worker,
            incarnation,
            found.state,
            reason=found.why,
            models=found.models,
            max_model_len=found.max_model_len,
            runtime=found.runtime,
            version=found.version,
        )
        if written and (was.state, was.reason) != (found.state, found.why):
            log.info("worker state", worker=worker, state=found.state.value, reason=found.why)
        self._look = self._fleet.want()
        return written

    async def _write_memo(self, view: WorkerView, found: Findings) -> None:
        if found.absent is not None:
            ttl_s = self._settings.memo_ttl_s
            await self._store.set_memo(view.id, view.incarnation, found.absent, ttl_s)
            self._look = self._fleet.want()
        elif found.available and view.id in self._fleet.memos:
            await self._store.clear_memo(view.id)

    async def _write_limit(self, view: WorkerView, found: Findings) -> None:
        limit = found.limit
        if limit is None:
            return
        seen = view.limit_version
        if await self._store.write_limit(view.id, view.incarnation, limit.value, limit.reason, seen=seen):
            log.info("limit", worker=view.id, was=view.limit, now=limit.value, reason=limit.reason)
        self._look = self._fleet.want()
