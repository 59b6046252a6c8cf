"""The command ``forebay``: which commands there are and where each is written.

A command's module is imported when the command is called, so that `forebay workers list` does not wait for
the imports of the services.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from forebay.cli.failures import reported

COMMANDS: Mapping[str, str] = {
    "run": "forebay.cli.run:run",
    "submit": "forebay.cli.batches:submit",
    "wait": "forebay.cli.batches:wait",
    "status": "forebay.cli.batches:status",
    "results": "forebay.cli.batches:results",
    "batches": "forebay.cli.batches:batches",
    "cancel": "forebay.cli.batches:cancel",
    "resume": "forebay.cli.resume:resume",
    "retry": "forebay.cli.retry:retry",
    "forget": "forebay.cli.forget:forget",
    "explain": "forebay.cli.explain:explain",
    "enqueue": "forebay.cli.enqueue:enqueue",
    "workers": "forebay.cli.workers:app",
    "monitor": "monitor.command:monitor",
    "dispatcher": "dispatcher.command:dispatcher",
    "simulate-engine": "forebay.simulator.command:simulate_engine",
    "simulate-policy": "forebay.cli.simulate_policy:simulate_policy",
}
"""Command to the function, or the group of commands, that it is."""


class Commands(TyperGroup):
    """The table above as a group of commands; and what goes wrong in them, as a message and an exit code."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the library's signature
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - the library's signature
        target = COMMANDS.get(cmd_name)
        return None if target is None else load(cmd_name, target)

    def invoke(self, ctx: Any) -> Any:
        with reported():
            return super().invoke(ctx)


def load(name: str, target: str) -> Any:
    """Import ``module:attribute``, a function or a group of commands, as the command ``name``."""
    module, attribute = target.split(":")
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        single = typer.Typer(add_completion=False, rich_markup_mode="markdown")
        single.command(name)(found)
        found = single
    command = typer.main.get_command(found)
    command.name = name
    return command


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"forebay {version('forebay')}")
        raise typer.Exit


@app.callback()
def _forebay(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Say which version this is."),
    ] = False,
) -> None:
    """Run batches of requests through a fleet of LLM inference servers.

    On one machine: forebay run IN.jsonl -o OUT.jsonl --worker http://HOST:PORT. With a Redis: start forebay
    monitor and forebay dispatcher, register workers, submit.

    Exit codes: 0 all well; 1 finished, and some lines failed (of enqueue --wait: anything but a success);
    2 bad usage or input; 3 cancelled, expired or interrupted; 4 it cannot work here (no Redis, no worker, a
    service that ended, a queue that is full, a batch that failed, a --timeout that passed).
    """


def main() -> None:
    """Run the command line."""
    app(prog_name="forebay")
