"""How long an ended batch is kept: when it is to go, read from what the ledger knows of it. Pure.

Who looks for such batches, and removes them, is the subject of `dispatcher.sweeping`.
"""

from __future__ import annotations

from collections.abc import Mapping

from dispatcher.batches.record import FINAL, BatchStatus

KEEP_FIELD = "keep_s"
"""Seconds from a batch's end to its removal; empty: it stays until somebody removes it."""
FIELDS = ("status", KEEP_FIELD, *(f"{status}_at" for status in BatchStatus if status.final))
"""What has to be known of a batch."""


def remove_at(fields: Mapping[str, str]) -> float | None:
    """When a batch's files and keys go, in seconds since 1970; None: never, or it has not ended."""
    status, keep_s = fields.get("status"), fields.get(KEEP_FIELD)
    ended_at = fields.get(f"{status}_at")
    if not status or not keep_s or not ended_at or status not in FINAL:
        return None
    return float(ended_at) + float(keep_s)
