"""The pins are those of pyproject.toml: every requirement pinned, hashed and used, and no place named."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.checkout import ROOT, modules

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
RUN = PROJECT["project"]["dependencies"]
EXTRAS = PROJECT["project"]["optional-dependencies"]
GROUPS = PROJECT["dependency-groups"]
WANTED = {
    "build": GROUPS["build"],
    "dev": [*RUN, *EXTRAS["embedded"], *EXTRAS["s3"], *GROUPS["build"], *GROUPS["dev"][1:]],
    "run": [*RUN, *EXTRAS["embedded"], *EXTRAS["s3"]],
}
PIN = re.compile(r"^([a-z0-9-]+)(?:\[[^]]*\])?==(\S+)")


def blocks(kind: str) -> Iterator[str]:
    """The pins of a requirements file, each with its hashes and its comments."""
    text = (ROOT / "requirements" / f"{kind}.txt").read_text(encoding="utf-8")
    yield from re.split(r"\n(?=[a-z0-9])", re.sub(r"(?m)^#.*\n", "", text))


def pins(kind: str) -> dict[str, str]:
    return {match[1]: match[2] for block in blocks(kind) if (match := PIN.match(block))}


@pytest.mark.parametrize("kind", sorted(WANTED))
def test_every_requirement_is_pinned_to_a_version_that_the_project_allows(kind: str):
    pinned = pins(kind)
    for text in WANTED[kind]:
        requirement = Requirement(text)
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{text} is not in requirements/{kind}.txt: make lock"
        assert requirement.specifier.contains(version), f"{text} excludes the pinned {version}: make lock"


@pytest.mark.parametrize("kind", sorted(WANTED))
def test_no_pin_is_left_of_a_requirement_that_is_gone(kind: str):
    direct = {
        PIN.match(block)[1]  # type: ignore[index]  # every block begins with its pin
        for block in blocks(kind)
        if re.search(r"# +(via )?forebay \(pyproject", block)
    }
    assert direct == {canonicalize_name(Requirement(text).name) for text in WANTED[kind]}


@pytest.mark.parametrize("kind", sorted(WANTED))
def test_every_pin_has_hashes_and_no_file_names_a_place(kind: str):
    assert all("--hash=sha256:" in block for block in blocks(kind))
    text = (ROOT / "requirements" / f"{kind}.txt").read_text(encoding="utf-8")
    assert re.findall(r"https?://|file:|--index-url|--find-links|(?<![\w.])/\w+/", text) == []


def test_the_tools_that_build_are_among_those_that_test():
    assert GROUPS["dev"][0] == {"include-group": "build"}


@pytest.mark.parametrize("kind", ["build", "run"])
def test_what_is_tested_is_what_is_installed(kind: str):
    dev, run = pins("dev"), pins(kind)
    assert {name: (dev[name], run[name]) for name in dev.keys() & run.keys() if dev[name] != run[name]} == {}


def imported() -> set[str]:
    """The top-level names that the rooms import, ours and Python's own left out."""
    names = set()
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"workers", "monitor", "dispatcher", "forebay"}


def test_every_library_that_is_imported_is_required_and_every_required_one_imported():
    owners = packages_distributions()
    used = {canonicalize_name(owner) for name in imported() for owner in owners.get(name, [name])}
    required = {canonicalize_name(Requirement(text).name) for text in [*RUN, *EXTRAS["embedded"]]}
    assert used == required
