"""The command that brings batches back of which Redis lost something."""

from __future__ import annotations

from typing import Annotated

import typer

from dispatcher.batches.errors import DamagedFileError
from forebay.cli.batches import batch_table, print_record
from forebay.cli.failures import complain
from forebay.cli.options import Json, Redis, Storage, duration, open_client, print_json
from forebay.cli.tables import print_table
from forebay.client import Forebay
from forebay.recovery import Resumed


def resume(
    batch_id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="The batch's id. Default: list the batches that Redis lost."),
    ] = None,
    redis: Redis = None,
    storage: Storage = None,
    window: Annotated[
        float | None,
        duration("--window", "A new deadline for a batch that Redis lost. Default: the old one."),
    ] = None,
    json: Json = False,
) -> None:
    """Bring back a batch that Redis lost, from its files; lines that have results are not sent again.

    For a Redis that was emptied, or that lost some jobs in a failover. A batch of which nothing is missing
    stays as it is. Workers that Redis lost too have to be registered again.
    """
    with open_client(redis, storage) as forebay:
        if batch_id is None:
            _list(forebay, json=json)
            return
        resumed = forebay.resume(batch_id, window=window)
    for note in notes(resumed, window=window is not None):
        complain(note)
    print_record(resumed.record, json=json)


def notes(resumed: Resumed, *, window: bool) -> list[str]:
    """What a person should know of what was done. ``window``: a new deadline was asked for."""
    record = resumed.record
    said = [_done(resumed)]
    if resumed.known and window and not record.status.final:
        said.append("its deadline stays: only a batch that Redis does not know gets a new one")
    if not record.status.final and not resumed.workers:
        said.append(
            "no worker is registered, so nothing is sent: run forebay workers add URL, or start a monitor "
            "with [[worker]] tables in forebay.toml"
        )
    return said


def _done(resumed: Resumed) -> str:
    record, jobs = resumed.record, _jobs(resumed.queued)
    match resumed.known, record.status.final:
        case True, True:
            return f"{record.id} has ended ({record.status}); there is nothing to resume"
        case False, True:
            return f"{record.id} had ended ({record.status}) and is known again: see forebay results"
        case False, False:
            return f"{record.id} is known again, {jobs} queued; lines that have results are not sent again"
        case _ if resumed.queued:
            return f"{record.id} had lost jobs; {jobs} queued again"
        case _:
            return f"{record.id} is {record.status} and nothing of it is missing"


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count:,} jobs"


def _list(forebay: Forebay, *, json: bool) -> None:
    damaged: list[DamagedFileError] = []
    records = forebay.forgotten(damaged.append)
    for error in damaged:
        complain(str(error))
    if json:
        print_json([record.model_dump(mode="json") for record in records])
    elif records:
        print_table(batch_table(records))
    elif not damaged:
        typer.echo(f"Redis knows every batch in {forebay.desk.storage.url}")
