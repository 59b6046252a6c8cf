"""The command ``run``: flags to ``RunSettings``, a watcher for whoever looks, an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dispatcher.batches.record import BatchStatus
from forebay.cli import summary
from forebay.cli.events import EventWatcher
from forebay.cli.failures import ExitCode, complain, ended
from forebay.cli.live import LiveWatcher
from forebay.cli.options import (
    BadLines,
    BadLinesOption,
    HedgeOption,
    Json,
    KeepOption,
    NoDetail,
    Order,
    OrderOption,
    ShareOption,
    StrategyOption,
    duration,
    print_json,
)
from forebay.cli.plain import PlainWatcher
from forebay.cli.quiet import QuietWatcher
from forebay.fleet import worker_spec
from forebay.results import errors_path
from forebay.run import Outcome, Watcher
from forebay.run import run as run_file
from forebay.run_settings import RunSettings
from forebay.settings import front_settings
from forebay.submission import DAY_S, Options
from workers.errors import SettingsError


def run(
    input: Annotated[  # noqa: A002 - the flag's name in the help
        Path,
        typer.Argument(metavar="IN.jsonl", help="Batch file: one request a line, as for OpenAI's Batch API."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="Where the results go.")
    ],
    worker: Annotated[
        list[str] | None,
        typer.Option("--worker", "-w", metavar="URL", help="An inference server; repeat it."),
    ] = None,
    errors: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Where failed lines go. Default: OUT.errors.jsonl, if there are any."
        ),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            "--redis",
            metavar="URL",
            help="Use this Redis. Default: $FOREBAY_REDIS_URL, else an embedded one. Monitors that run there "
            "watch the workers; there is none: one is started for the run.",
        ),
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            "--storage",
            metavar="URL",
            help="Where the batch's files are. Default: $FOREBAY_STORAGE, else OUT.jsonl.forebay/.",
        ),
    ] = None,
    queue: Annotated[
        str | None, typer.Option(metavar="NAME", help="Queue for this run. Default: one of its own.")
    ] = None,
    dispatchers: Annotated[
        int, typer.Option(min=1, max=64, help="How many dispatchers to start; one feeds a large fleet.")
    ] = 1,
    runtime: Annotated[
        str | None, typer.Option(metavar="NAME", help="What all workers run, as vllm. Default: detected.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Model that all workers serve; repeat it. Default: what they say."),
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="Environment variable with the key of all workers.")
    ] = None,
    api_key_file: Annotated[
        str | None, typer.Option(metavar="PATH", help="Or the file with the key of all workers.")
    ] = None,
    bad_lines: BadLinesOption = BadLines.FAIL,
    order: OrderOption = Order.INPUT,
    no_detail: NoDetail = False,
    strategy: StrategyOption = None,
    hedge: HedgeOption = None,
    share: ShareOption = 1.0,
    window: Annotated[float, duration("--window", "Time to the deadline, after which lines expire.")] = DAY_S,
    keep: KeepOption = None,
    wait_ready: Annotated[
        float, duration("--wait-ready", "How long to wait for the first ready worker.")
    ] = 60.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace output files that exist.")] = False,
    restart: Annotated[
        bool, typer.Option("--restart", help="Forget what an interrupted run left, and begin anew.")
    ] = False,
    keep_state: Annotated[
        bool, typer.Option("--keep-state", help="Keep OUT.jsonl.forebay/ (plan, parts, logs) when done.")
    ] = False,
    explain: Annotated[
        Path | None,
        typer.Option(
            "--explain",
            metavar="FILE",
            help="Write there why each request went where it went, for `forebay explain ID --from FILE`.",
        ),
    ] = None,
    json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")] = False,
    fleet_capacity: Annotated[float | None, typer.Option(hidden=True, min=0.001)] = None,
) -> None:
    """Run a batch file through a fleet of workers, from start to end, on this machine.

    It starts a Redis (unless one is given), a monitor and a dispatcher, shows how far it is, writes the
    results, and leaves nothing running. Interrupted or killed, the same command takes it up again.

    Exit codes: 0 every line completed; 1 finished, some lines failed; 2 bad usage or input; 3 cancelled,
    expired or interrupted; 4 it cannot work here (no Redis, no worker ready, a service that ended, a
    batch that failed).
    """
    redis_url = redis or os.environ.get("FOREBAY_REDIS_URL") or None
    storage = storage or os.environ.get("FOREBAY_STORAGE") or None
    front = front_settings()
    stays = redis_url is not None and storage is not None
    if keep is not None and not stays:
        raise SettingsError(
            "--keep goes with --redis and --storage: else nothing stays when the run has ended"
        )
    settings = RunSettings(
        input=input,
        output=output,
        errors=errors or errors_path(output),
        workers=tuple(
            worker_spec(
                url,
                runtime=runtime,
                models=tuple(model or ()),
                api_key_env=api_key_env,
                api_key_file=api_key_file,
            )
            for url in worker or ()
        ),
        redis_url=redis_url,
        storage=storage,
        queue=queue,
        dispatchers=dispatchers,
        options=Options(
            bad_lines=bad_lines.value,
            order=order.value,
            detail=not no_detail,
            strategy=strategy,
            hedge=hedge,
            share=share,
            window_s=window,
            keep_s=front.keep_s(keep) if stays else None,
        ),
        wait_ready_s=wait_ready,
        overwrite=overwrite,
        restart=restart,
        keep_state=keep_state,
        explain=explain,
        limits=front.input,
    )
    raise typer.Exit(execute(settings, json=json, quiet=quiet, known_tokens_per_s=fleet_capacity))


def execute(
    settings: RunSettings,
    *,
    json: bool = False,
    quiet: bool = False,
    known_tokens_per_s: float | None = None,
    between: Callable[[Watcher], Watcher] = lambda looking: looking,
) -> ExitCode:
    """Run it for whoever looks, and say how it ended. `between` may stand between the run and who looks."""
    with closing(between(watcher(json=json, quiet=quiet))) as looking:
        try:
            outcome = run_file(settings, looking)
        except KeyboardInterrupt:
            complain("stopped before anything was sent")
            return ExitCode.STOPPED
    if json:
        _print_events(outcome)
    elif not quiet and not outcome.interrupted:
        summary.show(Console(), outcome, known_tokens_per_s=known_tokens_per_s)
    if outcome.interrupted:
        counts = outcome.record.request_counts
        complain(
            f"stopped; at least {counts.completed + counts.failed:,} of {counts.total:,} lines have their "
            f"results kept; {_again(settings)}"
        )
        return ExitCode.STOPPED
    if outcome.record.status is not BatchStatus.COMPLETED:
        complain(f"the batch {outcome.record.status}; lines without an answer are among the failed ones")
    return ended(outcome.record)


def watcher(*, json: bool, quiet: bool) -> Watcher:
    """Who looks: a program, nobody, a person at a terminal, or a log. People are served on standard error."""
    if json:
        return EventWatcher()
    if quiet:
        return QuietWatcher()
    if sys.stderr.isatty():
        return LiveWatcher(Console(stderr=True))
    return PlainWatcher(lambda line: typer.echo(line, err=True))


def _again(settings: RunSettings) -> str:
    return f"run the same command again to resume (what is needed stands in {settings.output}.forebay/)"


def _print_events(outcome: Outcome) -> None:
    """The last event, and the line that says it all."""
    saved = outcome.saved
    print_json({"event": "interrupted" if saved is None else "finished", "batch_id": outcome.record.id})
    print_json(
        {
            "batch_id": outcome.record.id,
            "status": outcome.record.status,
            "request_counts": outcome.record.request_counts.model_dump(),
            "output": str(saved.output) if saved and saved.output else None,
            "errors": str(saved.errors) if saved and saved.errors else None,
            "elapsed_s": round(outcome.elapsed_s, 3),
        }
    )
