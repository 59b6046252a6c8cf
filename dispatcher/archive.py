"""The one door to Redis for decision records: bounded by count and age, found by request or custom_id.

Each request has a key with its last attempts; an index of all of them by time bounds how many there are.
What a record is stands in `records`, who makes them in `recorder`. Methods raise StoreUnavailable when Redis
does not answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from pydantic import ValidationError

from dispatcher.records import DecisionRecord
from workers import keys
from workers.connection import AsyncRedis, translated
from workers.scripts import Scripts

MOST_ATTEMPTS = 8
"""Attempts kept of a request, the last ones."""
KEEP = 20_000
"""Requests kept, those of the last attempts."""
TTL_S = 86_400.0
_AT_ONCE = 500
"""Names of the index looked at in one step."""
_SPECIAL = re.compile(r"([*?\[\]\\^-])")

OnUnreadable = Callable[[str], object]


def _nobody_asks(request_id: str) -> None:
    """What is left out is left out in silence."""


class Archive:
    """Decision records in one Redis. `keep` requests at most, for `ttl_s` seconds: bounds for who writes."""

    def __init__(self, client: AsyncRedis, *, keep: int = KEEP, ttl_s: float = TTL_S) -> None:
        self._client = client
        self._keep = keep
        self._ttl_s = ttl_s
        self._scripts = Scripts(client, "dispatcher")

    async def keep(self, records: Sequence[DecisionRecord]) -> None:
        """Keep records, and drop what is beyond the bounds. Doing it again changes nothing."""
        if not records:
            return
        args: list[str | int | float | bytes] = [MOST_ATTEMPTS, self._keep, repr(self._ttl_s)]
        for record in records:
            args += [_name(record), repr(record.at + record.elapsed_s), record.model_dump_json()]
        own = [keys.DECISION.of(record.request_id) for record in records]
        dropped = await self._scripts.run("keep_decisions", [keys.DECISIONS.of(), *own], args)
        if dropped:
            with translated():
                await self._client.unlink(*(keys.DECISION.of(_request_of(str(name))) for name in dropped))

    async def requests(self, batch_id: str | None = None) -> list[str]:
        """Ids of all requests that have records, or of those of one batch: the longest unchanged first."""
        with translated():
            names = [str(name) for name in await self._client.zrange(keys.DECISIONS.of(), 0, -1)]
        return [_request_of(name) for name in names if batch_id in (None, _batch_of(name))]

    async def of_requests(
        self, request_ids: Sequence[str], on_unreadable: OnUnreadable = _nobody_asks
    ) -> list[list[DecisionRecord]]:
        """The last attempts of each of these requests, oldest first; empty for one that has none.

        A record that this version cannot read is left out; `on_unreadable` is called with its request's id.
        """
        if not request_ids:
            return []
        with translated():
            async with self._client.pipeline(transaction=False) as pipeline:
                for request_id in request_ids:
                    pipeline.zrange(keys.DECISION.of(request_id), 0, -1)
                found = await pipeline.execute()
        return [
            list(_readable(texts, partial(on_unreadable, request_id)))
            for request_id, texts in zip(request_ids, found, strict=True)
        ]

    async def find(
        self, name: str, batch_id: str | None = None, on_unreadable: OnUnreadable = _nobody_asks
    ) -> list[list[DecisionRecord]]:
        """The last attempts of the requests that a name means, oldest first; the newest request first.

        The name is a request's id (for an inline request its job's), else a custom_id, which several batches
        may have; `batch_id` narrows it to one. `on_unreadable` as in `of_requests`.
        """
        found = await self.of_requests([name], on_unreadable)
        if not found[0]:
            found = await self.of_requests(await self._named(name, batch_id), on_unreadable)
        return [
            records
            for records in found
            if records
            and name in (records[0].request_id, records[0].custom_id)
            and batch_id in (None, records[0].batch_id)
        ]

    async def _named(self, custom_id: str, batch_id: str | None) -> list[str]:
        """Ids of the requests of that custom_id, the newest first."""
        pattern = f"*|{_literal(batch_id) if batch_id else '*'}|{_literal(custom_id)}"
        found: dict[str, float] = {}
        with translated():
            async for name, at in self._client.zscan_iter(keys.DECISIONS.of(), match=pattern, count=_AT_ONCE):
                found[_request_of(str(name))] = float(at)
        return sorted(found, key=found.__getitem__, reverse=True)


def _readable(texts: Iterable[str], otherwise: Callable[[], object]) -> Iterator[DecisionRecord]:
    for text in texts:
        try:
            yield DecisionRecord.model_validate_json(text)
        except ValidationError:
            otherwise()


def _name(record: DecisionRecord) -> str:
    """How a request stands in the index: by its id, and by what it may be looked for."""
    return f"{record.request_id}|{record.batch_id or ''}|{record.custom_id}"


def _request_of(name: str) -> str:
    return name.partition("|")[0]


def _batch_of(name: str) -> str:
    return name.split("|", 2)[1]


def _literal(text: str) -> str:
    """The pattern that matches the text only."""
    return _SPECIAL.sub(r"\\\1", text)
