"""When an ended batch goes, and how that is said."""

from __future__ import annotations

import random

import pytest

from dispatcher.batches.record import BatchOptions, BatchRecord, BatchStatus, is_batch_id, new_batch_id
from dispatcher.batches.retention import remove_at
from forebay.cli.batches import batch_table
from forebay.durations import parse_keep
from forebay.settings import FrontSettings, front_settings
from workers.errors import SettingsError

ENDS = {f"{status}_at": "100.5" for status in BatchStatus if status.final}


@pytest.mark.parametrize("status", [status for status in BatchStatus if status.final])
def test_an_ended_batch_goes_so_long_after_its_end(status):
    fields = {"status": status.value, f"{status}_at": "100.5", "keep_s": "60"}
    assert remove_at(fields) == 160.5


@pytest.mark.parametrize("status", [status for status in BatchStatus if not status.final])
def test_a_batch_that_has_not_ended_never_goes(status):
    # As when Redis lost a second in which it had ended, with all its stamps.
    assert remove_at(ENDS | {"status": status.value, f"{status}_at": "1", "keep_s": "60"}) is None


@pytest.mark.parametrize(
    "fields",
    [{}, {"status": "completed", "completed_at": "1"}, {"status": "completed", "keep_s": "1"}],
    ids=["a batch that is gone", "one that is kept for ever", "one whose end is unknown"],
)
def test_a_batch_of_which_not_all_is_known_never_goes(fields):
    assert remove_at(fields) is None
    assert remove_at(fields | {"keep_s": ""}) is None


def test_keeping_is_said_as_a_duration_or_forever():
    assert [parse_keep(text) for text in ("30d", 90, "1.5h", " Forever ")] == [2_592_000, 90, 5400, None]
    for nonsense in ("", "0", "ever", "-1d"):
        with pytest.raises(SettingsError):
            parse_keep(nonsense)


def test_whoever_wants_to_keep_something_longer_than_a_century_is_told_to_say_forever():
    assert parse_keep("36500d") == 36_500 * 86_400
    for text in ("36501d", "9999999d", 1e300, "9" * 400):
        with pytest.raises(SettingsError):
            parse_keep(text)
    with pytest.raises(SettingsError, match="more than 36,500 days; write forever"):
        parse_keep("9999999d")


def test_a_batch_that_goes_in_a_year_that_no_calendar_has_is_listed_all_the_same():
    kept = BatchOptions(keep="9999999d", remove_at=9_999_999 * 86_400)
    table = batch_table([BatchRecord(id="batch_1", created_at=1, forebay=kept)])
    assert list(table.columns[-1].cells) == ["9999-12-31 23:59:59Z"]


def test_what_is_said_of_a_batch_goes_before_what_is_configured(monkeypatch):
    assert FrontSettings().keep_s(None) is None
    monkeypatch.setenv("FOREBAY_KEEP", "7d")
    configured = front_settings()
    assert [configured.keep_s(given) for given in (None, "1d", "forever", 5)] == [604_800, 86_400, None, 5]


def test_a_configured_keeping_that_is_no_duration_is_refused(monkeypatch):
    monkeypatch.setenv("FOREBAY_KEEP", "a month")
    with pytest.raises(SettingsError, match=r"keep.*a month"):
        front_settings()


def test_keeping_may_stand_in_the_file_that_services_share(tmp_path, monkeypatch):
    file = tmp_path / "forebay.toml"
    file.write_text('keep = "30d"\n', encoding="utf-8")
    monkeypatch.setenv("FOREBAY_CONFIG", str(file))
    assert front_settings().keep_s(None) == 2_592_000


@pytest.mark.parametrize(
    "name",
    [
        "",
        "batches",
        "batch_",
        "batch_1",
        "batch_0123456789ABCDEF01234567",
        "../batch_0123456789abcdef01234567",
        "batch_0123456789abcdef01234567\n",
        "batch_0123456789abcdef012345678",
    ],
)
def test_no_other_name_is_taken_for_a_batch_s(name):
    assert not is_batch_id(name)


def test_a_batch_s_name_is_known():
    assert is_batch_id(new_batch_id(random.Random(1)))
