"""The commands about batches on a Redis that others share: submit, wait, status, results, batches, cancel."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.table import Table

from dispatcher.batches.errors import UnreadableRecordError
from dispatcher.batches.record import BatchRecord
from forebay.cli.failures import ExitCode, complain, ended
from forebay.cli.options import (
    BadLines,
    BadLinesOption,
    BatchId,
    HedgeOption,
    Json,
    KeepOption,
    NoDetail,
    Order,
    OrderOption,
    Queue,
    Redis,
    ShareOption,
    Storage,
    StrategyOption,
    duration,
    open_client,
    print_json,
)
from forebay.cli.run import watcher
from forebay.cli.tables import cell, print_table
from forebay.submission import DAY_S

_LAST_S = datetime.max.replace(microsecond=0, tzinfo=UTC).timestamp()


def submit(
    input: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="Batch file.")],  # noqa: A002 - see its help
    redis: Redis = None,
    storage: Storage = None,
    queue: Queue = "default",
    bad_lines: BadLinesOption = BadLines.FAIL,
    order: OrderOption = Order.INPUT,
    no_detail: NoDetail = False,
    strategy: StrategyOption = None,
    hedge: HedgeOption = None,
    share: ShareOption = 1.0,
    window: Annotated[float, duration("--window", "Time to the deadline, after which lines expire.")] = DAY_S,
    keep: KeepOption = None,
    json: Json = False,
) -> None:
    """Check a batch file and queue it; prints the batch with its id.

    A file with bad lines is refused, with their numbers and reasons, and exit code 2; one for which the queue
    has no room (most_queued_requests) with exit code 4.
    """
    with open_client(redis, storage) as forebay:
        record = forebay.submit(
            input,
            queue=queue,
            bad_lines=bad_lines.value,
            order=order.value,
            detail=not no_detail,
            strategy=strategy,
            hedge=hedge,
            share=share,
            window=window,
            keep=keep,
        )
    print_record(record, json=json)


def wait(
    batch_id: BatchId,
    redis: Redis = None,
    timeout: Annotated[float | None, duration("--timeout", "How long to wait. Default: to the end.")] = None,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Wait until a batch has ended, and show how far it is.

    Exit codes: 0 every line completed; 1 some lines failed; 3 cancelled or expired; 4 still not ended after
    --timeout. The batch itself goes on whatever happens to this command.
    """
    with open_client(redis) as forebay, closing(watcher(json=json, quiet=quiet)) as looking:
        record = forebay.wait(batch_id, looking.progress, timeout_s=timeout)
    print_record(record, json=json)
    raise typer.Exit(ended(record))


def status(
    batch_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="The batch's id. Default: the newest batch.")
    ] = None,
    redis: Redis = None,
    json: Json = False,
) -> None:
    """Show how a batch stands."""
    with open_client(redis) as forebay:
        if batch_id is not None:
            record = forebay.status(batch_id)
        else:
            newest = forebay.batches(limit=1, on_unreadable=_refuse)
            if not newest:
                complain("there are no batches; see: forebay submit")
                raise typer.Exit(ExitCode.BAD_INPUT)
            [record] = newest
    print_record(record, json=json)


def results(
    batch_id: BatchId,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="Where the results go.")
    ],
    errors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where failed lines go. Default: OUT.errors.jsonl, if there are any."
        ),
    ] = None,
    redis: Redis = None,
    storage: Storage = None,
    json: Json = False,
) -> None:
    """Save a batch's results; of a batch that still runs, those that are durable so far.

    Existing files are replaced, each at once. A file that would be empty is not made.
    """
    with open_client(redis, storage) as forebay:
        record = forebay.status(batch_id)
        saved = forebay.save_results(batch_id, output, errors)
    if json:
        print_json(
            {
                "batch_id": record.id,
                "status": record.status,
                "output": str(saved.output) if saved.output else None,
                "errors": str(saved.errors) if saved.errors else None,
            }
        )
        return
    so_far = "" if record.status.final else " (so far: the batch has not ended)"
    typer.echo(f"results: {saved.output or 'none'}{so_far}", err=True)  # the results may go to the output
    if saved.errors:
        typer.echo(f"failed lines: {saved.errors}", err=True)


def batches(
    redis: Redis = None,
    limit: Annotated[int, typer.Option(min=1, help="How many to list.")] = 20,
    json: Json = False,
) -> None:
    """List the newest batches, newest first."""
    with open_client(redis) as forebay:
        found = forebay.batches(limit, on_unreadable=lambda error: complain(str(error)))
    if json:
        print_json([record.model_dump(mode="json") for record in found])
        return
    print_table(batch_table(found))


def cancel(batch_id: BatchId, redis: Redis = None, json: Json = False) -> None:
    """Ask for a batch's end. Answers that are there are kept; the other lines become batch_cancelled.

    A batch that has ended already stays as it is.
    """
    with open_client(redis) as forebay:
        record = forebay.cancel(batch_id)
    print_record(record, json=json)


def print_record(record: BatchRecord, *, json: bool) -> None:
    """The batch as JSON, either way: on one line for programs, indented and without nulls for people."""
    print_json(record.model_dump(mode="json", exclude_none=not json), indented=not json)


def batch_table(records: list[BatchRecord]) -> Table:
    """Batches, one a line."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("batch", no_wrap=True)
    for title in ("input", "status", "created"):
        table.add_column(title, overflow="fold")
    for title in ("lines", "done", "failed"):
        table.add_column(title, justify="right")
    table.add_column("kept until")
    for record in records:
        counts = record.request_counts
        table.add_row(
            cell(record.id),
            cell((record.metadata or {}).get("input_name", "-")),
            record.status,
            _date(record.created_at),
            f"{counts.total:,}",
            f"{counts.completed:,}",
            f"{counts.failed:,}",
            _kept(record),
        )
    return table


def _kept(record: BatchRecord) -> str:
    """Until when it is kept; before its end, for how long after that."""
    options = record.forebay
    if options.remove_at is not None:
        return _date(options.remove_at)
    return "forever" if options.keep is None else f"{options.keep} after its end"


def _refuse(error: UnreadableRecordError) -> NoReturn:
    raise error


def _date(stamp: float) -> str:
    """The moment, or the last one of the calendar: whoever writes to Redis may write any number."""
    return datetime.fromtimestamp(min(stamp, _LAST_S), UTC).strftime("%Y-%m-%d %H:%M:%SZ")
