"""docs/protocol.md lists every field of a decision record and every filter, in the order of the code."""

from __future__ import annotations

import re

from dispatcher.archive import KEEP, MOST_ATTEMPTS, TTL_S
from dispatcher.records import MOST_NAMES, DecisionRecord
from dispatcher.scheduler.filters import FILTERS
from tests.checkout import ROOT, code_of, rows
from workers import keys

PAGE = ROOT / "docs" / "protocol.md"


def section() -> str:
    text = PAGE.read_text(encoding="utf-8")
    return text[text.index("### A decision record") : text.index("### Lua steps")]


def test_every_field_of_a_record_stands_there():
    written = [name for row in rows(PAGE, below="A decision record") for name in code_of(row[0])]
    assert sorted(written) == sorted(DecisionRecord.model_fields)


def test_every_filter_stands_there_in_its_order():
    assert re.findall(r"`(\w+)`", section().partition("Filters, in their order:")[2]) == [
        rule.name for rule in FILTERS
    ]


def test_the_bounds_that_it_names_are_the_ones_that_hold():
    assert f"the last {MOST_ATTEMPTS} attempts" in section()
    assert f"the best {MOST_NAMES} and the pick" in section()
    assert keys.DECISIONS.lifetime == f"the last {KEEP:,}, up to {TTL_S / 3600:.0f} h"
