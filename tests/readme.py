"""Commands of a page's code blocks, with the names of the page replaced by those of a test."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Step:
    """One command: the variables before it, its words, whether it goes on beside the others."""

    words: tuple[str, ...]
    behind: bool

    def __str__(self) -> str:
        return shlex.join(self.words)


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a language, in their order."""
    return re.findall(rf"(?s)```{language}\n(.*?)```", page.read_text(encoding="utf-8"))


def steps(shell: str, names: Mapping[str, str]) -> Iterator[Step]:
    """The commands of a piece of shell, one a line, with every name replaced by what stands for it."""
    for line in shell.replace("\\\n", " ").splitlines():
        told = line
        for name, meant in names.items():
            told = told.replace(name, meant)
        words = shlex.split(told, comments=True)
        behind = words[-1:] == ["&"]
        if words:
            yield Step(tuple(words[:-1] if behind else words), behind)
