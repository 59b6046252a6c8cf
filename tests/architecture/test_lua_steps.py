"""Every Lua file says in its header what it does, with which keys and arguments, and what it returns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.checkout import ROOMS, ROOT
from workers.scripts import source

STEPS = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.lua"))
WHOLE = [path for path in STEPS if not path.name.endswith(".inc.lua")]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def header(path: Path) -> list[str]:
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").strip())
    return lines


def test_there_are_steps_in_both_rooms_that_talk_to_redis():
    assert {path.relative_to(ROOT).parts[0] for path in WHOLE} == {"workers", "dispatcher"}


@pytest.mark.parametrize("path", STEPS, ids=named)
def test_a_step_says_first_what_it_does(path: Path):
    assert header(path), "it has no header"
    assert re.match(r"[A-Z].*[.:,;a-z]$", header(path)[0])


@pytest.mark.parametrize("path", WHOLE, ids=named)
def test_a_step_lists_keys_arguments_and_answer_in_its_header(path: Path):
    body = path.read_text(encoding="utf-8")
    found = [line.split()[0] for line in header(path) if line]
    wanted = ["KEYS", *(["ARGV"] if "ARGV[" in body else []), "return"]
    assert [word for word in found if word in {"KEYS", "ARGV", "return"}] == wanted


@pytest.mark.parametrize("path", WHOLE, ids=named)
def test_a_step_takes_every_key_from_its_caller(path: Path):
    # A key spelled or built inside a script is unknown to clusters, ACLs and whoever reads the code.
    text = source(path.stem, path.relative_to(ROOT).parts[0])
    assert "forebay:" not in text
    calls = re.findall(r"redis\.call\(\s*'(\w+)'\s*,?\s*([^,)]*)", text)
    literal = [(command, key) for command, key in calls if command != "TIME" and key.startswith(("'", '"'))]
    assert literal == []
