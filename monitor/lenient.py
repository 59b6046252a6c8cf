"""Values as engines print them, made into numbers we can trust, or None.

What is odd (null, NaN, infinities, negatives, text, more than there can be) is unknown, never 0
[vllm-project/vllm#44725]. Which fields there are belongs to the readers.
"""

from __future__ import annotations

_LARGEST = float(2**63)
"""Beyond a 64-bit counter a number is a mistake of the engine."""


def number(value: object) -> float | None:
    """A number from 0 to 2**63: sums and areas of such numbers stay finite. None for anything else.

    Booleans are no numbers.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < _LARGEST else None


def digits(text: str | None) -> float | None:
    """The number that plain digits write; None for any other text, and for more than a number may be."""
    return number(float(text)) if text is not None and text.isascii() and text.isdigit() else None


def count(value: object) -> int | None:
    """A whole number, 0 or more; ``3.0`` counts as 3, a fraction is cut off. None for anything else."""
    known = number(value)
    return int(value) if known is not None else None  # type: ignore[call-overload]  # a number


def total(values: list[int | None]) -> int | None:
    """The sum; None when there is nothing to add or one part is unknown: a part is not the whole."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def total_rate(values: list[float | None]) -> float | None:
    """As ``total``, for numbers with a fraction."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def mean_and_max(values: list[float | None]) -> tuple[float | None, float | None]:
    """Both, over ranks; (None, None) when there is none or one is unknown: it may be the full one."""
    known = [value for value in values if value is not None]
    if not known or len(known) != len(values):
        return None, None
    return sum(known) / len(known), max(known)
