"""The command ``explain``: why a request went where it went, attempt by attempt, the newest last."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from dispatcher.outcome import Label
from dispatcher.records import DecisionRecord
from dispatcher.scheduler.decision import CandidateScores
from forebay import explanations
from forebay.cli.failures import complain
from forebay.cli.options import Json, Redis, open_client, print_json
from forebay.cli.tables import cell, print_table
from forebay.explanations import Explained
from workers.legible import legible

_FEW = 4
"""So many workers are named beside a count."""


def explain(
    name: Annotated[
        str,
        typer.Argument(
            metavar="CUSTOM_ID|REQUEST_ID|JOB",
            help="A line's custom_id, the id of a result, or the job of an inline request.",
        ),
    ],
    batch: Annotated[
        str | None,
        typer.Option("--batch", metavar="ID", help="The line's batch. Default: the newest with that id."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Read what `forebay run --explain FILE` wrote."),
    ] = None,
    redis: Redis = None,
    json: Json = False,
) -> None:
    """Show why a request went where it went: its last attempts, whom filters dropped, scores, outcomes.

    Failed attempts are recorded with all that follow them, good ones of large batches by a sample.
    """
    if source is not None:
        explained = explanations.find(explanations.read(source), name, batch)
    else:
        with open_client(redis) as forebay:
            explained = forebay.explain(name, batch_id=batch, on_unreadable=say_unreadable)
    if json:
        print_json(_shape(explained))
    else:
        _show(explained)


def say_unreadable(request_id: str) -> None:
    """Tell a person what is left out."""
    complain(
        f"a decision record of request {request_id} cannot be read by this version of Forebay, and is left "
        "out: a newer one may have written it"
    )


def _shape(explained: Explained) -> dict[str, Any]:
    first = explained.attempts[0]
    return {
        "request_id": first.request_id,
        "custom_id": first.custom_id,
        "batch_id": first.batch_id,
        "attempts": [record.model_dump(mode="json") for record in explained.attempts],
        "also_in": list(explained.also_in),
    }


def _show(explained: Explained) -> None:
    typer.echo(legible(_title(explained.attempts[0])))
    if explained.also_in:
        others = ", ".join(explained.also_in)
        typer.echo(legible(f"the newest; --batch chooses among others: {others}"))
    for record in explained.attempts:
        typer.echo()
        for line in _lines(record):
            typer.echo(legible(line))
        if record.candidates:
            print_table(_scores(record))


def _title(record: DecisionRecord) -> str:
    if record.batch_id is None:
        return f"inline request {record.request_id}"
    return f"line {record.custom_id} of {record.batch_id}, request {record.request_id}"


def _lines(record: DecisionRecord) -> list[str]:
    """What is told of an attempt before its scores."""
    lines = [
        f"attempt {record.attempt}: sent to {record.worker}, {_ending(record)}",
        f"  at {_moment(record.at)} by {record.dispatcher}",
        f"  {_waiting(record)}, took {record.elapsed_s:.2f} s",
    ]
    if record.beside:
        lines.append("  a second attempt beside one that ran: to the fastest free worker, nothing was scored")
        return lines
    lines.append(f"  strategy {record.strategy}, picker {record.picker}")
    lines += [f"  {_dropped(record)}"]
    if record.refusals:
        lines.append(
            "  refused just before: " + ", ".join(f"{who} ({why})" for who, why in record.refusals.items())
        )
    if record.worker != record.picked:
        lines.append(f"  picked {record.picked}, which had no room any more; the next that had some took it")
    left_out = record.candidate_count - len(record.candidates)
    if left_out:
        lines.append(f"  scored {record.candidate_count}, {left_out} worse ones are not shown")
    return lines


def _ending(record: DecisionRecord) -> str:
    told = "" if record.outcome is Label.OK else f" ({record.verdict} for the worker)"
    return f"ended {record.outcome}{told}"


def _waiting(record: DecisionRecord) -> str:
    return "did not wait" if record.waited_s is None else f"waited {record.waited_s:.2f} s"


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + "Z"


def _dropped(record: DecisionRecord) -> str:
    if not record.dropped:
        return "no filter dropped a worker"
    parts = []
    for name, dropped in record.dropped.items():
        who = f" ({', '.join(dropped.workers)})" if dropped.count <= _FEW else ""
        parts.append(f"{name} {dropped.count}{who}")
    return "dropped by filter: " + ", ".join(parts)


def _scores(record: DecisionRecord) -> Table:
    """Workers by scorers, best total first; the first line is how much each scorer counts."""
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="bold")
    table.add_column("worker", no_wrap=True)
    for scorer in ("total", *record.weights):
        table.add_column(scorer, justify="right")
    table.add_column("")
    weights = (f"{share:.2f}" for share in record.weights.values())
    table.add_row("weight", f"{sum(record.weights.values()):.2f}", *weights, "", style="dim")
    for candidate in record.candidates:
        scores = (f"{candidate.scores[scorer]:.2f}" for scorer in record.weights)
        table.add_row(
            cell(candidate.worker),
            f"{candidate.total:.3f}",
            *scores,
            _mark(record, candidate),
            style="bold" if candidate.worker == record.worker else "",
        )
    return table


def _mark(record: DecisionRecord, candidate: CandidateScores) -> str:
    marks = []
    if candidate.worker == record.picked:
        marks.append("picked")
    if candidate.worker == record.worker != record.picked:
        marks.append("taken")
    if candidate.over_kv_ceiling:
        marks.append("KV over its ceiling")
    return ("<- " + ", ".join(marks)) if marks else ""
