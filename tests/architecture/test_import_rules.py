"""Who may import whom: the contracts in pyproject.toml hold, and are about the modules that they claim."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.checkout import ROOT, docstring, dotted, modules

CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
    "contracts"
]
PURE = sorted(
    module
    for contract in CONTRACTS
    if contract["name"].startswith("Pure")
    for module in contract["source_modules"]
)


def is_pure(module: str) -> bool:
    return any(module == pure or module.startswith(f"{pure}.") for pure in PURE)


def test_every_import_contract_holds():
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [linter, "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in done.stdout


def test_whoever_calls_itself_pure_is_held_to_it():
    said = {dotted(path) for path in modules() if re.search(r"(?<!\S)Pure[.:]", docstring(path))}
    assert said, "no module says that it is pure"
    unheld = {module for module in said if not is_pure(module)}
    assert unheld == set(), "name them in the contract on pure modules, in pyproject.toml"


@pytest.mark.parametrize("path", [path for path in modules() if is_pure(dotted(path))], ids=dotted)
def test_a_pure_module_draws_no_chance_of_its_own(path: Path):
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    drawn = [
        f"line {node.lineno}: random.{node.func.attr}"
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "random"
        and (node.func.attr != "Random" or not node.args)
    ]
    assert not drawn or "random" not in imported  # else it is an argument of that name


def test_the_services_named_in_queued_jobs_stand_where_the_jobs_say():
    from dispatcher import jobs

    for path in (jobs.RUN_SHARD, jobs.RUN_REQUEST, jobs.FINALISE_BATCH):
        module, _, function = path.rpartition(".")
        assert module == jobs.__name__
        assert callable(getattr(jobs, function))
