"""Where a monitor's settings come from, the mappings among them, and that mistakes are told."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from monitor.gauges.contract import Field, MissingMetricsError
from monitor.gauges.mappings import DEFAULTS, mapping_for
from monitor.gauges.page import PageReader
from monitor.settings import MonitorSettings
from workers.errors import SettingsError
from workers.settings import explain
from workers.spec import Runtime

Config = Callable[[str], None]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Write ``forebay.toml``; no variable of the surroundings counts."""
    for name in os.environ:
        if name.startswith("FOREBAY_"):
            monkeypatch.delenv(name)
    path = tmp_path / "forebay.toml"
    monkeypatch.setenv("FOREBAY_CONFIG", str(path))

    def write(text: str) -> None:
        path.write_text(text, encoding="utf-8")

    return write


def test_a_flag_beats_a_variable_and_a_variable_beats_the_file(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    config(
        'redis_url = "redis://file"\nlog_level = "debug"\n'
        "[monitor]\npoll_interval_s = 7\nstall_after_s = 7\nmemo_ttl_s = 7\n"
    )
    monkeypatch.setenv("FOREBAY_STALL_AFTER_S", "8")
    monkeypatch.setenv("FOREBAY_MEMO_TTL_S", "8")
    settings = MonitorSettings(memo_ttl_s=9)
    assert (settings.redis_url, settings.log_level) == ("redis://file", "debug")
    assert (settings.poll_interval_s, settings.stall_after_s, settings.memo_ttl_s) == (7, 8, 9)


@pytest.mark.parametrize("text", ["[[monitor]]\nheartbeat_s = 1\n", "dispatcher = 3\n"])
def test_a_service_has_one_table(config: Config, text: str) -> None:
    config(text)
    with pytest.raises(SettingsError, match=r"is a table; write \[(monitor|dispatcher)\], with one bracket"):
        MonitorSettings()


def test_a_file_that_the_environment_names_must_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_CONFIG", str(tmp_path / "forbay.toml"))
    with pytest.raises(SettingsError, match=r"forbay\.toml: there is no such file, which FOREBAY_CONFIG"):
        MonitorSettings()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[monitor]\ncolour = 1\n", "colour"),
        ("[monitor]\npoll_interval_s = 0\n", "poll_interval_s"),
        ('[monitor]\nshare = "some"\n', "share"),
        ("[monitor.mappings.vllm]\ncolour = 1\n", "colour"),
        ('[monitor.mappings.vllm.aliases]\nrunnin = ["x"]\n', "runnin"),
        ('[monitor.mappings.vllm]\npath = "metrics"\n', "path"),
        ('[monitor.mappings.vlm]\npath = "/metrics"\n', "'vlm' is no runtime and no worker"),
    ],
)
def test_a_wrong_key_or_value_is_named(config: Config, text: str, named: str) -> None:
    config(text)
    with pytest.raises(ValidationError) as wrong:
        MonitorSettings()
    assert named in str(explain(wrong.value))


def test_a_partial_override_of_a_runtime_keeps_the_rest_of_its_default(config: Config) -> None:
    config('[monitor.mappings.vllm.aliases]\nrunning = ["acme:running"]\n')
    found = mapping_for(Runtime.VLLM, "h:1", MonitorSettings().mappings)
    assert found.aliases[Field.RUNNING] == ("acme:running",)
    assert found.aliases[Field.WAITING] == DEFAULTS[Runtime.VLLM].aliases[Field.WAITING]
    assert (found.path, found.mandatory) == ("/metrics", DEFAULTS[Runtime.VLLM].mandatory)


@pytest.mark.parametrize("name", ["h:1", "http://H:1/v1/", "h:1/v1"])
def test_a_workers_override_stands_above_its_runtimes_whatever_its_url_is_spelt_like(
    config: Config, name: str
) -> None:
    config(
        '[monitor.mappings.vllm.aliases]\nrunning = ["of:runtime"]\nwaiting = ["of:runtime"]\n'
        f'[monitor.mappings."{name}"]\npath = "/internal"\naliases = {{ running = ["of:worker"] }}\n'
    )
    mappings = MonitorSettings().mappings
    own, other = (mapping_for(Runtime.VLLM, worker, mappings) for worker in ("h:1", "h:2"))
    assert (own.path, own.aliases[Field.RUNNING], own.aliases[Field.WAITING]) == (
        "/internal",
        ("of:worker",),
        ("of:runtime",),
    )
    assert (other.path, other.aliases[Field.RUNNING]) == ("/metrics", ("of:runtime",))


def test_a_metric_that_an_override_names_is_as_mandatory_as_the_one_it_replaces(config: Config) -> None:
    config('[monitor.mappings.vllm.aliases]\nrunning = ["acme:running"]\nkv_usage = []\n')
    reader = PageReader(mapping_for(Runtime.VLLM, "h:1", MonitorSettings().mappings))
    with pytest.raises(MissingMetricsError) as missing:
        reader.read("vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n")
    assert missing.value.names == ("acme:running",)
    assert set(reader.read("acme:running 1\nvllm:num_requests_waiting 0\n").used) == {
        Field.RUNNING,
        Field.WAITING,
    }


def test_a_generic_worker_has_gauges_as_soon_as_somebody_names_them(config: Config) -> None:
    config('[monitor.mappings.generic.aliases]\nrunning = ["acme:running"]\n')
    found = mapping_for(Runtime.GENERIC, "h:1", MonitorSettings().mappings)
    assert (found.path, found.aliases) == ("/metrics", {Field.RUNNING: ("acme:running",)})
