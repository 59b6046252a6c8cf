"""Tables for people: the fleet, and who did what in a batch. Unknown is shown as ``-``, never as 0."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from forebay.tally import Share
from workers.breaker import BreakerState
from workers.fleet import WorkerState, WorkerView
from workers.legible import legible
from workers.load import LoadSource

_STATE_STYLES = {
    WorkerState.STARTING: "yellow",
    WorkerState.READY: "green",
    WorkerState.UNREADY: "red",
    WorkerState.DRAINING: "yellow",
    WorkerState.GONE: "dim",
}
_PIPE_WIDTH = 250
_BREAKER_STYLES = {BreakerState.CLOSED: "", BreakerState.OPEN: "red", BreakerState.HALF_OPEN: "yellow"}


def print_table(table: Table) -> None:
    """Print a table to standard output; into a pipe as wide as it is, so that no id is ever broken."""
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)


def cell(text: str, style: str = "") -> Text:
    """Text that others wrote, as a cell: no markup of ours, and nothing that a terminal would act on."""
    return Text(legible(text), style=style)


def dash(value: float | str | None) -> str:
    """A number or a word, ``-`` when it is unknown."""
    return "-" if value is None or value == "" else str(value)


def percent(ratio: float | None) -> str:
    """A share of one as per cent."""
    return "-" if ratio is None else f"{100 * ratio:.0f}"


def rate(value: float | None) -> str:
    """Something per second, in whole numbers."""
    return "-" if value is None else f"{value:,.0f}"


def fleet_table(workers: Sequence[WorkerView], now_s: float | None = None) -> Table:
    """One line for each worker; with Redis' clock, also how old its load is, whence, and why it is so."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("worker", no_wrap=True)
    table.add_column("runtime")
    table.add_column("state")
    for title in ("running", "waiting", "KV %", "leases", "limit"):
        table.add_column(title, justify="right")
    table.add_column("breaker")
    if now_s is not None:
        table.add_column("age", justify="right")
        table.add_column("source")
        table.add_column("why", overflow="fold")
    for worker in workers:
        table.add_row(*_standing(worker), *(() if now_s is None else _background(worker, now_s)))
    return table


def _standing(worker: WorkerView) -> tuple[str | Text, ...]:
    load = worker.load
    return (
        cell(worker.id),
        dash(worker.runtime),
        Text(worker.state, style=_STATE_STYLES[worker.state]),
        dash(load.running if load else None),
        dash(load.waiting if load else None),
        percent(load.kv_usage_max if load else None),
        str(worker.leases),
        str(worker.limit),
        Text(worker.breaker, style=_BREAKER_STYLES[worker.breaker]),
    )


def _background(worker: WorkerView, now_s: float) -> tuple[str | Text, ...]:
    load = worker.load
    return (
        "-" if load is None else f"{max(0.0, now_s - load.sampled_at):.0f} s",
        load.source if load else LoadSource.NONE,
        cell("; ".join(filter(None, (worker.reason, worker.breaker_reason)))),
    )


def share_table(shares: Mapping[str, Share]) -> Table:
    """Who answered what."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("worker", no_wrap=True)
    for title in ("requests", "share", "tokens", "mean latency"):
        table.add_column(title, justify="right")
    requests = sum(share.requests for share in shares.values())
    for worker, share in sorted(shares.items(), key=lambda item: -item[1].tokens):
        latency = share.mean_latency_s
        table.add_row(
            cell(worker),
            f"{share.requests:,}",
            f"{percent(share.requests / requests)} %",
            f"{share.tokens:,}",
            "-" if latency is None else f"{latency:.2f} s",
        )
    return table
