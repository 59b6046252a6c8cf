"""``python -m tests.chaos``, which ``make chaos`` runs: a long run with a printed seed. Exits 1 when the
invariant is violated.

The environment says what it is like: CHAOS_S (600, seconds of faults), CHAOS_SEED (by chance), CHAOS_LINES
(5000, of a batch), CHAOS_ABREAST (2, batches at once), CHAOS_ENGINES (6), CHAOS_DISPATCHERS (3),
CHAOS_MONITORS (2), CHAOS_FOLDER (chaos-output, emptied first).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path
from random import SystemRandom

from tests.chaos.campaign import Campaign, Wishes
from tests.chaos.installation import Settings
from tests.chaos.report import Report
from tests.chaos.schedule import LONG, Numbers


def wishes() -> Wishes:
    """What the environment says."""
    return Wishes(
        seed=_number("SEED", SystemRandom().randrange(1_000_000)),
        lasts_s=float(_number("S", 600)),
        lines=_number("LINES", 5000),
        hasty_s=45.0,
        abreast=_number("ABREAST", 2),
        scale=LONG,
        settings=Settings(
            Numbers(
                engines=_number("ENGINES", 6),
                dispatchers=_number("DISPATCHERS", 3),
                monitors=_number("MONITORS", 2),
            )
        ),
    )


def _number(name: str, usual: int) -> int:
    return int(os.environ.get(f"CHAOS_{name}") or usual)


def main() -> int:
    folder = Path(os.environ.get("CHAOS_FOLDER") or "chaos-output").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    report = Report(folder / "report.jsonl", lambda line: print(line, flush=True))  # noqa: T201 - a command's output
    summary = asyncio.run(Campaign(wishes(), folder, report).run())
    return 0 if summary.good else 1


if __name__ == "__main__":
    sys.exit(main())
