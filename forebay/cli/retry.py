"""The command ``retry``: the failed lines of a batch once more, as a batch of their own."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from dispatcher.batches.record import BatchRecord
from forebay.cli.batches import print_record
from forebay.cli.failures import complain, ended
from forebay.cli.options import (
    BatchId,
    HedgeOption,
    Json,
    KeepOption,
    Order,
    OtherShareOption,
    Redis,
    Storage,
    duration,
    open_client,
)
from forebay.cli.run import watcher
from forebay.client import Forebay
from forebay.results import targets
from forebay.retrying import LEFT_OUT


def retry(
    batch_id: BatchId,
    redis: Redis = None,
    storage: Storage = None,
    queue: Annotated[str | None, typer.Option(metavar="NAME", help="Another queue.")] = None,
    order: Annotated[
        Order | None, typer.Option("--order", help="Results in the order of the input, or as completed.")
    ] = None,
    strategy: Annotated[
        str | None, typer.Option("--strategy", metavar="NAME", help="Another way to choose workers.")
    ] = None,
    hedge: HedgeOption = None,
    share: OtherShareOption = None,
    window: Annotated[float | None, duration("--window", "Another time to the deadline.")] = None,
    keep: KeepOption = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the new batch has ended.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="OUT.jsonl", help="Wait, and write the new batch's results there."
        ),
    ] = None,
    errors: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where lines that failed again go. Default: OUT.errors.jsonl."),
    ] = None,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Make a new batch of only the failed lines of one that has ended, and queue it.

    Lines that were cancelled or expired are among them; lines that are no requests (invalid_line) are not.
    What is not given is as it was in the old batch, which stays as it is; so the whole answer is the output
    of both.

    Exit codes with --wait or -o: 0 every line completed; 1 some lines failed again; 3 cancelled or expired.
    """
    if errors is not None and output is None:
        raise typer.BadParameter("--errors goes with --output", param_hint="--errors")
    if output is not None:
        targets(output, errors)  # before anything is queued, and waited for
    with open_client(redis, storage) as forebay:
        record = forebay.retry(
            batch_id,
            queue=queue,
            order=None if order is None else order.value,
            strategy=strategy,
            hedge=hedge,
            share=share,
            window=window,
            keep=keep,
        )
        if left_out := (record.metadata or {}).get(LEFT_OUT):
            complain(f"{left_out} lines of {batch_id} are no requests (invalid_line) and were left out")
        if wait or output is not None:
            complain(f"{record.id} retries {record.request_counts.total:,} lines of {batch_id}")
            record = _wait(forebay, record, output, errors, json=json, quiet=quiet)
    print_record(record, json=json)
    if wait or output is not None:
        raise typer.Exit(ended(record))


def _wait(
    forebay: Forebay,
    record: BatchRecord,
    output: Path | None,
    errors: Path | None,
    *,
    json: bool,
    quiet: bool,
) -> BatchRecord:
    with closing(watcher(json=json, quiet=quiet)) as looking:
        record = forebay.wait(record.id, looking.progress)
    if output is not None:
        forebay.save_results(record.id, output, errors)
    return record
