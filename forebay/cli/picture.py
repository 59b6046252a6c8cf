"""The progress display as a picture for documents: one look at a batch, kept as JSON, drawn as SVG.

    python -m forebay.demo --keep-look docs/progress.json
    python -m forebay.cli.picture docs/progress.json docs/progress.svg

The first records a look at a real run, the second draws it with the code that draws for terminals. Same look,
same picture.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter
from rich.console import Console

from dispatcher.batches.record import BatchRecord
from forebay.cli.live import picture
from forebay.progress import Progress
from forebay.run import Watcher
from workers.fleet import WorkerView

_WIDTH = 96
_ADAPTER = TypeAdapter(Progress)
_FETCHED_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def keep(look: Progress) -> bytes:
    """A look as JSON, for `kept`."""
    return _ADAPTER.dump_json(look, indent=2) + b"\n"


def kept(text: bytes) -> Progress:
    """The look that was kept. Raises pydantic's ValidationError for anything else."""
    return _ADAPTER.validate_json(text)


def drawn(look: Progress) -> str:
    """The display of a look as SVG. It names no font that has to be fetched."""
    console = Console(
        record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor",
        no_color=False, legacy_windows=False, _environ={},
    )  # fmt: skip
    console.print(picture(look))
    return _FETCHED_FONTS.sub("", console.export_svg(title="forebay run", unique_id="forebay"))


class HalfWay:
    """Shows a run to somebody else, and keeps the first look at which half of its lines are done."""

    def __init__(self, other: Watcher, target: Path) -> None:
        self._other = other
        self._target = target
        self._kept = False

    def note(self, text: str) -> None:
        self._other.note(text)

    def started(self, record: BatchRecord, *, resumed: bool) -> None:
        self._other.started(record, resumed=resumed)

    def waiting(self, workers: Sequence[WorkerView]) -> None:
        self._other.waiting(workers)

    def progress(self, seen: Progress) -> None:
        self._other.progress(seen)
        if not self._kept and 2 * seen.done >= seen.total:
            self._target.write_bytes(keep(seen))
            self._kept = True

    def close(self) -> None:
        self._other.close()


def draw(
    look: Annotated[Path, typer.Argument(metavar="LOOK.json", help="A look that was kept.")],
    target: Annotated[Path, typer.Argument(metavar="PICTURE.svg", help="Where the picture goes.")],
) -> None:
    """Draw a look at a run as the terminal shows it."""
    target.write_text(drawn(kept(look.read_bytes())), encoding="utf-8")


if __name__ == "__main__":
    typer.run(draw)
