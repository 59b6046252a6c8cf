"""What one look at Redis brings, made into views of workers; what cannot be read is left out, and said once.

Redis is open to people, to other programs and to other versions of ours: one record that somebody spoiled
must not hide the others. How Redis is looked at is ``store``'s subject, what a view means ``fleet``'s.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec
import structlog
from pydantic import ValidationError

from workers.breaker import BreakerState
from workers.evidence import NONE, Evidence
from workers.fleet import WorkerState, WorkerView
from workers.load import Load
from workers.settings import explain
from workers.spec import Runtime

log = structlog.get_logger()

_UNREADABLE = (KeyError, ValueError, msgspec.MsgspecError)
"""What a field that is not there, or holds something else than it should, makes of the reading."""


class ViewReader:
    """Reads entries as ``fleet.lua`` answers them, and remembers what it read: most stay as they are."""

    def __init__(self) -> None:
        self._loads: dict[str, tuple[list[str], Load | None]] = {}
        self._seen: dict[str, tuple[list[object], WorkerView | None]] = {}
        self._complaints: dict[tuple[str, str], str] = {}
        """By worker and record, why it could not be read when that was last said."""

    def read(self, worker: str, entry: list[object]) -> WorkerView | None:
        """The worker; None when its record cannot be read. A load that cannot be read is unknown."""
        # Building a view costs more than comparing.
        seen = self._seen.get(worker)
        if seen is None or seen[0] != entry:
            seen = self._seen[worker] = (entry, self._to_worker(worker, entry))
        return seen[1]

    def keep_only(self, workers: Collection[str]) -> None:
        """Forget all others."""
        self._loads = {worker: seen for worker, seen in self._loads.items() if worker in workers}
        self._seen = {worker: seen for worker, seen in self._seen.items() if worker in workers}
        self._complaints = {about: why for about, why in self._complaints.items() if about[0] in workers}

    def _to_worker(self, worker: str, entry: Sequence[object]) -> WorkerView | None:
        load = self._to_load(worker, entry[1])
        try:
            return _view(worker, entry, load)
        except _UNREADABLE as error:
            self._complain(worker, "record", error)
            return None

    def _to_load(self, worker: str, flat: object) -> Load | None:
        # A load is read many times between two samples: validate it once.
        fields = _list(flat)
        seen = self._loads.get(worker)
        if seen is None or seen[0] != fields:
            seen = self._loads[worker] = (fields, self._validated(worker, fields))
        return seen[1]

    def _validated(self, worker: str, fields: list[str]) -> Load | None:
        try:
            return Load.from_hash(_fields(fields))
        except ValidationError as error:
            self._complain(worker, "load", error)
            return None

    def _complain(self, worker: str, record: str, error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, ValidationError):
            why = str(explain(error))
        if self._complaints.get((worker, record)) != why:
            self._complaints[worker, record] = why
            log.warning("cannot read what stands of a worker", worker=worker, record=record, error=why)


def _view(worker: str, entry: Sequence[object], load: Load | None) -> WorkerView:
    record, limit, breaker, deferral = (_fields(entry[i]) for i in (0, 2, 3, 4))
    given_models = _unpacked(record.get("given_models", ""))
    runtime = record.get("given_runtime") or record.get("runtime")
    return WorkerView(
        id=worker,
        url=record["url"],
        runtime=Runtime(runtime) if runtime else None,
        runtime_given=bool(record.get("given_runtime")),
        state=WorkerState(record["state"]),
        incarnation=int(record["incarnation"]),
        incarnation_reason=record.get("incarnation_reason", ""),
        models_given=bool(given_models),
        models=frozenset(given_models or _unpacked(record.get("models", ""))),
        max_model_len=_int(record.get("max_model_len")),
        max_running=_int(record.get("max_running")),
        weight=finite(record.get("weight", "1")),
        api_key_env=record.get("api_key_env") or None,
        api_key_file=record.get("api_key_file") or None,
        origin=record.get("origin", ""),
        version=record.get("version"),
        load=load,
        limit=int(limit.get("value", "1")),
        limit_reason=limit.get("reason", ""),
        limit_since=finite(limit.get("since", "0")),
        limit_version=int(limit.get("version", "0")),
        evidence=_evidence(limit),
        leases=_count(entry[5]),
        leases_since_sample=_count(entry[6]),
        tokens_since_sample=_count(entry[7]),
        breaker=BreakerState(breaker.get("state", "closed")),
        breaker_open_until=finite(breaker.get("open_until", "0")),
        breaker_reason=breaker.get("reason", ""),
        breaker_trips=int(breaker.get("trips", "0")),
        deferred_until=finite(deferral.get("until", "0")),
        reason=record.get("reason", ""),
        since=finite(record.get("since", "0")),
        drain_until=finite(record["drain_until"]) if "drain_until" in record else None,
    )


def _evidence(limit: Mapping[str, str]) -> Evidence:
    try:
        return Evidence(
            answers=int(limit["answers"]),
            tokens=int(limit["answer_tokens"]),
            seconds=int(limit["answer_ms"]) / 1000,
            leases=int(limit["answer_leases"]),
        )
    except (KeyError, ValueError):  # there is none, or what somebody spoiled: it shows nothing
        return NONE


def _unpacked(text: str) -> list[str]:
    return msgspec.json.decode(text, type=list[str]) if text else []


def _list(flat: object) -> list[str]:
    if flat == {}:  # how Lua encodes an empty list
        return []
    assert isinstance(flat, list)
    return flat


def _fields(flat: object) -> dict[str, str]:
    items = _list(flat)
    return dict(zip(items[::2], items[1::2], strict=True))


def _int(text: str | None) -> int | None:
    return int(text) if text else None


def finite(text: str) -> float:
    """A number; neither a stamp nor a weight can be infinite, or none at all."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


def _count(value: object) -> int:
    return int(str(value))
