"""The one door to Redis for batches: what is known of each, its shards' claims, how far it is.

Redis holds O(shards) of a batch: no bodies, no results. The record's meaning is `record`'s subject, its files
are `storage`'s. Every method raises StoreUnavailable when Redis does not answer.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from dispatcher.batches.ended import Ended
from dispatcher.batches.errors import UnreadableRecordError
from dispatcher.batches.poison import Past
from dispatcher.batches.record import FINAL, BatchRecord, BatchStatus, BatchUsage, RequestCounts
from dispatcher.batches.retention import ENDS, FIELDS, KEEP_FIELD, ended_at, remove_at
from workers import keys
from workers.connection import AsyncRedis, text_fields, translated
from workers.errors import Fenced
from workers.scripts import Scripts

_ENTRIES_AT_ONCE = 500
_COUNTS = ("total", "completed", "failed")
SHARDS_STAY_S = 86_400
"""From a batch's end until what is known of its shards goes, in seconds: a late report is no fenced one."""
_CALL_BYTES = 4
"""Of the word that tells one call for a claim from the next: kept for each shard, so it is short."""
_SHARD_FIELD = re.compile(r"(\w+)=(\S+)")


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to answer one shard. A later claim of the same shard fences this one.

    `past` is what befell the claims before it.
    """

    batch_id: str
    shard: int
    number: int
    past: Past = field(default_factory=Past)


@dataclass(frozen=True, slots=True)
class Tally:
    """How far a shard is, in absolute numbers: lines, tokens that engines counted, planned cost in tokens."""

    completed: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """What a progress report learns of the batch."""

    shards_done: int
    shards: int
    status: str

    @property
    def all_done(self) -> bool:
        """Whether this was the last shard: whoever sees it queues the finaliser."""
        return self.shards_done >= self.shards


@dataclass(frozen=True, slots=True)
class Entry:
    """A batch as Redis knows it. Times are seconds on Redis' clock."""

    id: str
    status: str
    total: int
    completed: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    cost_total: int
    cost_done: int
    shards: int
    shards_done: int
    queue: str
    created_at: float
    expires_at: float
    fields: Mapping[str, str] = field(repr=False)
    """Everything that is written, times of all moves (``<status>_at``) included."""

    @property
    def ended(self) -> bool:
        """Whether its status is final; one not known here is not: whoever knows it goes on with it."""
        return self.status in FINAL

    @property
    def trouble(self) -> str | None:
        """Why the files of a batch that has not ended cannot be used now, for people; None: they can."""
        return None if self.ended else self.fields.get("trouble") or None


