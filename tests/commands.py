"""Whether a `forebay ...` command in a document is one: its names and flags parse. Nothing is run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from typer.testing import CliRunner

from forebay.cli.main import app


def complaint(words: Sequence[str]) -> str | None:
    """What the command line says against the words after `forebay`; None when it takes them."""
    asked = CliRunner().invoke(app, [*words, "--help"])
    return None if asked.exit_code == 0 else asked.output or repr(asked.exception)


def in_shell(text: str) -> Iterator[list[str]]:
    """The words after `forebay` of every command in a piece of shell, continuation lines joined."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and ("=" in words[0] and not words[0].startswith("-")):
            words = words[1:]  # a variable set for this command
        if words and words[0] == "forebay":
            end = next((i for i, word in enumerate(words) if word in {"|", "&", "&&", ">", "||"}), None)
            yield words[1:end]
