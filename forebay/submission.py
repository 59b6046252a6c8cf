"""How a file becomes a running batch: files first, then the ledger, then the queue.

Each step makes durable what the next one announces, and each may be repeated: whoever died in between is
repaired by running the same step again. What a line must look like is ``dispatcher.batches``' subject.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import BinaryIO, Literal

from anyio import to_thread
from pydantic import ValidationError

from dispatcher import queues
from dispatcher.batches.errors import DamagedFileError, StorageError
from dispatcher.batches.intake import Intake, Limits, take_in
from dispatcher.batches.ledger import Ledger
from dispatcher.batches.plan import Plan, open_plan
from dispatcher.batches.record import (
    BatchOptions,
    BatchRecord,
    BatchStatus,
    RequestCounts,
    new_batch_id,
)
from dispatcher.batches.retention import KEEP_FIELD
from dispatcher.batches.storage import INPUT, RECORD, BatchFiles, Storage
from forebay.durations import parse_duration, spell_duration
from forebay.errors import RefusedInput
from forebay.strategies import check_strategy
from workers.connection import SyncRedis
from workers.errors import SettingsError
from workers.legible import legible
from workers.settings import explain

DAY_S = 86_400.0
_HEDGE = {None: "", False: "0", True: "1"}
_TIMES = frozenset(BatchRecord.model_fields)
USUAL_SLOTS = 64
"""Requests at once that a plan is cut for while nothing is known of the fleet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a person may say of a batch. ``window_s``: seconds from now to its deadline.

    ``strategy`` and ``hedge`` None: as the dispatcher is set. ``share``: how much of the fleet the batch gets
    beside others of its queue, in proportion to theirs; above 0. ``keep_s``: seconds from its end to the
    removal of its files and keys; None: they stay until somebody removes them.
    """

    queue: str = "default"
    bad_lines: Literal["fail", "skip"] = "fail"
    order: Literal["input", "completed"] = "input"
    detail: bool = True
    strategy: str | None = None
    hedge: bool | None = None
    share: float = 1.0
    priority: int = 0
    window_s: float = DAY_S
    keep_s: float | None = None
    metadata: Mapping[str, str] | None = None


def prepare(
    storage: Storage,
    source: BinaryIO,
    *,
    name: str,
    options: Options,
    now_s: float,
    slots: int = USUAL_SLOTS,
    batch_id: str | None = None,
    limits: Limits | None = None,
    mean_answers: Mapping[str, float] | None = None,
) -> BatchRecord:
    """Store, check and plan a file under a new id; ``name`` is what people call it, as text or not. Blocks.

    ``mean_answers``: how many tokens answers get without a ceiling, by model, as far as it is known.

    Raises SettingsError for a strategy that is not known here, an impossible share or metadata that is no
    text, RefusedInput, then nothing is left behind, and StorageError.
    """
    check_strategy(options.strategy)
    if not 0 < options.share < math.inf:
        raise SettingsError(f"a share is a number above 0, not {options.share:g}")
    name = legible(name)  # a file's may hold bytes that are no UTF-8, which no record can
    files = storage.files(batch_id or new_batch_id(random.SystemRandom()))
    intake = take_in(
        source,
        files,
        bad_lines=options.bad_lines,
        limits=limits or Limits(),
        slots=slots,
        mean_completion_tokens=mean_answers or {},
    )
    if intake.plan is None:
        raise RefusedInput(name, intake)
    try:
        with _refusals():
            record = _record(files, name, options, intake, intake.plan, now_s, slots)
            written = record.to_json()
        files.write(RECORD, written)
    except BaseException:
        with suppress(StorageError):  # what went wrong first is what matters
            files.remove_all()
        raise
    return record


@contextmanager
def _refusals() -> Iterator[None]:
    """What cannot stand in a record was said by whoever submits."""
    try:
        yield
    except ValidationError as error:
        raise explain(error) from error
    except ValueError as error:  # pydantic's, when it writes: a lone surrogate passes for a string
        raise SettingsError(f"not all that is said of the batch is text: {error}") from error


def _record(
    files: BatchFiles, name: str, options: Options, intake: Intake, plan: Plan, now_s: float, slots: int
) -> BatchRecord:
    models = plan.models
    return BatchRecord(
        id=files.batch_id,
        model=models[0] if len(models) == 1 else None,
        errors=intake.errors(),
        input_file_id=files.file_id(INPUT),
        completion_window=spell_duration(options.window_s),
        created_at=int(now_s),
        expires_at=int(now_s + options.window_s),
        request_counts=RequestCounts(total=intake.total, failed=intake.refused),
        metadata={"input_name": name, **(options.metadata or {})},
        forebay=BatchOptions(
            queue=options.queue,
            priority=options.priority,
            bad_lines=options.bad_lines,
            order=options.order,
            detail=options.detail,
            strategy=options.strategy,
            hedge=options.hedge,
            share=options.share,
            keep=None if options.keep_s is None else spell_duration(options.keep_s),
            slots=slots,
            shards=plan.shard_count,
        ),
    )


def read_record(files: BatchFiles) -> BatchRecord:
    """The record as it was when the batch was prepared, or ended. Blocks.

    Raises StorageMissingError, StorageError, DamagedFileError.
    """
    written = files.read(RECORD)
    try:
        return BatchRecord.from_json(written)
    except ValidationError as error:
        raise DamagedFileError(f"{RECORD} of {files.batch_id} is no record: {explain(error)}") from error


def _extend(files: BatchFiles, expires_at: int) -> None:
    record = read_record(files).model_copy(update={"expires_at": expires_at})
    files.write(RECORD, record.to_json())


async def publish(
    ledger: Ledger, connection: SyncRedis, files: BatchFiles, *, window_s: float | None = None
) -> str:
    """Make a prepared batch known and queue what is left of it; returns the status that stands then.

    Repeating it changes nothing; after a crash, or with an empty Redis, it repairs. ``window_s`` gives a
    batch that Redis does not know a new deadline, so many seconds from now; None leaves it. Raises
    StoreUnavailable, StorageError, DamagedFileError.
    """
    if window_s is not None and await ledger.entry(files.batch_id) is None:
        await to_thread.run_sync(_extend, files, int(await ledger.now() + window_s))
    record = await to_thread.run_sync(read_record, files)
    plan = await to_thread.run_sync(open_plan, files)
    await ledger.open(record.id, float(record.created_at), _opening_fields(record, plan))
    status = await ledger.move(record.id, BatchStatus.IN_PROGRESS, among=[BatchStatus.VALIDATING])
    if status == BatchStatus.IN_PROGRESS:
        done = await ledger.shards_done(record.id)
        await to_thread.run_sync(_queue, connection, record, plan.shard_count, done)
    return status


def _as_opened(record: BatchRecord, plan: Plan) -> BatchRecord:
    """The record without what befell the batch since: its file may be of a batch that has ended already."""
    befallen = dict.fromkeys(f"{status}_at" for status in BatchStatus if f"{status}_at" in _TIMES)
    counts = RequestCounts(total=plan.total + plan.refused, failed=plan.refused)
    return record.model_copy(
        update={"status": BatchStatus.VALIDATING, "request_counts": counts, "usage": None, **befallen}
    )


def _opening_fields(record: BatchRecord, plan: Plan) -> dict[str, str]:
    opened = _as_opened(record, plan)
    counts = opened.request_counts
    return {
        "record": opened.to_json().decode(),
        "status": BatchStatus.VALIDATING.value,
        "total": str(counts.total),
        "completed": "0",
        "failed": str(counts.failed),
        "prompt_tokens": "0",
        "completion_tokens": "0",
        "cost_total": str(plan.cost_total),
        "cost_done": "0",
        "shards": str(plan.shard_count),
        "shards_done": "0",
        "queue": record.forebay.queue,
        "created_at": str(record.created_at),
        "expires_at": str(record.expires_at),
        "order": record.forebay.order,
        "input_name": (record.metadata or {}).get("input_name", ""),
        "detail": "1" if record.forebay.detail else "0",
        "strategy": record.forebay.strategy or "",
        "hedge": _HEDGE[record.forebay.hedge],
        "share": f"{record.forebay.share:g}",
        "shard_costs": ",".join(f"{first}:{cost}" for first, cost in plan.cost_steps),
        KEEP_FIELD: _keep_s(record.forebay.keep),
    }


def _keep_s(keep: str | None) -> str:
    return "" if keep is None else f"{parse_duration(keep):g}"


def ended_fields(record: BatchRecord, plan: Plan) -> dict[str, str]:
    """What is written of a batch that had ended when Redis lost it; ``record`` is as it was at the end."""
    counts = record.request_counts
    moves = {f"{status}_at": getattr(record, f"{status}_at", None) for status in BatchStatus}
    return {
        **_opening_fields(record, plan),
        "status": record.status.value,
        "completed": str(counts.completed),
        "failed": str(counts.failed),
        "prompt_tokens": str(record.usage.input_tokens if record.usage else 0),
        "completion_tokens": str(record.usage.output_tokens if record.usage else 0),
        "cost_done": str(plan.cost_total),
        "shards_done": str(plan.shard_count),
        "output_file_id": record.output_file_id or "",
        "error_file_id": record.error_file_id or "",
        **{name: str(stamp) for name, stamp in moves.items() if stamp is not None},
    }


def _queue(connection: SyncRedis, record: BatchRecord, shards: int, done: set[int]) -> None:
    left = [shard for shard in range(shards) if shard not in done]
    if left:
        queues.enqueue_shards(connection, record.forebay.queue, record.id, left)
    else:
        # Whoever finished the last shard died before it queued the finaliser.
        queues.enqueue_finalise(connection, record.forebay.queue, record.id)
