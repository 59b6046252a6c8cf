"""What a person is told when something goes wrong, and the exit code that a script gets.

Never a traceback for a mistake that could be foreseen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import typer

from dispatcher.batches.errors import BatchError, InvalidNameError, StorageUrlError
from dispatcher.batches.record import BatchRecord, BatchStatus
from forebay.errors import RefusedInput
from workers.errors import ForebayError, GiveUp
from workers.legible import legible, legible_lines

_LISTED = 20


class ExitCode(IntEnum):
    """How a command ended, for scripts."""

    OK = 0
    LINES_FAILED = 1
    """It finished; some lines, or the one request that was waited for, have no good answer."""
    BAD_INPUT = 2
    """Usage or input: a person has to change what was asked."""
    STOPPED = 3
    """Cancelled, expired, or interrupted."""
    CANNOT_WORK = 4
    """The surroundings: no Redis, no worker, a service that ended, a full queue or disk; or time is over."""


@contextmanager
def reported() -> Iterator[None]:
    """Turn what is raised on purpose into a message on standard error and an exit code."""
    try:
        yield
    except BrokenPipeError:  # whoever read our output has enough; the library ends us without a word
        raise
    except (ForebayError, BatchError, OSError) as error:
        complain(said(error))
        raise typer.Exit(exit_code(error)) from error
    except KeyboardInterrupt:
        complain("interrupted")
        raise typer.Exit(ExitCode.STOPPED) from None
    except Exception as error:
        if not _from_redis(error):
            raise
        complain(f"Redis refused: {error}")
        raise typer.Exit(ExitCode.CANNOT_WORK) from error


def complain(text: str) -> None:
    """Say it on standard error."""
    typer.echo(f"forebay: {legible_lines(text)}", err=True)


def _from_redis(error: Exception) -> bool:
    """Whether it is a refusal that no patience mends, such as a missing permission.

    Such errors come through as the library raises them, and the library stands behind `workers.connection`.
    """
    return type(error).__module__.split(".")[0] == "redis"


def exit_code(error: BaseException) -> ExitCode:
    """The exit code that an error stands for."""
    match error:
        case GiveUp() | StorageUrlError() | InvalidNameError():
            return ExitCode.BAD_INPUT
        case FileNotFoundError() | IsADirectoryError() | NotADirectoryError() | PermissionError():
            return ExitCode.BAD_INPUT
        case _:
            return ExitCode.CANNOT_WORK


def said(error: BaseException) -> str:
    """What went wrong, for a person."""
    match error:
        case RefusedInput():
            return "\n".join([str(error), *_bad_lines(error)])
        case OSError() if error.filename is not None:
            return f"{error.filename}: {error.strerror}"
        case _:
            return str(error)


def _bad_lines(error: RefusedInput) -> list[str]:
    listed = error.intake.bad_lines[:_LISTED]
    lines = [f"  line {bad.number}: {legible(bad.message)} ({bad.code})" for bad in listed]
    if error.intake.refused > len(listed):
        lines.append(f"  ... and {error.intake.refused - len(listed)} more")
    if error.intake.accepted and listed:
        lines.append("mend them, or let the good lines run with --bad-lines skip")
    return lines


def ended(record: BatchRecord) -> ExitCode:
    """The exit code that an ended batch stands for."""
    match record.status:
        case BatchStatus.COMPLETED:
            return ExitCode.LINES_FAILED if record.request_counts.failed else ExitCode.OK
        case BatchStatus.FAILED:
            return ExitCode.CANNOT_WORK
        case _:
            return ExitCode.STOPPED
