"""The command ``simulate-policy``: what strategies would do with a workload on a fleet, in virtual time.

Belongs here: flags, reading the batch and the policy's file, and the tables. The model is `forebay.policy`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from dispatcher.batches.intake import take_in
from dispatcher.batches.storage import Storage
from dispatcher.scheduler.strategies import DEFAULTS, SchedulerPolicy, Strategies
from dispatcher.settings import DispatcherSettings
from forebay import explanations
from forebay.cli.explain import say_unreadable
from forebay.cli.options import Json, Redis, open_client, print_json
from forebay.cli.tables import percent, print_table
from forebay.client import Forebay
from forebay.errors import RefusedInput, UnknownBatch
from forebay.policy.engine import EngineSpec
from forebay.policy.recorded import AS_RECORDED, Recorded, check_strategies, read
from forebay.policy.replay import Setup, replay
from forebay.policy.report import Report, summed_up
from forebay.policy.texts import MOST_WORKERS, Drawing, read_engines, read_lengths
from forebay.policy.workload import Workload, drawn, for_strategy, planned
from forebay.settings import front_settings
from workers.errors import SettingsError
from workers.settings import explain, read_config

_SHOWN = 12
"""Workers of which each gets a line; of more, the first ones do."""
_USUAL = "lognormal:median=128,sigma=0.8"


def simulate_policy(
    fleet: Annotated[
        list[str] | None,
        typer.Option(
            "--fleet",
            metavar="[Nx]speed=S,slots=K",
            help="N workers: tokens per second of one answer, and how many run at once; prefill=P besides, "
            "tokens per second that a prompt is read with. May be given often. Default: with --recorded or "
            "--records the workers that answered.",
        ),
    ] = None,
    batch: Annotated[
        Path | None, typer.Option("--batch", metavar="FILE", help="A batch file, planned as `submit` does.")
    ] = None,
    recorded: Annotated[
        str | None,
        typer.Option(
            "--recorded", metavar="ID|all", help="What decisions are recorded: of a batch, or all there are."
        ),
    ] = None,
    records: Annotated[
        Path | None,
        typer.Option("--records", metavar="FILE", help="The same, as `forebay run --explain FILE` wrote it."),
    ] = None,
    at_once: Annotated[
        bool, typer.Option("--at-once", help="Recorded requests all come at the start, not when they came.")
    ] = False,
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="lognormal:median=M,sigma=S,count=N,seed=N",
            help=f"Without --batch: requests made up. With it: answers' lengths drawn, not as asked for. "
            f"Also most=N, the ceiling. [{_USUAL},count=1000,seed=1]",
        ),
    ] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option("--strategy", metavar="NAME", help="May be given often. Default: the policy's default."),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option(
            "--policy",
            metavar="FILE",
            help="A forebay.toml, of which dispatcher.scheduler counts. Default: the configuration here.",
        ),
    ] = None,
    lengths_unknown: Annotated[
        bool,
        typer.Option(
            "--lengths-unknown", help="Ceilings do not foretell the lengths, which are drawn below them."
        ),
    ] = False,
    hedge: Annotated[
        bool, typer.Option("--hedge/--no-hedge", help="Second attempts on faster workers at the end.")
    ] = True,
    cold: Annotated[
        bool, typer.Option("--cold", help="Workers are new: their speeds and slots have to be learned.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of what the scheduler leaves to chance.")] = 1,
    redis: Redis = None,
    json: Json = False,
) -> None:
    """Try strategies on a model of a fleet, without one: makespan, waiting, who does what.

    The scheduler is the dispatcher's own; time is virtual, so hours pass in seconds. Same flags, same answer.
    """
    spec = _scheduler(policy)
    _check(strategy or [], spec)
    setup = Setup(
        seed=seed,
        cold=cold,
        hedge=hedge,
        stale_after_s=spec.stale_after_s,
        dead_after_s=spec.dead_after_s,
    )
    engines = _engines(fleet or [])
    names = list(dict.fromkeys(strategy or []))
    if recorded is not None or records is not None:
        if batch is not None or lengths is not None or lengths_unknown:
            raise SettingsError("recorded requests have their lengths: say no --batch and no --lengths")
        told, lines = _records(recorded, records, redis)
        engines = engines or told.fleet()
        workload = told.workload(at_once=at_once, slots=sum(engine.slots for engine in engines))
        for note in told.notes(lines, workload):
            typer.echo(note, err=True)
        reports = [told.as_it_was(workload, engines)]
        reports += _run_recorded(workload, engines, spec, setup) if not names else []
    else:
        workload = _workload(batch, lengths, engines, unknown=lengths_unknown)
        names, reports = names or [spec.default_strategy], []
    reports += [_run(name, for_strategy(workload, name), engines, spec, setup) for name in names]
    if json:
        print_json(reports)
        return
    _show(reports)


def _engines(texts: Sequence[str]) -> list[EngineSpec]:
    engines = [engine for text in texts for engine in read_engines(text)]
    if len(engines) > MOST_WORKERS:
        raise SettingsError(f"a fleet has {MOST_WORKERS:,} workers at most, not {len(engines):,}")
    return engines


def _scheduler(path: Path | None) -> SchedulerPolicy:
    try:
        if path is None:
            return DispatcherSettings().scheduler
        if not path.exists():
            raise SettingsError(f"{path}: there is no such file")
        return SchedulerPolicy.model_validate(read_config(path).get("dispatcher", {}).get("scheduler", {}))
    except ValidationError as error:
        raise explain(error) from error


def _check(names: Sequence[str], spec: SchedulerPolicy) -> None:
    known = DEFAULTS | spec.strategies
    for name in names:
        if name not in known:
            raise SettingsError(f"no strategy is named {name}; there are {', '.join(known)}")


def _workload(
    batch: Path | None, lengths: str | None, engines: Sequence[EngineSpec], *, unknown: bool
) -> Workload:
    """Of a batch file or made up. `unknown`: ceilings do not foretell the lengths."""
    if not engines:
        raise SettingsError("say which workers there are: --fleet speed=100,slots=8")
    slots = sum(engine.slots for engine in engines)
    drawing = read_lengths(lengths or _USUAL)
    if batch is not None:
        return _of_batch(batch, drawing if lengths is not None or unknown else None, slots)
    return drawn(drawing.lengths, drawing.count, Random(drawing.seed), foretold=not unknown, slots=slots)


def _of_batch(path: Path, drawing: Drawing | None, slots: int) -> Workload:
    """The file as a plan has it; the plan itself is thrown away."""
    limits = front_settings().input
    with tempfile.TemporaryDirectory(prefix="forebay-policy-") as folder, path.open("rb") as source:
        intake = take_in(
            source,
            Storage(folder).files("batch"),
            bad_lines="fail",
            limits=limits,
            slots=slots,
            mean_completion_tokens={},
        )
        if intake.plan is None:
            raise RefusedInput(path.name, intake)
        rows = [row for block in intake.plan.blocks() for row in intake.plan.requests(block)]
    if drawing is None:
        return planned(rows, None, seed=0, slots=slots)
    return planned(rows, drawing.lengths, seed=drawing.seed, slots=slots)


def _records(recorded: str | None, file: Path | None, redis: str | None) -> tuple[Recorded, int | None]:
    """What is recorded, and how many lines the batch has; None: there is no one batch."""
    if file is not None:
        return read(explanations.read(file)), None
    batch_id = None if recorded == "all" else recorded
    with open_client(redis) as forebay:
        told = read(forebay.decisions(batch_id, on_unreadable=say_unreadable))
        return told, None if batch_id is None else _lines(forebay, batch_id)


def _lines(forebay: Forebay, batch_id: str) -> int | None:
    """How many lines a batch has; None: it is gone, which its records outlive."""
    try:
        return forebay.status(batch_id).request_counts.total
    except UnknownBatch:
        return None


def _run_recorded(
    workload: Workload, engines: Sequence[EngineSpec], spec: SchedulerPolicy, setup: Setup
) -> list[Report]:
    check_strategies(workload, DEFAULTS | spec.strategies)
    return [_run(AS_RECORDED, workload, engines, spec, setup)]


def _run(
    name: str, workload: Workload, engines: Sequence[EngineSpec], spec: SchedulerPolicy, setup: Setup
) -> Report:
    return summed_up(name, workload, engines, replay(workload, engines, Strategies(spec), setup))


def _show(reports: Sequence[Report]) -> None:
    print_table(_comparison(reports))
    for report in reports:
        typer.echo(f"\n{report.strategy}:")
        print_table(_workers(report))
        typer.echo(_spread(report))


def _comparison(reports: Sequence[Report]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("strategy", no_wrap=True)
    for title in (
        "makespan", "lower bound", "over it", "waited: mean", "half", "99 %", "second attempts",
        "their tokens", "slots busy",
    ):  # fmt: skip
        table.add_column(title, justify="right")
    for report in reports:
        table.add_row(
            Text(report.strategy),
            f"{report.makespan_s:.1f} s",
            f"{report.lower_bound_s:.1f} s",
            f"{report.ratio:.3f}",
            f"{report.waited_mean_s:.1f} s",
            f"{report.waited_p50_s:.1f} s",
            f"{report.waited_p99_s:.1f} s",
            f"{report.second_attempts:,}",
            _second_tokens(report),
            f"{percent(report.busy)} %",
        )
    return table


def _second_tokens(report: Report) -> str:
    if report.second_tokens is None:
        return "unknown"
    return f"{report.second_tokens:,} ({100 * report.second_tokens / report.tokens:.1f} %)"


def _workers(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("worker", no_wrap=True)
    for title in ("speed", "slots", "requests", "share", "tokens", "share", "busy"):
        table.add_column(title, justify="right")
    for share in report.workers[:_SHOWN]:
        table.add_row(
            Text(share.worker),
            f"{share.speed:.4g}",
            str(share.slots),
            f"{share.requests:,}",
            f"{100 * share.request_share:.1f} %",
            f"{share.tokens:,}",
            f"{100 * share.token_share:.1f} %",
            f"{percent(share.busy)} %",
        )
    return table


def _spread(report: Report) -> str:
    """How unequal workers are, each measured against its own capacity."""
    busy = [share.busy for share in report.workers]
    more = len(busy) - _SHOWN
    rest = f"... and {more:,} more; " if more > 0 else ""
    return f"{rest}slots busy from {percent(min(busy))} % to {percent(max(busy))} % of the time"
