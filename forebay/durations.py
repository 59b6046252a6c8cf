"""Durations as people write and read them: ``90``, ``90s``, ``5m``, ``24h``, ``7d``. Pure."""

from __future__ import annotations

import re

from workers.errors import SettingsError

FOREVER = "forever"
MOST_KEEP_DAYS = 36_500
"""Who keeps something longer means for ever; and of a date far beyond that no calendar knows."""
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)")


def parse_duration(text: str) -> float:
    """Seconds, above 0: a number with an optional unit s, m, h or d; without one it is seconds.

    Raises SettingsError.
    """
    found = _FORM.fullmatch(text.strip().lower())
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if seconds <= 0:
        raise SettingsError(f"{text!r} is not a duration; write for example 90, 90s, 5m, 24h or 7d")
    return seconds


def parse_keep(text: str | float) -> float | None:
    """How long something is kept, in seconds, as ``parse_duration`` reads it; ``forever`` is None.

    Raises SettingsError, also for more than ``MOST_KEEP_DAYS``.
    """
    if str(text).strip().lower() == FOREVER:
        return None
    seconds = parse_duration(str(text))
    if seconds > MOST_KEEP_DAYS * _UNITS["d"]:
        raise SettingsError(f"{text} is more than {MOST_KEEP_DAYS:,} days; write {FOREVER}")
    return seconds


def spell_duration(seconds: float) -> str:
    """The shortest exact spelling in one unit that ``parse_duration`` reads, such as ``24h``."""
    for unit in ("d", "h", "m"):
        if seconds >= _UNITS[unit] and seconds % _UNITS[unit] == 0 and (unit != "d" or seconds > _UNITS["d"]):
            return f"{int(seconds // _UNITS[unit])}{unit}"
    return f"{int(seconds)}s" if seconds == int(seconds) else f"{seconds}s"


def clock(seconds: float) -> str:
    """A duration for a display: ``0:07``, ``12:05``, ``3:00:00``."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
