"""How soon results became durable again after a fault. Pure; times are seconds since the start."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def recovery_s(ended_s: float, progress_s: Sequence[float]) -> float | None:
    """From a fault's end to the next durable progress; None: none came after it. ``progress_s`` ascends."""
    following = bisect_left(progress_s, ended_s)
    return progress_s[following] - ended_s if following < len(progress_s) else None
