"""A modelled worker as the store and the monitor would have it: leases, polled loads, a limit.

The limit's rule and the rates are the monitor's own code; the engine is `engine`'s.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from forebay.policy.engine import Engine
from monitor.limiting import Limiter
from monitor.rates import RateMeter
from workers.breaker import BreakerState
from workers.fleet import WorkerState, WorkerView
from workers.limits import PRESS, LimitPolicy
from workers.load import Load, LoadSource


@dataclass(frozen=True, slots=True)
class Polling:
    """How often a monitor asks, in seconds, and how it sets limits. `fast_s`: while leases press."""

    interval_s: float = 1.0
    fast_s: float = 0.25
    limits: LimitPolicy = field(default_factory=LimitPolicy)


class WatchedWorker:
    """One engine under watch. `told`: it says how many slots it has; else its limit has to be learned."""

    def __init__(self, name: str, engine: Engine, polling: Polling, *, told: bool) -> None:
        self.name = name
        self.engine = engine
        self.limit = engine.spec.slots if told else polling.limits.initial
        self.leases: dict[int, tuple[float, int]] = {}
        """By the key of the attempt: when it was granted, and for how many tokens."""
        self._polling = polling
        self._slots = engine.spec.slots if told else None
        self._limiter = Limiter(polling.limits)
        self._meter = RateMeter()
        self._limit_version = 1
        self._limit_since = 0.0
        self._load: Load | None = None

    @property
    def has_room(self) -> bool:
        """Whether an acquire would be granted."""
        return len(self.leases) < self.limit

    def poll(self, now_s: float) -> float:
        """Sample the load and let the limit follow from it; gives the time of the next poll."""
        view = self.view(now_s)
        pressed = view.leases >= PRESS * view.limit
        self._load = self._rated(self._sampled(now_s), pressed=pressed)
        decision = self._limiter.decide(view, self._load)
        if decision.value != self.limit:
            self.limit, self._limit_since = decision.value, now_s
            self._limit_version += 1
        hurries = pressed and (self._slots is not None or self._limiter.hurries)
        return now_s + (self._polling.fast_s if hurries else self._polling.interval_s)

    def view(self, now_s: float) -> WorkerView:
        """The worker as a look at the store would show it."""
        sampled_at = self._load.sampled_at if self._load is not None else -1.0
        since = [tokens for granted_s, tokens in self.leases.values() if granted_s > sampled_at]
        return WorkerView(
            id=self.name,
            url=f"http://{self.name}",
            runtime=None,
            state=WorkerState.READY,
            incarnation=1,
            models=frozenset(),
            max_model_len=None,
            max_running=None,
            weight=1.0,
            api_key_env=None,
            version=None,
            load=self._load,
            limit=self.limit,
            leases=len(self.leases),
            leases_since_sample=len(since),
            tokens_since_sample=sum(since),
            breaker=BreakerState.CLOSED,
            breaker_open_until=0.0,
            deferred_until=0.0,
            since=now_s,
            limit_since=self._limit_since,
            limit_version=self._limit_version,
        )

    def _sampled(self, now_s: float) -> Load:
        return Load(
            source=LoadSource.METRICS if self._slots is None else LoadSource.NATIVE,
            sampled_at=now_s,
            received_at=now_s,
            running=self.engine.running,
            waiting=self.engine.waiting,
            max_running=self._slots,
            generation_tokens_total=self.engine.tokens_written(now_s),
            success_total=self.engine.finished,
        )

    def _rated(self, load: Load, *, pressed: bool) -> Load:
        rates = self._meter.add(load, loaded=pressed or bool(load.waiting))
        return load.model_copy(
            update={
                "drain_rate": rates.drain_rate,
                "token_rate": rates.token_rate,
                "capacity_rate": rates.capacity_rate,
            }
        )
