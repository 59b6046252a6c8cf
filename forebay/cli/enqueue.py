"""The command ``enqueue``: one inline request."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from forebay.cli.failures import ExitCode
from forebay.cli.options import Json, Queue, Redis, duration, open_client, print_json
from workers.errors import SettingsError


def enqueue(
    body: Annotated[
        str,
        typer.Argument(metavar="BODY.json", help="File with the request's JSON body; - reads it from stdin."),
    ],
    url: Annotated[
        str, typer.Option(metavar="PATH", help="Which of a worker's endpoints.")
    ] = "/v1/chat/completions",
    redis: Redis = None,
    queue: Queue = "default",
    timeout: Annotated[
        float | None, duration("--timeout", "All the time that it may take. Default: the dispatcher's.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the answer and print it.")] = False,
    json: Json = False,
) -> None:
    """Queue one request; prints its id, or with --wait the answer.

    Exit codes with --wait: 0 the worker answered with success; 1 anything else came back.
    """
    request = _read(body)
    with open_client(redis) as forebay:
        job_id = forebay.enqueue(request, url=url, queue=queue, timeout_s=timeout)
        if not wait:
            if json:
                print_json({"id": job_id})
            else:
                typer.echo(job_id)
            return
        answer = forebay.answer(job_id, queue=queue)
    print_json({"id": job_id, **msgspec.to_builtins(answer)}, indented=not json)
    raise typer.Exit(ExitCode.OK if answer.ok else ExitCode.LINES_FAILED)


def _read(name: str) -> dict[str, Any]:
    data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"{name} is not a JSON object: {error}") from error
