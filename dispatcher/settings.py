"""What can be set of a dispatcher. Where settings come from is `workers.settings`' subject."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from dispatcher.archive import KEEP, TTL_S
from dispatcher.held_lines import MOST_BYTES
from dispatcher.queues import QUEUES
from dispatcher.reserved import ReservedKeys
from dispatcher.retry import RetryPolicy
from dispatcher.scheduler.strategies import SchedulerPolicy
from workers.breaker import BreakerPolicy
from workers.settings import ServiceSettings


def default_storage() -> str:
    """Where batches' files are kept unless it is said: below the user's data folder."""
    data = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return str(Path(data) / "forebay")


def _name() -> str:
    return f"dispatcher-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"


class DispatcherSettings(ServiceSettings):
    """Times are in seconds."""

    section: ClassVar[str] = "dispatcher"

    storage: str = Field(
        default_factory=default_storage, description="where batches' files are: any fsspec URL"
    )
    name: str = Field(
        default_factory=_name,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$",
        description="unique among dispatchers, also over restarts",
    )
    queues: tuple[str, ...] = Field(default=QUEUES, min_length=1, description="most urgent first")

    request_timeout_s: float = Field(default=600.0, gt=0, description="least time for one attempt")
    slowest_rate: float = Field(default=5.0, gt=0, description="slowest plausible writing, tokens/s")
    connect_timeout_s: float = Field(default=5.0, gt=0)
    inline_deadline_s: float = Field(default=3600.0, gt=0, description="all the time of an inline request")

    view_interval_s: float = Field(
        default=0.1, gt=0, description="how old a look at the fleet may get; more where looking takes long"
    )
    lease_ttl_s: float = Field(default=20.0, gt=1, description="a lease nobody renews ends after this")
    held_bytes: int = Field(
        default=MOST_BYTES, ge=1, description="batches' lines that are read and not answered, in bytes"
    )
    part_lines: int = Field(default=256, ge=1, description="results that make a durable part at once")
    part_age_s: float = Field(default=1.0, gt=0, description="age at which fewer results make one")
    drain_timeout_s: float = Field(default=30.0, ge=0, description="SIGTERM: time for what is in flight")
    watch_interval_s: float = Field(default=1.0, gt=0, description="how soon a cancelled batch is noticed")
    sweep_interval_s: float = Field(
        default=60.0, ge=0.1, description="from one look for batches whose time is over to the next"
    )
    metrics_port: int | None = Field(default=None, ge=0, le=65535, description="None: no metrics page")
    metrics_host: str = Field(default="127.0.0.1", description="address of the metrics page")

    share: Literal["all", "spare"] = Field(
        default="all", description="all: the engines are ours alone. spare: they serve others first"
    )
    hedge: bool | None = Field(
        default=None, description="second attempts at the end of a batch; None: unless share is spare"
    )

    explain_sample: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="share of good attempts that `forebay explain` knows; None: all, in batches above "
        "1,000 lines one in a hundred. Of failed ones it knows all",
    )
    explain_keep: int = Field(
        default=KEEP, ge=0, le=1_000_000, description="requests it knows, the last ones; 0: none"
    )
    explain_ttl_s: float = Field(default=TTL_S, gt=0, description="and for how long")

    reserved_keys: ReservedKeys = ReservedKeys()
    scheduler: SchedulerPolicy = SchedulerPolicy()
    retry: RetryPolicy = RetryPolicy()
    breaker: BreakerPolicy = BreakerPolicy()

    @property
    def may_hedge(self) -> bool:
        """Whether requests that run on slow workers may get a second attempt on faster ones."""
        return self.share == "all" if self.hedge is None else self.hedge
