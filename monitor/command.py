"""The command ``monitor``: flags laid over ``FOREBAY_...`` variables, and the process they start.

What a setting means belongs to ``settings``; wiring to ``process``.
"""

from typing import Annotated, Any, Literal

import typer
import uvloop
from pydantic import ValidationError

from monitor.process import run
from monitor.settings import MonitorSettings
from workers import logs
from workers.errors import SettingsError
from workers.limits import Share


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
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(help="What to log.")
    ] = "info",
    log_form: Annotated[Literal["text", "json"], typer.Option(help="How to log.")] = "text",
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
    }
    logs.configure(level=log_level, form=log_form)
    try:
        settings = MonitorSettings(**{flag: value for flag, value in flags.items() if value is not None})
        uvloop.run(run(settings))
    except (ValidationError, SettingsError) as error:
        typer.echo(_complaint(error), err=True)
        raise typer.Exit(2) from None


def _complaint(error: ValidationError | SettingsError) -> str:
    if isinstance(error, SettingsError):
        return str(error)
    # The values are left out: one of them may be a URL with a password.
    return "\n".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
