"""What is told of one run: a line of JSON, written when the run ends, by which no run is done twice.

Belongs here: the record, its file, and the numbers made of a results file. Does not belong here: measuring
(``runs``), tables (``page``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from benchmarks.peers.systems import Case


class Tally(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a client saw of a batch. ``failures``: how many lines ended so, by status or error.

    ``refused``: lines that fit no engine and were told so, which is as it should be; they are no failures.
    ``lost`` lines have no result at all, ``doubled`` ones more than one. Latencies in seconds, of lines with
    an answer; None: there were none.
    """

    completed: int
    refused: int
    failures: dict[str, int]
    lost: int
    doubled: int
    p50_s: float | None
    p99_s: float | None

    @property
    def failed(self) -> int:
        return sum(self.failures.values()) + self.lost


class Interactive(msgspec.Struct, frozen=True):
    """The traffic beside the batch: questions begun in that time and answered, and their latencies."""

    answered: int
    failed: int
    p50_s: float | None
    p99_s: float | None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run that took place.

    ``elapsed_s``: from the start of the batch, all services up, to its results on disk. ``command_s``: what
    `forebay run` takes from its call to its end. ``cpu_s``: of everything but the engines, in that time;
    ``startup_cpu_s``: before it. ``rss_mib``: the most at once. ``asked``: by engine, each path's count.
    """

    bound_s: float
    elapsed_s: float
    cpu_s: float
    startup_cpu_s: float
    rss_mib: float
    tally: Tally
    asked: list[dict[str, int]]
    command_s: float | None = None
    interactive: Interactive | None = None

    @property
    def ratio(self) -> float:
        """Elapsed over the lower bound."""
        return self.elapsed_s / self.bound_s


class Machine(msgspec.Struct, frozen=True):
    """Where a run took place. Memory in GiB; loads are the averages of a minute, before and after the run."""

    cores: int
    memory_gib: float
    python: str
    load_before: float
    load_after: float


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Either ``measured``, or ``why`` it could not be. ``at``: when it ended (ISO 8601, UTC)."""

    case: Case
    at: str
    version: str | None
    machine: Machine
    measured: Measured | None = None
    why: str | None = None


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least that share (0 to 1) of all does not exceed; None of none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class _Response(msgspec.Struct):
    status_code: int


class _Detail(msgspec.Struct):
    latency_s: float | None = None


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: str | dict[str, str | None] | None = None
    latency_s: float | None = None
    forebay: _Detail | None = None

    @property
    def took_s(self) -> float | None:
        return self.latency_s if self.forebay is None else self.forebay.latency_s

    @property
    def ending(self) -> str:
        """Status, or the error where there was no answer."""
        if self.response is not None:
            return str(self.response.status_code)
        return str(self.error.get("code") if isinstance(self.error, dict) else self.error)


def tally(results: Sequence[bytes], wanted: Collection[str], too_long: Collection[str]) -> Tally:
    """Count result lines, ours or the client's. ``too_long``: those of ``wanted`` that fit no engine."""
    decoder = msgspec.json.Decoder(_Line)
    lines = [decoder.decode(raw) for raw in results]
    seen = Counter(line.custom_id for line in lines)
    last = {line.custom_id: line for line in lines}
    good = [line for line in last.values() if line.ending == "200"]
    refused = [line for line in last.values() if line.ending == "400" and line.custom_id in too_long]
    ended_well = {line.custom_id for line in good} | {line.custom_id for line in refused}
    latencies = [line.took_s for line in good if line.took_s is not None]
    return Tally(
        completed=len(good),
        refused=len(refused),
        failures=dict(Counter(line.ending for line in last.values() if line.custom_id not in ended_well)),
        lost=len(set(wanted) - set(seen)),
        doubled=sum(count > 1 for count in seen.values()),
        p50_s=percentile(latencies, 0.5),
        p99_s=percentile(latencies, 0.99),
    )


def during(
    answered: Sequence[tuple[float, float]], failed: int, began_s: float, ended_s: float
) -> Interactive:
    """The traffic of one stretch of Unix time."""
    latencies = [took_s for at_s, took_s in answered if began_s <= at_s <= ended_s]
    return Interactive(len(latencies), failed, percentile(latencies, 0.5), percentile(latencies, 0.99))


def read(path: Path) -> list[Record]:
    """All records of a file; none of a file that does not exist.

    A last line that was cut, by a run of us that was killed, is left out.
    """
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    decoder = msgspec.json.Decoder(Record)
    return [decoder.decode(line) for line in lines[:-1]]


def add(path: Path, record: Record) -> None:
    """Append a record, on a line of its own even where an earlier one was cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.read_bytes() if path.exists() else b""
    if not whole.endswith(b"\n"):
        path.write_bytes(whole[: whole.rfind(b"\n") + 1])
    with path.open("ab") as file:
        file.write(msgspec.json.encode(record) + b"\n")


def newest(records: Sequence[Record]) -> list[Record]:
    """Of several runs of a case the last that was measured, else the last; in the order of the cases."""
    found: dict[Case, Record] = {}
    for record in records:
        known = found.get(record.case)
        if record.measured is not None or known is None or known.measured is None:
            found[record.case] = record
    return list(found.values())


def write(path: Path, records: Sequence[Record]) -> None:
    """Write a file of records anew."""
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))


def missing(cases: Sequence[Case], records: Sequence[Record]) -> list[Case]:
    """The cases of which there is no record yet; one that could not be measured is tried again."""
    done = {record.case for record in records if record.measured is not None}
    return [case for case in cases if case not in done]
