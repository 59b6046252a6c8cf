"""docs/operations.md lists every setting of every service, with the default that it has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import msgspec
import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from dispatcher.settings import DispatcherSettings
from forebay.settings import FrontSettings
from monitor.settings import MonitorSettings
from tests.checkout import ROOT, code_of, rows

PAGE = ROOT / "docs" / "operations.md"
SERVICES = {"Front door": FrontSettings, "Monitor": MonitorSettings, "Dispatcher": DispatcherSettings}


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Names and defaults; None where there is no plain one."""
    for name, field in model.model_fields.items():
        if isinstance(field.default, BaseModel):
            yield from settings_of(type(field.default), f"{prefix}{name}.")
        else:
            yield prefix + name, None if field.default is PydanticUndefined else field.default


def spelled(default: object) -> str:
    match default:
        case Enum():
            return str(default.value)
        case tuple():
            return msgspec.json.encode(default).decode()
        case _:
            return str(default)


@pytest.mark.parametrize("heading", SERVICES)
def test_every_setting_stands_there_once_in_the_order_of_the_code(heading: str):
    written = [code_of(row[0])[0] for row in rows(PAGE, below=heading)]
    assert written == [name for name, _ in settings_of(SERVICES[heading])]


@pytest.mark.parametrize("heading", SERVICES)
def test_every_default_stands_there(heading: str):
    written = {code_of(name)[0]: default for name, default, _ in rows(PAGE, below=heading)}
    wrong = {
        name: (written.get(name), default)
        for name, default in settings_of(SERVICES[heading])
        if default is not None and written.get(name) != f"`{spelled(default)}`"
    }
    assert wrong == {}


@pytest.mark.parametrize("heading", SERVICES)
def test_every_setting_is_explained(heading: str):
    assert [name for name, _, meaning in rows(PAGE, below=heading) if not meaning] == []


def test_the_file_that_it_shows_is_one_that_services_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = PAGE.read_text(encoding="utf-8")
    [shown] = re.findall(r"(?s)```toml\n(.*?)```", text)
    file = tmp_path / "forebay.toml"
    file.write_text(shown, encoding="utf-8")
    monkeypatch.setenv("FOREBAY_CONFIG", str(file))
    monkeypatch.setenv("FOREBAY_RETRY__MAX_ATTEMPTS", "8")
    monkeypatch.setenv("FOREBAY_QUEUES", '["high","default"]')
    made = DispatcherSettings()
    assert (made.storage, made.drain_timeout_s) == ("/srv/forebay", 60.0)
    assert made.scheduler.strategies["interactive"].picker == "p2c"
    assert made.retry.max_attempts == 8
    assert made.queues == ("high", "default")
    assert FrontSettings().storage == "/srv/forebay"
