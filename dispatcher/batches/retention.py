"""How long an ended batch is kept: when it is to go, read from what the ledger knows of it. Pure.

Who looks for such batches, and removes them, is the subject of `dispatcher.sweeping`.
"""

from __future__ import annotations

from collections.abc import Mapping

from dispatcher.batches.record import FINAL, BatchStatus

KEEP_FIELD = "keep_s"
"""Seconds from a batch's end to its removal; empty: it stays until somebody removes it."""
ENDS = ("status", *(f"{status}_at" for status in BatchStatus if status.final))
"""What has to be known of a batch to tell when it ended."""
FIELDS = (*ENDS, KEEP_FIELD)
"""What has to be known of a batch to tell when it goes."""


def ended_at(fields: Mapping[str, str]) -> float | None:
    """When a batch ended, in seconds since 1970; None: it has not, or nobody knows."""
    status = fields.get("status")
    stamp = fields.get(f"{status}_at") if status in FINAL else None
    return float(stamp) if stamp else None


def remove_at(fields: Mapping[str, str]) -> float | None:
    """When a batch's files and keys go, in seconds since 1970; None: never, or it has not ended."""
    ended_s, keep_s = ended_at(fields), fields.get(KEEP_FIELD)
    return None if ended_s is None or not keep_s else ended_s + float(keep_s)
