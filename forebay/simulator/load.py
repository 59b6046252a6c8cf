"""What an engine says about itself at one moment, before any runtime has put it into its own words.

Belongs here: the snapshot and the counters in it. Does not belong here: how a page or a body looks (``vllm``,
``sglang`` and their metrics pages).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """Gauges and counters of one engine, all taken at ``sampled_at_s`` (Unix time).

    Tokens are KV tokens; ``used_tokens`` counts those of running sequences. ``finished`` maps a
    finished_reason (stop, length, abort, error) to how many sequences ended so.
    """

    sampled_at_s: float
    running: int
    waiting: int
    waiting_prompt_tokens: int
    used_tokens: int
    capacity_tokens: int
    gen_tokens_per_s: float
    prompt_tokens_total: int
    generation_tokens_total: int
    finished: dict[str, int]
    rejected: int

    @property
    def usage(self) -> float:
        """The share of the KV cache in use, 0.0 to 1.0."""
        return min(1.0, self.used_tokens / self.capacity_tokens)

    @property
    def succeeded(self) -> int:
        """Sequences that got their whole answer."""
        return self.finished["stop"] + self.finished["length"]

    def as_idle(self) -> LoadSnapshot:
        """The same with every gauge at zero; counters stay."""
        return replace(
            self,
            running=0,
            waiting=0,
            waiting_prompt_tokens=0,
            used_tokens=0,
            gen_tokens_per_s=0.0,
        )
