"""A run as a picture that is redrawn in place, for a person at a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from dispatcher.batches.record import BatchRecord
from forebay.cli.plain import begun, trouble_line, unserved_line
from forebay.cli.tables import fleet_table, percent, rate
from forebay.durations import clock
from forebay.progress import Progress
from workers.fleet import WorkerView

_BAR_WIDTH = 40


class LiveWatcher:
    """Owns the lower part of the terminal until it is closed."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def close(self) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        self._console.print(Text(text, style="yellow"))

    def started(self, record: BatchRecord, *, resumed: bool) -> None:
        self._console.print(Text(begun(record, resumed=resumed)))
        self._live.update(Spinner("dots", "starting the services"))

    def waiting(self, workers: Sequence[WorkerView]) -> None:
        self._live.update(Group(Spinner("dots", "waiting for a worker to be ready"), fleet_table(workers)))

    def progress(self, seen: Progress) -> None:
        self._live.update(picture(seen))


def picture(seen: Progress) -> RenderableType:
    """One look at a batch: the bar, the numbers, a line for each worker."""
    bar = Table.grid(padding=(0, 1))
    bar.add_row(
        ProgressBar(total=max(1, seen.total), completed=seen.done, width=_BAR_WIDTH),
        Text(f"{percent(seen.done / seen.total) if seen.total else '-'}%", style="bold"),
        Text(f"{seen.done:,}/{seen.total:,}"),
        Text(f"{rate(seen.tokens_per_s)} tokens/s"),
        Text(clock(seen.elapsed_s)),
        Text("left -" if seen.eta_s is None else f"left {clock(seen.eta_s)}"),
    )
    counts = Text.assemble(
        (f"{seen.completed:,} done", "green"),
        "  ",
        (f"{seen.failed:,} failed", "red" if seen.failed else ""),
        f"  {seen.in_flight} in flight  {seen.status}",
    )
    trouble = [Text(trouble_line(seen.trouble).strip(), style="yellow")] if seen.trouble else []
    unserved = [Text(unserved_line(seen), style="yellow")] if seen.unserved else []
    return Group(bar, counts, *trouble, *unserved, Text(), fleet_table(seen.workers))
