"""The fleet as one look at Redis shows it: a frozen view that decisions are made on.

Reading it is ``store``'s work; what to make of it is the scheduler's and the monitor's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from workers.breaker import BreakerState
from workers.evidence import NONE, Evidence
from workers.load import Load
from workers.spec import Runtime


class WorkerState(StrEnum):
    """Where a worker stands in its life.

    starting: registered, has not answered yet. ready: answers /v1/models (else /health); leaves to unready
    when it stops. unready: answered once, does not now; back to ready when it does. draining: a person asked;
    takes no new lease; ends as gone when its leases are gone or the deadline passes. gone: removed.
    """

    STARTING = "starting"
    READY = "ready"
    UNREADY = "unready"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker at one moment. Times are seconds on Redis' clock."""

    id: str
    url: str
    runtime: Runtime | None
    """None: not detected yet."""
    state: WorkerState
    incarnation: int
    models: frozenset[str]
    """Names it serves, LoRA names included; empty: it has not said."""
    max_model_len: int | None
    """Context length in tokens; None: it has not said."""
    max_running: int | None
    """Requests it can run at once, as a person said; None: nobody did (the load may)."""
    weight: float
    api_key_env: str | None
    """Name of the variable with its key; None: it needs none, or a file has it."""
    version: str | None
    load: Load | None
    """Last load read, however old; None: never read."""
    limit: int
    leases: int
    """Live leases of all dispatchers."""
    leases_since_sample: int
    """Live leases granted after the load's sample: requests that the load cannot have counted."""
    tokens_since_sample: int
    """Estimated tokens of those leases."""
    breaker: BreakerState
    breaker_open_until: float
    """When an open breaker may be tried; 0 when it is not open."""
    deferred_until: float
    """Not before this time; 0: no deferral."""
    api_key_file: str | None = None
    """Path of the file with its key."""
    models_given: bool = False
    """Whether a person said what it serves; else it did itself."""
    runtime_given: bool = False
    """Whether a person said what it runs; else it was detected, and may be found to have changed."""
    incarnation_reason: str = ""
    """How it was seen to live a new life; empty: it lives the one that it was registered with."""
    origin: str = ""
    """The configuration file that registered it; empty: a person or a program did."""
    reason: str = ""
    """Why it is in this state, for people."""
    since: float = 0.0
    """When it came into this state."""
    drain_until: float | None = None
    """When a draining worker is removed even with leases; None: not draining."""
    limit_reason: str = ""
    limit_since: float = 0.0
    limit_version: int = 0
    """Changes with every write of the limit; a writer names the version it saw."""
    evidence: Evidence = NONE
    """What answers have shown since the limit changed, if the worker does not tell how busy it is."""
    breaker_reason: str = ""
    breaker_trips: int = 0


@dataclass(frozen=True, slots=True)
class FleetView:
    """All workers at one moment."""

    now_s: float
    """Redis' clock when the view was taken."""
    generation: int
    """Changes whenever a worker is registered, replaced or removed."""
    workers: tuple[WorkerView, ...] = field(default=())
