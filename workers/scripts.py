"""Loads the Lua steps of a package: one file, one atomic step; ``*.inc.lua`` are shared.

What a step includes stands beside it, or here.
"""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

from workers.connection import AsyncRedis, translated

_INCLUDE = re.compile(r"^-- include (\w+)$", re.MULTILINE)


def source(name: str, package: str = "workers") -> str:
    """The whole text of a step, with its included parts in place."""
    text = (resources.files(package) / "lua" / f"{name}.lua").read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda match: _part(match[1], package), text)


def _part(name: str, package: str) -> str:
    beside = resources.files(package) / "lua" / f"{name}.inc.lua"
    shared = resources.files("workers") / "lua" / f"{name}.inc.lua"
    return (beside if beside.is_file() else shared).read_text(encoding="utf-8")


class Scripts:
    """The steps of one package, registered on one client and called by name."""

    def __init__(self, client: AsyncRedis, package: str = "workers") -> None:
        self._client = client
        self._package = package
        self._steps: dict[str, Any] = {}

    async def run(self, name: str, keys: list[str], args: list[str | int | float | bytes]) -> Any:
        """Run one step. Raises StoreUnavailable when Redis does not answer."""
        step = self._steps.get(name)
        if step is None:
            step = self._steps[name] = self._client.register_script(source(name, self._package))
        with translated():
            return await step(keys=keys, args=args)
