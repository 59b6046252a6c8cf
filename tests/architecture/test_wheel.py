"""What is built for users holds what runs: all rooms, their Lua steps, type markers, the command."""

from __future__ import annotations

import configparser
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from tests.checkout import ROOMS, ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    [built] = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return zipfile.ZipFile(Path(built))


def test_the_wheel_holds_every_module_step_and_type_marker(wheel: zipfile.ZipFile):
    wanted = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in {".py", ".lua"} or path.name == "py.typed"
    }
    assert {f"{room}/py.typed" for room in ROOMS} <= wanted
    assert wanted - set(wheel.namelist()) == set()


def test_the_wheel_holds_nothing_but_the_rooms_and_its_own_data(wheel: zipfile.ZipFile):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(ROOMS)


def test_the_wheel_installs_the_command_and_the_licence(wheel: zipfile.ZipFile):
    [points] = [name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt")]
    parser = configparser.ConfigParser()
    parser.read_string(wheel.read(points).decode())
    assert dict(parser["console_scripts"]) == {"forebay": "forebay.cli.main:main"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())
