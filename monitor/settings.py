"""Everything a person may set of the monitor: one frozen record.

Flags are read in ``command``; what a setting means to the limit's rule is ``workers.limits``' subject.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from monitor.gauges.mappings import MappingOverride
from workers.breaker import BreakerPolicy
from workers.limits import INITIAL_LIMIT, LimitPolicy, Share
from workers.settings import ServiceSettings
from workers.spec import Runtime, worker_id

Fraction = Annotated[float, Field(gt=0, le=1)]


def default_name() -> str:
    """A name that no other live monitor has: host and process."""
    return f"{socket.gethostname()}:{os.getpid()}"


class MonitorSettings(ServiceSettings):
    """The monitor's settings. Times are in seconds."""

    section: ClassVar[str] = "monitor"

    name: str = Field(default_factory=default_name, min_length=1, description="this monitor among others")
    poll_interval_s: PositiveFloat = Field(default=1.0, description="from one poll of a worker to the next")
    fast_interval_s: PositiveFloat = Field(
        default=0.25, description="the same while leases press on /v1/loads, or to learn slots"
    )
    poll_budget_s: PositiveFloat = Field(default=2.0, description="everything asked of a worker in one poll")
    readiness_interval_s: PositiveFloat = Field(
        default=10.0, description="from one look at a ready worker's models to the next"
    )
    unready_after: PositiveInt = Field(default=2, description="failed looks in a row that make it unready")
    memo_ttl_s: PositiveFloat = Field(
        default=600.0, description="after so long, /v1/loads is looked for again"
    )
    stale_after_polls: PositiveInt = Field(default=3, description="an older load fades toward unknown")
    dead_after_polls: PositiveInt = Field(default=10, description="an older load is unknown")
    stall_after_s: PositiveFloat = 60.0
    heartbeat_s: PositiveFloat = Field(
        default=2.0, description="a killed monitor's workers have moved within two of these"
    )
    share: Share = Share.ALL
    spare_fraction: Fraction = Field(default=0.8, description="in share=spare: what batch work may fill")
    kv_ceiling: Fraction = 0.9
    initial_limit: PositiveInt = INITIAL_LIMIT
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        default=None, description="None: no exporter; 0: any free port"
    )
    metrics_host: str = "127.0.0.1"
    mappings: Mapping[str, MappingOverride] = Field(
        default_factory=dict, description="by runtime or worker: which metric carries which field"
    )
    breaker: BreakerPolicy = BreakerPolicy()
    """For the breakers of workers that stall; it must be the dispatchers' own, who count the same trips."""

    @field_validator("mappings")
    @classmethod
    def _by_runtime_or_worker_id(cls, given: Mapping[str, MappingOverride]) -> Mapping[str, MappingOverride]:
        return {_runtime_or_worker(name): override for name, override in given.items()}

    def limit_policy(self) -> LimitPolicy:
        """The part of it that the limit's rule needs."""
        return LimitPolicy(
            share=self.share,
            spare_fraction=self.spare_fraction,
            kv_ceiling=self.kv_ceiling,
            initial=self.initial_limit,
        )


def _runtime_or_worker(name: str) -> str:
    """A runtime, or the id of the worker that is named by URL or id. Raises ValueError for another word."""
    if name in set(Runtime):
        return name
    # A host alone would be a worker at port 80, and is more likely a misspelt runtime.
    if not any(sign in name for sign in ":./"):
        raise ValueError(f"{name!r} is no runtime and no worker; there are {', '.join(Runtime)}")
    return worker_id(name if "://" in name else f"http://{name}")
