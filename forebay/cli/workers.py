"""The commands about the fleet: ``forebay workers add/list/show/drain/remove/open/reset/loads``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from forebay.cli import shapes
from forebay.cli.options import Json, Redis, duration, open_client, print_json
from forebay.cli.tables import cell, fleet_table, print_table
from forebay.fleet import DRAIN_S, OPEN_S
from workers.fleet import WorkerView
from workers.load import Load
from workers.store import Memo

if TYPE_CHECKING:
    from monitor.sweep import Swept

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Register, look at and take away workers.",
)

Name = Annotated[str, typer.Argument(metavar="WORKER", help="The worker's URL or id.")]

_MOMENTS = frozenset(
    {
        "since",
        "limit_since",
        "until",
        "deferred_until",
        "drain_until",
        "open_until",
        "sampled_at",
        "received_at",
    }
)
_SHOWN_LOAD = ("running", "waiting", "kv_usage_max", "used_tokens", "gen_throughput")


@app.command()
def add(
    url: Annotated[str, typer.Argument(metavar="URL", help="Base URL of an inference server.")],
    redis: Redis = None,
    runtime: Annotated[
        str | None, typer.Option(metavar="NAME", help="What it runs, as vllm or sglang. Default: detected.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Model that it serves; repeat it. Default: what it says."),
    ] = None,
    weight: Annotated[float, typer.Option(help="Static preference, above 0; 1 is usual.")] = 1.0,
    api_key_env: Annotated[
        str | None,
        typer.Option(metavar="VARIABLE", help="Variable with its key, in the services' environment."),
    ] = None,
    api_key_file: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Or the file with its key, on the services' machines."),
    ] = None,
    max_running: Annotated[
        int | None, typer.Option(min=1, help="Requests that it runs at once. Default: learned.")
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Begin a new life even if nothing has changed.")
    ] = False,
    json: Json = False,
) -> None:
    """Register a worker. The same again changes nothing."""
    with open_client(redis) as forebay:
        registered = forebay.workers.add(
            url,
            runtime=runtime,
            models=tuple(model or ()),
            weight=weight,
            api_key_env=api_key_env,
            api_key_file=api_key_file,
            max_running=max_running,
            replace=replace,
        )
    if json:
        print_json(
            {
                "id": registered.worker_id,
                "incarnation": registered.incarnation,
                "outcome": registered.outcome,
            }
        )
    else:
        typer.echo(f"{registered.worker_id}: {registered.outcome}, incarnation {registered.incarnation}")


@app.command("list")
def list_(redis: Redis = None, json: Json = False) -> None:
    """List all workers with their loads."""
    with open_client(redis) as forebay:
        view = forebay.workers.view()
        memos = forebay.workers.memos() if json else {}
    if json:
        print_json([shapes.worker(worker, memos.get(worker.id)) for worker in view.workers])
    elif view.workers:
        print_table(fleet_table(view.workers, view.now_s))
    else:
        typer.echo("no workers; see: forebay workers add")


@app.command()
def show(name: Name, redis: Redis = None, json: Json = False) -> None:
    """Show all that is known of a worker, and why it stands as it does."""
    with open_client(redis) as forebay:
        fleet = forebay.workers.view()
        view = forebay.workers.show(name)
        memo = forebay.workers.memos().get(view.id)
    if json:
        print_json(shapes.worker(view, memo))
    else:
        print_table(_details(view, memo, now_s=fleet.now_s))


@app.command()
def drain(
    name: Name,
    redis: Redis = None,
    deadline: Annotated[
        float, duration("--deadline", "After so long it goes even if it is not idle.")
    ] = DRAIN_S,
    json: Json = False,
) -> None:
    """Give a worker no new requests; it is removed when it is idle."""
    with open_client(redis) as forebay:
        forebay.workers.drain(name, deadline_s=deadline)
        identity = forebay.workers.show(name).id
    _done(identity, "draining", json=json)


@app.command()
def remove(name: Name, redis: Redis = None, json: Json = False) -> None:
    """Forget a worker at once: what it answers is called off and sent elsewhere; drain lets it finish."""
    with open_client(redis) as forebay:
        identity = forebay.workers.show(name).id
        forebay.workers.remove(name)
    _done(identity, "removed", json=json)


@app.command("open")
def open_breaker(
    name: Name,
    redis: Redis = None,
    seconds: Annotated[float, duration("--for", "How long; then one request is let through.")] = OPEN_S,
    json: Json = False,
) -> None:
    """Open a worker's circuit breaker by hand: no new requests; what it is answering is answered still."""
    with open_client(redis) as forebay:
        forebay.workers.open(name, seconds=seconds)
        identity = forebay.workers.show(name).id
    _done(identity, "open", json=json)


@app.command()
def reset(name: Name, redis: Redis = None, json: Json = False) -> None:
    """Close a worker's circuit breaker by hand, and look for its /v1/loads anew."""
    with open_client(redis) as forebay:
        forebay.workers.reset(name)
        identity = forebay.workers.show(name).id
    _done(identity, "reset", json=json)


@app.command()
def loads(redis: Redis = None, json: Json = False) -> None:
    """Ask every worker for its load now. What a worker does not say is shown as -1."""
    with open_client(redis) as forebay:
        swept = forebay.workers.loads()
    if json:
        print_json([_as_json(one) for one in swept])
    else:
        print_table(_loads_table(swept))


def _done(identity: str, outcome: str, *, json: bool) -> None:
    if json:
        print_json({"id": identity, "outcome": outcome})
    else:
        typer.echo(f"{identity}: {outcome}")


def _as_json(one: Swept) -> dict[str, Any]:
    shown = {"load": _requests(one.load), **{name: getattr(one.load, name, None) for name in _SHOWN_LOAD}}
    return {
        "id": one.worker,
        "source": one.load.source if one.load else "none",
        "reason": one.reason,
        **{name: -1 if value is None else value for name, value in shown.items()},
    }


def _requests(load: Load | None) -> int | None:
    """All requests that the worker has; None when it did not say what runs and waits."""
    if load is None or load.running is None or load.waiting is None:
        return None
    return load.running + load.waiting


def _loads_table(swept: Sequence[Swept]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("worker", no_wrap=True)
    table.add_column("source")
    for name in ("load", *_SHOWN_LOAD):
        table.add_column(name.replace("_", " "), justify="right")
    table.add_column("reason", overflow="fold")
    for one in swept:
        row = _as_json(one)
        numbers = [f"{row[name]:g}" for name in ("load", *_SHOWN_LOAD)]
        table.add_row(cell(one.worker), row["source"], *numbers, cell(one.reason))
    return table


def _details(view: WorkerView, memo: Memo | None, *, now_s: float) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in _flat(shapes.worker(view, memo)):
        moment = name.rpartition(".")[2] in _MOMENTS and value is not None
        table.add_row(cell(name, "bold"), cell(_distance(value, now_s) if moment else _spelled(value)))
    return table


def _flat(shape: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in shape.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{name}.")
        else:
            rows.append((prefix + name, value))
    return rows


def _distance(moment_s: float, now_s: float) -> str:
    """How far off a moment is, for people; their clocks need not agree with Redis'."""
    seconds = round(moment_s - now_s)
    return f"in {seconds} s" if seconds > 0 else f"{-seconds} s ago"


def _spelled(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None or value == "" else str(value)
