"""A short run of chaos: whatever dies, every line ends once. The long one is ``make chaos``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.chaos.campaign import Campaign, Wishes
from tests.chaos.installation import Settings
from tests.chaos.report import Report
from tests.chaos.schedule import SHORT, Numbers

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(300)]

WISHES = Wishes(
    seed=int(os.environ.get("CHAOS_SEED", "12")),
    lasts_s=8.0,
    lines=300,
    hasty_s=4.0,
    abreast=2,
    scale=SHORT,
    settings=Settings(
        Numbers(engines=3, dispatchers=2, monitors=2),
        slots=8,
        services={
            "FOREBAY_LEASE_TTL_S": "3",
            "FOREBAY_STALL_AFTER_S": "4",
            "FOREBAY_DRAIN_TIMEOUT_S": "1",
            "FOREBAY_REQUEST_TIMEOUT_S": "4",
            "FOREBAY_PART_LINES": "16",
            "FOREBAY_PART_AGE_S": "0.3",
        },
    ),
    hasten=True,
    patience_s=90.0,
)


async def test_every_line_ends_once_whatever_dies_stalls_or_is_lost(tmp_path: Path):
    told: list[str] = []
    summary = await Campaign(WISHES, tmp_path, Report(tmp_path / "report.jsonl", told.append)).run()
    assert summary.good, "\n".join(told)
    assert len(summary.faults) > 10
    assert sum(story.findings.lines for story in summary.stories) >= 2 * WISHES.lines
