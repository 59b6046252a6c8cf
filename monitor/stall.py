"""Has a worker with work to do stopped working? The rule, on the evidence of its loads. Pure.

What follows (the breaker opens) belongs to ``watch``; whether it answers at all, to ``readiness``; which
counters move while answers are written, to ``gauges.mappings``.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.load import Load

PREFILL_PATIENCE = 5.0
"""A worker that only prefills may go this many times ``stall_after_s`` without a token."""


@dataclass(slots=True)
class StallWatch:
    """One incarnation's evidence. Times are sample receipts on Redis' clock.

    Only loads count: a scrape that fails proves nothing, the engine may be serving fine.
    """

    stall_after_s: float
    _busy_since: float | None = None
    _moved_at: float = 0.0
    _stirred_at: float = 0.0
    _progress: tuple[float | None, ...] = ()
    _stir: tuple[float | None, ...] = ()

    def add(self, load: Load, *, live: bool, leases: int, now_s: float) -> bool:
        """Whether the worker is stalled, with this load counted in.

        ``live``: its count of generated tokens moves while answers are written; else only when one ends.

        It is when there was work all the time, no counter moved for ``stall_after_s``, and nothing in its
        memory stirred either; stirring memory may be a long prefill, which gets more time. Where counters
        move only when a request ends, memory that stirs is progress, and a worker that does not tell its
        memory is never stalled: it may be writing long answers.
        """
        telling = self._note(load, live=live, now_s=now_s)
        work = (load.running or 0) + (load.waiting or 0) + leases
        if not work or not telling:
            self._busy_since = None
            return False
        if self._busy_since is None:
            self._busy_since = now_s
        still_s = now_s - max(self._busy_since, self._moved_at)
        if still_s < self.stall_after_s:
            return False
        quiet_s = now_s - max(self._busy_since, self._stirred_at)
        return quiet_s >= self.stall_after_s or still_s >= PREFILL_PATIENCE * self.stall_after_s

    def forgive(self) -> None:
        """Start counting anew: the worker was tripped, and gets the whole time again."""
        self._busy_since = None

    def _note(self, load: Load, *, live: bool, now_s: float) -> bool:
        """Note what moved; whether the load tells anything that moves for as long as the worker works."""
        counters = (
            load.steps_total,
            load.generation_tokens_total,
            load.prompt_tokens_total,
            load.success_total,
        )
        memory = (load.used_tokens, load.kv_usage_mean)
        stir = (*memory, load.waiting_uncached_tokens)
        steady = load.steps_total is not None or (live and load.generation_tokens_total is not None)
        progress = counters if steady else (*counters, *stir)
        if progress != self._progress:
            self._progress, self._moved_at = progress, now_s
        if stir != self._stir:
            self._stir, self._stirred_at = stir, now_s
        return steady or any(value is not None for value in memory)
