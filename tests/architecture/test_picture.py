"""The picture in the README is what the code draws now of the look that is kept beside it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dispatcher.batches.record import BatchStatus
from forebay.cli.picture import HalfWay, drawn, keep, kept
from forebay.cli.quiet import QuietWatcher
from tests.checkout import ROOT

LOOK = ROOT / "docs" / "progress.json"
PICTURE = ROOT / "docs" / "progress.svg"


def test_the_picture_is_what_the_code_draws_of_the_look():
    """If not: python -m forebay.cli.picture docs/progress.json docs/progress.svg."""
    assert drawn(kept(LOOK.read_bytes())) == PICTURE.read_text(encoding="utf-8")


def test_the_picture_shows_a_run_in_the_middle_and_fetches_nothing():
    text = re.sub(r"<[^>]+>|&#160;", " ", PICTURE.read_text(encoding="utf-8"))
    for word in ("forebay run", "tokens/s", "in flight", "leases", "breaker", "vllm", "sglang"):
        assert word in text
    assert re.findall(r"url\((?!#)[^)]*\)", PICTURE.read_text(encoding="utf-8")) == []


def test_a_look_is_kept_whole():
    look = kept(LOOK.read_bytes())
    assert kept(keep(look)) == look
    assert look.status is BatchStatus.IN_PROGRESS
    assert {worker.load is not None for worker in look.workers} == {True}


@pytest.mark.parametrize(("shares", "expected"), [((0.1, 0.5, 0.9), 0.5), ((0.2, 0.7), 0.7)])
def test_the_first_look_is_kept_at_which_half_is_done(tmp_path: Path, shares: Any, expected: float):
    look = kept(LOOK.read_bytes())
    target = tmp_path / "look.json"
    halfway = HalfWay(QuietWatcher(), target)
    for share in shares:
        halfway.progress(replace(look, completed=round(share * look.total), failed=0))
    assert kept(target.read_bytes()).done == round(expected * look.total)


def test_of_a_run_that_never_came_so_far_nothing_is_kept(tmp_path: Path):
    look = kept(LOOK.read_bytes())
    halfway = HalfWay(QuietWatcher(), tmp_path / "look.json")
    halfway.progress(replace(look, completed=1))
    halfway.close()
    assert list(tmp_path.iterdir()) == []