class Ledger:
    """Batches in one Redis."""

    def __init__(self, client: AsyncRedis) -> None:
        self.client = client
        self._scripts = Scripts(client, "dispatcher")
        self._ended = Ended()
        self._to_stay = Ended()
        """Those that have ended and that nobody removes in time."""

    async def open(self, batch_id: str, created_at: float, fields: Mapping[str, str]) -> bool:
        """Make a batch known with its first fields; False when it was known, then nothing changes."""
        flat = [text for item in fields.items() for text in item]
        opened = await self._scripts.run(
            "open_batch", [keys.BATCHES.of(), keys.BATCH.of(batch_id)], [batch_id, repr(created_at), *flat]
        )
        return bool(opened)

    async def move(
        self, batch_id: str, new: str, *, among: Iterable[str], fields: Mapping[str, str] | None = None
    ) -> str:
        """Move a batch to status ``new`` if it stands in one ``among`` those; returns the status that stands.

        The empty string: there is no such batch. What is known of its shards goes a day after its end.
        """
        old = list(among)
        flat = [text for item in (fields or {}).items() for text in item]
        _, standing = await self._scripts.run(
            "move_batch",
            [keys.BATCH.of(batch_id), keys.BATCH_SHARDS.of(batch_id)],
            [new, SHARDS_STAY_S if new in FINAL else 0, len(old), *old, *flat],
        )
        return str(standing)

    async def claim(self, batch_id: str, shard: int, owner: str) -> Claim | str:
        """Claim a shard, or the batch's status ('' when it is gone) when it is not in progress."""
        number, status, text = await self._scripts.run(
            "claim_shard",
            [keys.BATCH.of(batch_id), keys.BATCH_SHARDS.of(batch_id)],
            [shard, owner, secrets.token_hex(_CALL_BYTES)],
        )
        if not int(number):
            return str(status)
        return Claim(batch_id, shard, int(number), Past.read(_fields(str(text))))

    async def hand_back(self, claim: Claim, owner: str) -> bool:
        """Say that a claim did not die: it ends in an orderly way, or was fenced and lives.

        False: a later claim stands, or the batch is gone.
        """
        shards = keys.BATCH_SHARDS.of(claim.batch_id)
        return bool(await self._scripts.run("hand_back_shard", [shards], [claim.shard, claim.number, owner]))

    async def note_group(self, claim: Claim, owner: str, group: range) -> None:
        """Note which lines are about to be sent, by position. Raises Fenced when a later claim stands."""
        stands = await self._scripts.run(
            "note_group",
            [keys.BATCH_SHARDS.of(claim.batch_id)],
            [claim.shard, claim.number, owner, group[0], group[-1]],
        )
        if not int(stands):
            raise _fenced(claim)

    async def progress(self, claim: Claim, owner: str, tally: Tally, *, done: bool) -> Standing:
        """Report how far a claimed shard is. Raises Fenced when a later claim stands."""
        stands, shards_done, shards, status = await self._scripts.run(
            "shard_progress",
            [keys.BATCH.of(claim.batch_id), keys.BATCH_SHARDS.of(claim.batch_id)],
            [
                claim.shard,
                claim.number,
                owner,
                "done" if done else "running",
                tally.completed,
                tally.failed,
                tally.prompt_tokens,
                tally.completion_tokens,
                tally.cost,
            ],
        )
        if not int(stands):
            raise _fenced(claim)
        return Standing(int(shards_done), int(shards), str(status))

    async def left_open(self, batch_id: str, shard: int) -> bool:
        """Whether a shard of a batch in progress is not done."""
        with translated():
            async with self.client.pipeline(transaction=False) as pipeline:
                pipeline.hget(keys.BATCH.of(batch_id), "status")
                pipeline.hget(keys.BATCH_SHARDS.of(batch_id), str(shard))
                status, standing = await pipeline.execute()
        fields = dict(_SHARD_FIELD.findall(standing or ""))
        return status == BatchStatus.IN_PROGRESS and fields.get("state") != "done"

    async def reopen(self, batch_id: str, shards: Iterable[int]) -> None:
        """Take back that these shards are done; a batch that was being finalised is in progress again."""
        await self._scripts.run(
            "reopen_shards", [keys.BATCH.of(batch_id), keys.BATCH_SHARDS.of(batch_id)], list(shards)
        )

    async def entry(self, batch_id: str) -> Entry | None:
        """One batch, or None."""
        with translated():
            fields = text_fields(await self.client.hgetall(keys.BATCH.of(batch_id)))
        return _to_entry(batch_id, fields) if fields else None

    async def entries(self, batch_ids: Sequence[str]) -> dict[str, Entry]:
        """Those of the batches that are known, in one round trip."""
        with translated():
            async with self.client.pipeline(transaction=False) as pipeline:
                for batch_id in batch_ids:
                    pipeline.hgetall(keys.BATCH.of(batch_id))
                found = await pipeline.execute()
        return {
            batch_id: _to_entry(batch_id, text_fields(fields))
            for batch_id, fields in zip(batch_ids, found, strict=True)
            if fields
        }

    async def recent(self, limit: int = 100) -> list[Entry]:
        """The newest batches, newest first."""
        with translated():
            ids = [str(name) for name in await self.client.zrevrange(keys.BATCHES.of(), 0, limit - 1)]
        return list((await self.entries(ids)).values())

    async def unfinished(self) -> list[Entry]:
        """All batches that have not ended, oldest first."""
        ids, now_s = self._ended.others(await self._ids()), await self.now()
        open_ones = []
        for batch_id, fields in await self._each(ids, ENDS):
            if fields.get("status") in FINAL:
                self._ended.saw(batch_id, ended_at(fields), now_s)
            elif fields:
                open_ones.append(batch_id)
        return list((await self.entries(open_ones)).values())

    async def lines_left(self, queue: str) -> int:
        """How many lines have no result yet, in all batches of a queue that have not ended."""
        ids, now_s = self._ended.others(await self._ids()), await self.now()
        left = 0
        for batch_id, fields in await self._each(ids, [*ENDS, "queue", *_COUNTS]):
            if fields.get("status") in FINAL:
                self._ended.saw(batch_id, ended_at(fields), now_s)
            elif fields.get("queue") == queue:
                left += _lines_left(fields)
        return left

    async def _ids(self) -> list[str]:
        """All batches that are known, oldest first."""
        with translated():
            return [str(name) for name in await self.client.zrange(keys.BATCHES.of(), 0, -1)]

    async def _each(self, batch_ids: Sequence[str], names: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
        """These fields of each of the batches, as far as they are there."""
        found: list[Sequence[str | None]] = []
        for start in range(0, len(batch_ids), _ENTRIES_AT_ONCE):
            with translated():
                async with self.client.pipeline(transaction=False) as pipeline:
                    for batch_id in batch_ids[start : start + _ENTRIES_AT_ONCE]:
                        pipeline.hmget(keys.BATCH.of(batch_id), list(names))
                    found += await pipeline.execute()
        return [
            (batch_id, {name: value for name, value in zip(names, values, strict=True) if value is not None})
            for batch_id, values in zip(batch_ids, found, strict=True)
        ]

    async def set_fields(self, batch_id: str, fields: Mapping[str, str]) -> bool:
        """Write fields that no move depends on; False: there is no such batch, and none is made."""
        flat = [text for item in fields.items() for text in item]
        return bool(await self._scripts.run("note_batch", [keys.BATCH.of(batch_id)], list(flat)))

    async def shards_done(self, batch_id: str) -> set[int]:
        """Numbers of the shards that are done."""
        with translated():
            shards = text_fields(await self.client.hgetall(keys.BATCH_SHARDS.of(batch_id)))
        return {int(shard) for shard, text in shards.items() if _fields(text).get("state") == "done"}

    async def due_for_removal(self, now_s: float) -> list[str]:
        """Batches that have ended and were to be kept until now at most, oldest first."""
        ids = self._to_stay.others(await self._ids())
        due = []
        for batch_id, fields in await self._each(ids, FIELDS):
            when = remove_at(fields)
            if when is not None and when <= now_s:
                due.append(batch_id)
            elif fields.get("status") in FINAL and not fields.get(KEEP_FIELD):
                self._to_stay.saw(batch_id, ended_at(fields), now_s)
        return due

    async def forget(self, batch_id: str) -> None:
        """Remove everything that is known of a batch."""
        with translated():
            await self.client.delete(keys.BATCH.of(batch_id), keys.BATCH_SHARDS.of(batch_id))
            await self.client.zrem(keys.BATCHES.of(), batch_id)

    async def now(self) -> float:
        """Redis' clock, in seconds since the epoch."""
        with translated():
            seconds, micros = await self.client.time()
        return float(seconds) + float(micros) / 1e6


def _fields(text: str) -> dict[str, str]:
    """The fields of a shard's line of text."""
    return dict(_SHARD_FIELD.findall(text))


def _fenced(claim: Claim) -> Fenced:
    return Fenced(f"shard {claim.shard} of {claim.batch_id} was claimed anew")


def status_of(entry: Entry) -> BatchStatus:
    """Where the batch stands. Raises UnreadableRecordError for a status that is not known here."""
    try:
        return BatchStatus(entry.status)
    except ValueError as error:
        raise _unreadable(entry, f"the status {entry.status!r}") from error


def record_of(entry: Entry) -> BatchRecord:
    """The batch as everyone sees it: what was said when it was opened, and where it stands now.

    Raises UnreadableRecordError.
    """
    status = status_of(entry)
    try:
        opened = BatchRecord.from_json(entry.fields.get("record", ""))
    except ValidationError as error:
        raise _unreadable(entry, "the record") from error
    times = {
        f"{status}_at": int(float(entry.fields[f"{status}_at"]))
        for status in BatchStatus
        if f"{status}_at" in entry.fields and f"{status}_at" in BatchRecord.model_fields
    }
    when = remove_at(entry.fields)
    usage = BatchUsage(
        input_tokens=entry.prompt_tokens,
        output_tokens=entry.completion_tokens,
        total_tokens=entry.prompt_tokens + entry.completion_tokens,
    )
    return opened.model_copy(
        update={
            "status": status,
            "request_counts": RequestCounts(
                total=entry.total, completed=entry.completed, failed=entry.failed
            ),
            "forebay": opened.forebay.model_copy(
                update={"remove_at": None if when is None else int(when), "trouble": entry.trouble}
            ),
            "usage": usage if usage.total_tokens else None,
            "output_file_id": entry.fields.get("output_file_id") or None,
            "error_file_id": entry.fields.get("error_file_id") or None,
            **times,
        }
    )


def _unreadable(entry: Entry, what: str) -> UnreadableRecordError:
    return UnreadableRecordError(
        f"{what} of {entry.id} cannot be read by this version of Forebay: a newer one may have written it"
    )


def _lines_left(fields: Mapping[str, str]) -> int:
    total, completed, failed = (int(fields.get(name) or 0) for name in _COUNTS)
    return max(0, total - completed - failed)


def _to_entry(batch_id: str, fields: Mapping[str, str]) -> Entry:
    def number(name: str) -> int:
        return int(fields.get(name) or 0)

    return Entry(
        id=batch_id,
        status=fields["status"],
        total=number("total"),
        completed=number("completed"),
        failed=number("failed"),
        prompt_tokens=number("prompt_tokens"),
        completion_tokens=number("completion_tokens"),
        cost_total=number("cost_total"),
        cost_done=number("cost_done"),
        shards=number("shards"),
        shards_done=number("shards_done"),
        queue=fields.get("queue", "default"),
        created_at=float(fields.get("created_at") or 0),
        expires_at=float(fields.get("expires_at") or 0),
        fields=fields,
    )
