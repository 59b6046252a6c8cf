"""Durations as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.durations import clock, parse_duration, spell_duration
from workers.errors import SettingsError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("5m", 300), ("24h", 86_400), ("7d", 604_800), ("1.5h", 5400), (" 2 M ", 120)],
)
def test_a_number_with_a_unit_is_so_many_seconds(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-5s", "0", "0m", "1h30m", "5 weeks", "nan", "1e3"])
def test_anything_else_is_refused_with_examples(text):
    with pytest.raises(SettingsError, match="90, 90s, 5m, 24h or 7d"):
        parse_duration(text)


@given(st.integers(min_value=1, max_value=10**9))
def test_a_spelled_duration_reads_as_what_it_was(seconds):
    assert parse_duration(spell_duration(seconds)) == seconds


def test_a_day_is_spelled_as_everyone_does():
    assert spell_duration(86_400) == "24h"
    assert spell_duration(90) == "90s"
    assert spell_duration(604_800) == "7d"


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0, "0:00"), (7.4, "0:07"), (725, "12:05"), (10_800, "3:00:00"), (-1, "0:00")]
)
def test_a_clock_shows_hours_only_when_there_are_some(seconds, shown):
    assert clock(seconds) == shown
