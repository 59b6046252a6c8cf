"""Where a dispatcher's settings come from, and that mistakes in them are told."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from dispatcher.settings import DispatcherSettings
from workers.errors import SettingsError
from workers.settings import explain


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Write `forebay.toml`; no variable of the surroundings counts."""
    import os

    for name in os.environ:
        if name.startswith("FOREBAY_"):
            monkeypatch.delenv(name)
    path = tmp_path / "forebay.toml"
    path.touch()
    monkeypatch.setenv("FOREBAY_CONFIG", str(path))

    def write(text):
        path.write_text(text, encoding="utf-8")

    return write


def test_without_a_word_everything_has_a_default(config):
    settings = DispatcherSettings()
    assert settings.queues == ("high", "default", "low")
    assert settings.redis_url == "redis://127.0.0.1:6379/0"
    assert settings.storage.endswith("forebay")


def test_every_dispatcher_has_a_name_of_its_own(config):
    assert DispatcherSettings().name != DispatcherSettings().name


def test_a_flag_beats_a_variable_and_a_variable_beats_the_file(config, monkeypatch):
    config('redis_url = "redis://file"\n[dispatcher]\npart_lines = 1\nwatch_interval_s = 7\n')
    monkeypatch.setenv("FOREBAY_PART_LINES", "2")
    monkeypatch.setenv("FOREBAY_LEASE_TTL_S", "30")
    settings = DispatcherSettings(lease_ttl_s=40)
    assert (settings.redis_url, settings.watch_interval_s) == ("redis://file", 7)
    assert (settings.part_lines, settings.lease_ttl_s) == (2, 40)


def test_a_variable_may_say_that_there_is_none_of_what_the_file_says(config, monkeypatch):
    config("[dispatcher]\nmetrics_port = 9101\n")
    assert DispatcherSettings().metrics_port == 9101
    monkeypatch.setenv("FOREBAY_METRICS_PORT", "none")
    assert DispatcherSettings().metrics_port is None


def test_tables_within_may_be_set_by_variable_and_file(config, monkeypatch):
    config("[dispatcher.breaker]\nfailure_threshold = 9\n[dispatcher.scheduler]\nkv_ceiling = 0.5\n")
    monkeypatch.setenv("FOREBAY_RETRY__MAX_ATTEMPTS", "2")
    settings = DispatcherSettings()
    assert (settings.breaker.failure_threshold, settings.scheduler.kv_ceiling) == (9, 0.5)
    assert settings.retry.max_attempts == 2


@pytest.mark.parametrize(
    "text",
    [
        "[dispatcher]\ncolour = 1\n",
        "[dispatcher.breaker]\ncolour = 1\n",
        "[dispatcher.scheduler.strategies.mine]\nweights = {colour = 1}\n",
        "[dispatcher]\nqueues = []\n",
        "[dispatcher]\nlease_ttl_s = 0\n",
    ],
)
def test_a_wrong_key_or_value_of_the_table_is_named(config, text):
    config(text)
    with pytest.raises(ValidationError) as wrong:
        DispatcherSettings()
    assert any(word in str(explain(wrong.value)) for word in ("colour", "queues", "lease_ttl_s"))


@pytest.mark.parametrize("text", ["colour = 1\n", "[dispatchr]\n", "not toml"])
def test_a_wrong_file_is_a_settings_error(config, text):
    config(text)
    with pytest.raises(SettingsError, match=r"forebay\.toml"):
        DispatcherSettings()


def test_settings_cannot_be_changed(config):
    settings = DispatcherSettings()
    with pytest.raises(ValidationError):
        settings.part_lines = 3
