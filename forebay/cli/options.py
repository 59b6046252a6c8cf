"""Flags that several commands share, spelled and explained once."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import typer

from forebay.cli.failures import complain
from forebay.client import Forebay
from forebay.durations import parse_duration, parse_keep
from workers.errors import SettingsError
from workers.legible import legible_json

Redis = Annotated[
    str | None,
    typer.Option(
        "--redis",
        metavar="URL",
        help="Redis or Valkey: redis://, rediss://, unix:// or redis+sentinel://. "
        "Default: $FOREBAY_REDIS_URL, then forebay.toml, then localhost.",
    ),
]
Storage = Annotated[
    str | None,
    typer.Option(
        "--storage",
        metavar="URL",
        help="Where batches' files are: a folder or s3://, gs://. Default: $FOREBAY_STORAGE, "
        "then forebay.toml, then a folder below your data folder. The dispatchers must see the same.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
BatchId = Annotated[str, typer.Argument(metavar="ID", help="The batch's id.")]
Queue = Annotated[
    str, typer.Option(metavar="NAME", help="Queue of the fleet: high, default or low, or one of your own.")
]


class BadLines(StrEnum):
    """What becomes of a file with bad lines."""

    FAIL = "fail"
    SKIP = "skip"


class Order(StrEnum):
    """The order of result lines."""

    INPUT = "input"
    COMPLETED = "completed"


BadLinesOption = Annotated[
    BadLines,
    typer.Option("--bad-lines", help="fail: one bad line refuses the file. skip: the good lines run."),
]
OrderOption = Annotated[
    Order, typer.Option("--order", help="Results in the order of the input, or as they were completed.")
]
NoDetail = Annotated[
    bool,
    typer.Option("--no-detail", help="Leave out the key `forebay` (worker, attempts, times) of each result."),
]


StrategyOption = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        metavar="NAME",
        help="How workers are chosen: batch, chat, long-context, or one that is configured. "
        "Default: the dispatcher's.",
    ),
]
HedgeOption = Annotated[
    bool | None,
    typer.Option(
        "--hedge/--no-hedge",
        help="At the end, give requests on slow workers a second attempt on faster ones. "
        "Default: as the dispatcher is set.",
    ),
]


def _share(text: str | float) -> float:
    """Read a share; as a parser, typer also hands it the default."""
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        raise typer.BadParameter(f"{text} is no share: it is a number above 0, 1 unless said otherwise")
    return share


def _share_flag(text: str) -> Any:
    return typer.Option(
        "--share",
        parser=_share,
        metavar="N",
        help=f"{text} above 0; one of 2 gets twice as much as one of 1.",
    )


ShareOption = Annotated[
    float, _share_flag("How much of the fleet the batch gets beside others of its queue:")
]
OtherShareOption = Annotated[
    float | None, _share_flag("Another share of the fleet beside other batches of its queue:")
]


def _seconds(text: str | float) -> float:
    """Read a duration; as a parser, typer also hands it the default."""
    try:
        return parse_duration(str(text))
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from error


def _keep(text: str) -> str:
    """Check what is said of keeping, and hand it on as it was said."""
    try:
        parse_keep(text)
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from error
    return text


KeepOption = Annotated[
    str | None,
    typer.Option(
        "--keep",
        parser=_keep,
        metavar="DURATION",
        help="How long its files and keys stay after its end, as 30d, or forever. "
        "Default: $FOREBAY_KEEP, then forebay.toml, then forever.",
    ),
]


def duration(flag: str, text: str) -> Any:
    """A flag that takes a duration and gives seconds."""
    return typer.Option(flag, parser=_seconds, metavar="DURATION", help=f"{text} As 90s, 5m, 24h or 7d.")


def open_client(redis: str | None, storage: str | None = None) -> Forebay:
    """The client that a command works with; what is worrying about its Redis is said."""
    forebay = Forebay(redis, storage)
    if forebay.warning:
        complain(f"warning: {forebay.warning}")
    return forebay


def print_json(value: Any, *, indented: bool = False) -> None:
    """Print one JSON value: on one line, or indented for people."""
    text = msgspec.json.encode(value)
    typer.echo(legible_json(msgspec.json.format(text, indent=2 if indented else -1).decode()))
