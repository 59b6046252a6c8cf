"""The command ``monitor``: its flags, and the process they start.

What a setting means belongs to ``settings``; wiring to ``process``.
"""

from typing import Annotated, Any, Literal

import typer
import uvloop
from pydantic import ValidationError

from monitor.process import run
from monitor.settings import MonitorSettings
from workers import logs
from workers.errors import GiveUp
from workers.limits import Share
from workers.settings import explain
from workers.spec import WorkerSpec, normalise_url


def monitor(
    redis: Annotated[str | None, typer.Option(help="URL of Redis or Valkey.")] = None,
    name: Annotated[str | None, typer.Option(help="This monitor's name among others.")] = None,
    poll_interval_s: Annotated[float | None, typer.Option(help="Seconds between polls of a worker.")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve Prometheus metrics and health here; 0 takes a free port.")
    ] = None,
    metrics_host: Annotated[str | None, typer.Option(help="Address for the metrics.")] = None,
    share: Annotated[
        Share | None, typer.Option(help="all: engines are ours alone. spare: yield to other clients.")
    ] = None,
    spare_fraction: Annotated[
        float | None, typer.Option(help="Under --share spare: the part of an engine to fill, 0 to 1.")
    ] = None,
    initial_limit: Annotated[
        int | None, typer.Option(help="First limit of a worker that does not tell its slots.")
    ] = None,
    stall_after_s: Annotated[
        float | None, typer.Option(help="Seconds of work without a token that open a breaker.")
    ] = None,
    worker: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Register this worker, unless it is; repeat it."),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="What to log: debug, info, warning or error. Default: info.")
    ] = None,
    log_format: Annotated[Literal["text", "json"], typer.Option(help="How to log.")] = "text",
) -> None:
    """Watch the fleet: readiness, loads, limits, stalls. Several may run; they share the workers."""
    flags: dict[str, Any] = {
        "redis_url": redis,
        "name": name,
        "poll_interval_s": poll_interval_s,
        "metrics_port": metrics_port,
        "metrics_host": metrics_host,
        "share": share,
        "spare_fraction": spare_fraction,
        "initial_limit": initial_limit,
        "stall_after_s": stall_after_s,
        "log_level": log_level,
    }
    try:
        settings = MonitorSettings(**{flag: value for flag, value in flags.items() if value is not None})
        given = [WorkerSpec(url=normalise_url(url)) for url in worker or ()]
        logs.configure(level=settings.log_level, form=log_format)
        uvloop.run(run(settings, given))
    except (GiveUp, ValidationError) as error:
        complaint = explain(error) if isinstance(error, ValidationError) else error
        typer.echo(str(complaint), err=True)
        raise typer.Exit(2) from None
