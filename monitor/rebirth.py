"""Is this still the same life of the worker? Recognised by what no running engine does. Pure.

Counting incarnations is the registry's work; this only says why the one under watch must have ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.load import Load

_START_SLACK_S = 1.0
"""A start time is printed with different fractions by different processes of one engine."""
_COUNTERS = ("generation_tokens_total", "prompt_tokens_total", "success_total")


class Identity:
    """What is known of one incarnation. ``load`` and ``version``: as last stored for it, if they are."""

    def __init__(self, load: Load | None = None, version: str | None = None) -> None:
        self._last = {} if load is None else {load.source: load}
        self._version = version

    def can_tell(self, load: Load) -> bool:
        """Whether `meet` would surely see that this load is from another life: it can compare start times."""
        last = self._last.get(load.source)
        return last is not None and None not in (last.process_start_time, load.process_start_time)

    def meet(self, load: Load) -> str | None:
        """Why this load comes from another life; None: it may be the same one."""
        # Two endpoints of one engine count differently: only like is compared with like.
        last, self._last[load.source] = self._last.get(load.source), load
        if last is None:
            return None
        before, after = last.process_start_time, load.process_start_time
        if before is not None and after is not None and abs(after - before) > _START_SLACK_S:
            return "its process start time changed"
        if last.version and load.version and last.version != load.version:
            return f"its version changed from {last.version} to {load.version}"
        return _fallen(last, load)

    def meet_version(self, version: str | None) -> str | None:
        """The same for the version that the worker tells when it is asked what it is."""
        last = self._version
        self._version = version or last
        if last and version and last != version:
            return f"its version changed from {last} to {version}"
        return None


def _fallen(last: Load, load: Load) -> str | None:
    for name in _COUNTERS:
        before, after = getattr(last, name), getattr(load, name)
        if before is not None and after is not None and after < before:
            return f"its counter {name} went down"
    return None
