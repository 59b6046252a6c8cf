"""Why a request went where it went, for people and programs: chosen among decision records, read from a file.

What a record is stands in ``dispatcher.records``; how it looks in ``forebay.cli.explain``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from dispatcher.records import DecisionRecord
from forebay.errors import NotRecorded
from forebay.results import lines_of, written_whole
from workers.errors import SettingsError


@dataclass(frozen=True, slots=True)
class Explained:
    """One request's recorded attempts, at least one, oldest first.

    ``also_in``: other batches that have records of a line with that custom_id.
    """

    attempts: tuple[DecisionRecord, ...]
    also_in: tuple[str, ...] = ()


def newest(found: Sequence[Sequence[DecisionRecord]], name: str) -> Explained:
    """The first of the requests that a name may mean. Raises NotRecorded when there is none."""
    if not found:
        raise NotRecorded(
            f"no decision is recorded for {name}: there is no such request, it was not sent yet, it was not "
            "in the sample (explain_sample), or its records have gone (explain_keep, explain_ttl_s)"
        )
    first, *others = found
    also_in = dict.fromkeys(records[0].batch_id for records in others)
    return Explained(tuple(first), tuple(batch for batch in also_in if batch is not None))


def find(records: Iterable[DecisionRecord], name: str, batch_id: str | None = None) -> Explained:
    """The attempts of the newest request of that id or custom_id among records. Raises NotRecorded."""
    by_request: dict[str, list[DecisionRecord]] = {}
    for record in records:
        if name in (record.request_id, record.custom_id) and batch_id in (None, record.batch_id):
            by_request.setdefault(record.request_id, []).append(record)
    found = [sorted(attempts, key=_end) for attempts in by_request.values()]
    return newest(sorted(found, key=lambda attempts: -_end(attempts[-1])), name)


def write(records: Iterable[DecisionRecord], path: Path) -> None:
    """Write records as JSON Lines; the file appears whole or not at all. Raises OSError."""
    with written_whole(path) as sink:
        for record in records:
            sink.write(record.model_dump_json().encode() + b"\n")


def read(path: Path) -> Iterable[DecisionRecord]:
    """Read what ``write`` wrote. Raises OSError, and SettingsError for a file that holds something else."""
    for number, line in enumerate(lines_of(path), 1):
        try:
            yield DecisionRecord.model_validate_json(line)
        except ValidationError as error:
            raise SettingsError(f"{path}, line {number}: that is no decision record") from error


def _end(record: DecisionRecord) -> float:
    return record.at + record.elapsed_s
