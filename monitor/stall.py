"""Has a worker with work to do stopped working? The rule, on the evidence of its loads. Pure.

What follows (the breaker opens) belongs to ``watch``; whether it answers at all, to ``readiness``.
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

    def add(self, load: Load, *, leases: int, now_s: float) -> bool:
        """Whether the worker is stalled, with this load counted in.

        It is when there was work all the time, no token or success counter moved for ``stall_after_s``, and
        nothing in its memory stirred either; stirring memory may be a long prefill, which gets more time. A
        worker without any such evidence is never stalled.
        """
        self._note(load, now_s)
        work = (load.running or 0) + (load.waiting or 0) + leases
        if not work or not self._has_evidence():
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

    def _note(self, load: Load, now_s: float) -> None:
        progress: tuple[float | None, ...] = (
            load.generation_tokens_total,
            load.prompt_tokens_total,
            load.success_total,
        )
        stir = (load.waiting_uncached_tokens, load.used_tokens, load.kv_usage_mean)
        # Without counters, stirring memory is the only sign of progress there is.
        if all(value is None for value in progress):
            progress = stir
        if progress != self._progress:
            self._progress, self._moved_at = progress, now_s
        if stir != self._stir:
            self._stir, self._stirred_at = stir, now_s

    def _has_evidence(self) -> bool:
        return any(value is not None for value in self._progress)
