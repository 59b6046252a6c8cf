"""A load as read: what a worker said about itself at one moment. Unknown is None, never 0.

How a load is read off an endpoint belongs to the monitor; here is the record, and how it stands in Redis.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0)]
Ratio = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Stamp = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class LoadSource(StrEnum):
    """Where the numbers came from."""

    NATIVE = "native"
    METRICS = "metrics"
    NONE = "none"


class Load(BaseModel):
    """One worker's load. Every measurement may be None: the worker did not say.

    Counts are requests or tokens over all ranks; usages are 0.0 to 1.0 (engines may briefly pass 1.0); rates
    are per second. Stamps are seconds since the epoch on Redis' clock once the load is stored; fresh from a
    reader they are on the worker's clock.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: LoadSource
    sampled_at: Stamp = Field(description="when the numbers were true")
    received_at: Stamp = Field(description="when the answer arrived here")
    rank_count: Count | None = None

    running: Count | None = None
    waiting: Count | None = None
    waiting_uncached_tokens: Count | None = None
    used_tokens: Count | None = None
    capacity_tokens: Count | None = None
    kv_usage_mean: Ratio | None = None
    kv_usage_max: Ratio | None = None
    gen_throughput: Rate | None = Field(default=None, description="tokens/s at this moment; never a capacity")
    cache_hit_rate: Ratio | None = None
    max_running: Count | None = None

    prompt_tokens_total: Count | None = None
    generation_tokens_total: Count | None = None
    success_total: Count | None = None
    steps_total: Count | None = Field(
        default=None, description="batches computed so far: it moves for as long as anything is worked on"
    )
    block_size: Count | None = None
    num_gpu_blocks: Count | None = None
    process_start_time: Stamp | None = None
    version: str | None = None
    disagg_mode: str | None = None

    drain_rate: Rate | None = Field(default=None, description="requests finished per second over the window")
    token_rate: Rate | None = Field(default=None, description="tokens generated per second over the window")
    capacity_rate: Rate | None = Field(
        default=None, description="highest sustained token rate lately: the slow capacity estimate"
    )

    def to_hash(self) -> dict[str, str]:
        """The load as named Redis hash fields; what is unknown has no field."""
        return {name: str(value) for name, value in self.model_dump(mode="json", exclude_none=True).items()}

    @classmethod
    def from_hash(cls, fields: dict[str, str]) -> Self | None:
        """The load that ``to_hash`` wrote, or None when there is none.

        A field that is not known here is left out: monitors are upgraded first, and may know more.
        Raises ValidationError for what is no load.
        """
        known = {name: text for name, text in fields.items() if name in cls.model_fields}
        return cls.model_validate(known) if fields else None
