"""The checkout as tests of the architecture read it: its files, its modules, its Markdown tables."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("workers", "monitor", "dispatcher", "forebay")

_CODE = re.compile(r"`([^`]+)`")


def files() -> list[Path]:
    """What git keeps, or would keep, as far as it is there."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    names = sorted({name for name in listed.stdout.decode().split("\0") if name})
    return [path for path in (ROOT / name for name in names) if path.is_file()]


def modules() -> list[Path]:
    """The source files of all rooms that hold any code."""
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) if path.stat().st_size]


def dotted(path: Path) -> str:
    """The name by which a source file is imported."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def docstring(path: Path) -> str:
    """A source file's docstring, empty when it has none."""
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def rows(page: Path, *, below: str) -> list[list[str]]:
    """The cells of the first table below a heading of a Markdown page, without its head."""
    lines = iter(page.read_text(encoding="utf-8").splitlines())
    for line in lines:
        if line.lstrip("#").strip() == below and line.startswith("#"):
            return [_cells(row) for row in _table(lines)][2:]
    raise AssertionError(f"{page.name} has no heading {below!r}")


def code_of(cell: str) -> list[str]:
    """What stands in backticks in a cell."""
    return _CODE.findall(cell)


def _table(lines: Iterator[str]) -> Iterator[str]:
    begun = False
    for line in lines:
        if line.startswith("|"):
            begun = True
            yield line
        elif begun or line.startswith("#"):
            return


def _cells(row: str) -> list[str]:
    bare = row.strip().removeprefix("|").removesuffix("|")
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", bare)]
