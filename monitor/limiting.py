"""What the limit's rule needs to remember of one incarnation between samples. Pure.

The rule itself is ``workers.limits``; writing its decision belongs to ``service``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from monitor.exploring import Explorer, may_explore
from workers.limits import (
    BLIND_STEP_S,
    PATIENCE,
    PRESS,
    LimitDecision,
    LimitInputs,
    LimitPolicy,
    Share,
    memory_full,
    next_limit,
    queue_target,
)

if TYPE_CHECKING:
    from workers.fleet import WorkerView
    from workers.load import Load

_REGISTERED_VERSION = 1
"""The version of the limit that registration writes: nobody has adapted it yet."""


@dataclass(slots=True)
class Limiter:
    """One incarnation's memory, fed with every poll: its load or that there was none, and an older view."""

    policy: LimitPolicy
    _been_full: bool = False
    _over: int = 0
    _queued: int = 0
    _learned: int | None = None
    _others_before: int = 0
    _adapting: bool = False
    _told: bool = False
    _last: tuple[int, int] | None = field(default=None)
    _explorer: Explorer | None = None

    @property
    def hurries(self) -> bool:
        """Whether the next sample matters soon: its slots are still unknown, or others may want them back."""
        learning = not self._been_full and not self._told
        return learning or self.policy.share is Share.SPARE

    def decide(self, view: WorkerView, load: Load) -> LimitDecision:
        """The limit that follows from this load; equal to the view's when nothing is to change."""
        self._note_cut(view, load.received_at)
        running, waiting, told = load.running, load.waiting, view.max_running or load.max_running
        self._told = told is not None
        self._note_queue(running, waiting)
        full = self._queued >= PATIENCE or memory_full(load.kv_usage_max, self.policy)
        self._over = self._over + 1 if (waiting or 0) > queue_target(running) else 0
        says = told is not None or (running is not None and waiting is not None)
        fresh = view.limit_version <= _REGISTERED_VERSION and not self._adapting and says
        decision = next_limit(
            LimitInputs(
                limit=None if fresh else view.limit,
                leases=view.leases,
                running=running,
                waiting=waiting,
                kv_usage=load.kv_usage_max,
                others=self._others(view, load),
                slots=told or self._learned,
                told=told is not None,
                been_full=self._been_full,
                over=self._over,
                settled=load.sampled_at >= view.limit_since,
                unchanged_s=load.received_at - view.limit_since,
            ),
            self.policy,
        )
        if running is None or waiting is None:
            decision = self._explored(decision, view, told or self._learned, load.received_at)
        self._adapting = True
        self._been_full = self._been_full or full
        self._last = (view.limit_version, decision.value)
        return decision

    def decide_blind(self, view: WorkerView, now_s: float) -> LimitDecision:
        """The same for a worker whose load could not be read. For one missed load it does not grow yet."""
        self._note_cut(view, now_s)
        last = view.load
        told = view.max_running or (None if last is None else last.max_running)
        known_s = max(view.limit_since, 0.0 if last is None else last.received_at)
        blind = next_limit(
            LimitInputs(
                limit=view.limit,
                leases=view.leases,
                running=None,
                waiting=None,
                kv_usage=None,
                others=self._others_before,
                slots=told or self._learned,
                told=told is not None,
                unchanged_s=now_s - known_s,
            ),
            self.policy,
        )
        decision = blind
        if last is None or now_s - last.received_at >= BLIND_STEP_S:
            decision = self._explored(blind, view, told or self._learned, now_s)
        self._last = (view.limit_version, decision.value)
        return decision

    def _explored(
        self, blind: LimitDecision, view: WorkerView, slots: int | None, now_s: float
    ) -> LimitDecision:
        """What answers show, where the load shows nothing. Beside other clients nobody may try it."""
        spare, changes = self.policy.share is Share.SPARE, blind.value != view.limit
        if spare or changes or not may_explore(view.limit, slots):
            return blind
        if self._explorer is None:
            self._explorer = Explorer(adopted=view.limit_version > _REGISTERED_VERSION)
        pressed = view.leases >= PRESS * view.limit
        return self._explorer.decide(view.limit, view.evidence, pressed=pressed, now_s=now_s)

    def _note_queue(self, running: int | None, waiting: int | None) -> None:
        # A burst stands in any engine's queue for a moment: only a queue that stays tells the slots.
        self._queued = self._queued + 1 if waiting else 0
        more = self._learned is not None and running is not None and running > self._learned
        if running and (self._queued >= PATIENCE or more):
            self._learned = running

    def _note_cut(self, view: WorkerView, now_s: float) -> None:
        # Somebody wrote the limit and it is less than we wanted: a 429 halved it, so the worker was full.
        if self._last is not None:
            version, wanted = self._last
            if view.limit_version > version and view.limit < wanted:
                self._been_full = True
                if self._explorer is not None:
                    self._explorer.refused(now_s)

    def _others(self, view: WorkerView, load: Load) -> int:
        # Requests sent between the count of leases and the sample look like somebody else's, but only in
        # one sample: the smaller of two in a row is nobody's echo.
        now = max(0, (load.running or 0) + (load.waiting or 0) - view.leases)
        smaller = min(now, self._others_before)
        self._others_before = now
        return smaller
