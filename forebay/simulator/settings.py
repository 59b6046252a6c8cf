"""What one simulated engine is told at its start: one frozen record with every default.

Belongs here: names, units, ranges and defaults. Does not belong here: reading flags (``command``) or acting
on them.
"""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from forebay.simulator.batching import Pace
from forebay.simulator.faults import Fault

Runtime = Literal["vllm", "sglang"]
NotNegative = Annotated[float, Field(ge=0.0)]


class EngineSettings(BaseModel):
    """One simulated engine.

    Rates are per second and per sequence; 0 means that the phase takes no time. Texts hold no secret but
    ``api_key``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    runtime: Runtime = "vllm"
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 lets the system choose; the address that was chosen is announced when the engine listens."""
    model: Annotated[str, Field(min_length=1)] = "sim-model"
    name: str = ""
    """A word for people, shown in the control state; the engine's answers never carry it."""

    tokens_per_s: NotNegative = 50.0
    """Decode rate of one sequence that runs alone."""
    prefill_tokens_per_s: NotNegative = 5000.0
    """Prefill rate of one sequence that runs alone."""
    instant: bool = False
    """No service time at all, whatever the two rates say."""
    slots: Annotated[int, Field(ge=1)] = 8
    slowdown: NotNegative = 1.0
    """How much a batch slows one sequence: speed = 1 / (1 + slowdown * (running - 1) / slots)."""
    max_queued: Annotated[int, Field(ge=0)] | None = None
    """Sequences that may wait; beyond it requests are refused with 503. None: any number, as by default on
    both.
    """
    kv_tokens: Annotated[int, Field(ge=1)] = 131_072
    max_model_len: Annotated[int, Field(ge=2)] = 8192
    prefix_caching: bool = False
    """Whether the beginning of a prompt that was read lately takes no time again; as many tokens are kept as
    the KV cache holds.
    """

    seed: int = 0
    """The same seed, prompt and request's seed give the same answer, on every engine of the same settings."""
    answer_tokens_median: Annotated[float, Field(gt=0.0)] = 128.0
    answer_tokens_sigma: NotNegative = 0.8
    """Spread of the lognormal from which the length of an answer is drawn; 0 makes every answer the median.
    """

    embeddings: bool = True
    """Whether /v1/embeddings is served; without it, it answers as an engine of a generating model does."""
    load_tracking: bool = False
    """vLLM only: without it /load says 0 whatever happens, as vLLM does without
    --enable-server-load-tracking.
    """
    api_key: str | None = None
    """Which paths need it is the runtime's custom; see the dialects."""
    keep_alive_s: Annotated[float, Field(gt=0.0)] = 5.0
    """How long an idle connection is kept after an answer; 5 s is the default of uvicorn, hence of both
    runtimes.
    """
    shutdown_timeout_s: NotNegative = 0.0
    """After SIGTERM: how long running requests may go on in shutdown mode; 0 drops them at once."""
    faults: tuple[Fault, ...] = ()
    log_requests: Annotated[int, Field(ge=0)] = 4096
    """How many of the latest inference requests the control state remembers."""

    @model_validator(mode="after")
    def _one_full_sequence_fits(self) -> Self:
        if self.kv_tokens < self.max_model_len:
            raise ValueError("kv_tokens must hold at least one sequence of max_model_len tokens")
        return self

    def pace(self) -> Pace:
        """The part of the settings that the batching model needs."""
        return Pace(
            tokens_per_s=0.0 if self.instant else self.tokens_per_s,
            slots=self.slots,
            slowdown=self.slowdown,
            prefill_tokens_per_s=0.0 if self.instant else self.prefill_tokens_per_s,
            kv_tokens=self.kv_tokens,
            max_queued=self.max_queued,
        )
