"""The command ``forget``: take an ended batch out of Redis, and its files out of the storage."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.cli.options import BatchId, Json, Redis, Storage, open_client, print_json


def forget(
    batch_id: BatchId,
    files: Annotated[
        bool, typer.Option("--files", help="Remove its files too: input, results and all.")
    ] = False,
    redis: Redis = None,
    storage: Storage = None,
    json: Json = False,
) -> None:
    """Remove what Redis knows of a batch that has ended; with --files also its files, for good.

    Without --files it can be brought back with forebay resume. A batch that has not ended is refused: cancel
    it first. With --files so is one whose files are not in this storage.
    """
    with open_client(redis, storage) as forebay:
        forgotten = forebay.forget(batch_id, files=files)
        where = forebay.desk.storage.url
    if json:
        print_json({"batch_id": batch_id, "known": forgotten.known, "files": forgotten.files})
        return
    if forgotten.known:
        typer.echo(f"{batch_id} is forgotten")
    typer.echo(f"its files are removed from {where}" if forgotten.files else "its files were left alone")
