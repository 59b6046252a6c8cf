"""The command `forebay dispatcher`, also `python -m dispatcher`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import structlog
import typer
import uvloop
from pydantic import ValidationError

from dispatcher.service import Dispatcher
from dispatcher.settings import DispatcherSettings
from workers import logs
from workers.errors import GiveUp
from workers.open_files import allow_open_files
from workers.settings import explain

log = structlog.get_logger(__name__)


def dispatcher(
    redis: Annotated[str | None, typer.Option(help="URL of Redis or Valkey.")] = None,
    storage: Annotated[
        str | None, typer.Option(help="Where batches' files are: a folder or s3://, gs://.")
    ] = None,
    queues: Annotated[
        str | None, typer.Option(help="Queues to serve, comma-separated, most urgent first.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="This dispatcher's name among others, unique also over restarts.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve Prometheus metrics and health here; 0 takes a free port.")
    ] = None,
    metrics_host: Annotated[str | None, typer.Option(help="Address for the metrics.")] = None,
    drain_timeout: Annotated[
        float | None, typer.Option(help="Seconds that what is in flight gets at the end.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="What to log: debug, info, warning or error. Default: info.")
    ] = None,
    log_format: Annotated[Literal["text", "json"], typer.Option(help="How to log.")] = "text",
) -> None:
    """Take jobs off queues and send their requests to workers."""
    given: dict[str, Any] = {
        "redis_url": redis,
        "storage": storage,
        "queues": tuple(part.strip() for part in queues.split(",") if part.strip()) if queues else None,
        "name": name,
        "metrics_port": metrics_port,
        "metrics_host": metrics_host,
        "drain_timeout_s": drain_timeout,
        "log_level": log_level,
    }
    try:
        settings = DispatcherSettings(**{key: value for key, value in given.items() if value is not None})
        logs.configure(level=settings.log_level, form=log_format)
        uvloop.run(_run(settings))
    except (GiveUp, ValidationError) as error:
        message = explain(error) if isinstance(error, ValidationError) else error
        typer.echo(f"forebay dispatcher: {message}", err=True)
        raise typer.Exit(2) from error


async def _run(settings: DispatcherSettings) -> None:
    allow_open_files()
    await Dispatcher(settings).run()
