"""How many bytes of batches' lines a dispatcher holds, from reading to answer, in all its shards together.

`quota` bounds how many lines wait, whatever their size; without this, a few hundred large ones would fill any
memory. What takes a line, and when, is `shard`'s subject. No I/O.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

from dispatcher.batches.plan import PlannedRequest

MOST_BYTES = 256 * 2**20
"""What a dispatcher holds unless it is told otherwise."""
_PORTIONS = 16
"""A portion is so large a part of the bound. It is what is read at once, and what every model may have."""
_LONGEST_WAIT_S = 1.0

_Kind: TypeAlias = tuple[str | None, int]


class HeldLines:
    """One dispatcher's. A line counts with its length in the input: what is held of it is hardly less.

    Beyond the bound, a model of an urgency may still have a portion: lines that no worker can take now may be
    held for hours, and keep no other model's workers idle, nor urgent lines behind those that are not.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        """`most_bytes`: at least 1. It is passed by a portion, or by one line that is longer."""
        self._most = most_bytes
        self.portion = max(1, most_bytes // _PORTIONS)
        self._held: Counter[_Kind] = Counter()
        self.waiting: list[tuple[int, asyncio.Future[None]]] = []
        """Who waits for something to be answered: how urgent, and what wakes them."""

    @property
    def bytes(self) -> int:
        """Held now."""
        return self._held.total()

    def with_room(self, models: Collection[str | None], urgency: int) -> Collection[str | None]:
        """Those of the models of which more lines of this urgency may be read now: a portion, or one line."""
        if self.bytes < self._most:
            return models
        return [model for model in models if self._held[model, urgency] < self.portion]

    async def freed(self, urgency: int) -> None:
        """Wait until something held ends. More urgent ones are woken first, and find what it leaves.

        A second at most: whoever waits here does not see the workers of other models become free.
        """
        waiter = (urgency, asyncio.get_running_loop().create_future())
        self.waiting.append(waiter)
        try:
            await asyncio.wait({waiter[1]}, timeout=_LONGEST_WAIT_S)
        finally:
            self.waiting.remove(waiter)

    @contextlib.contextmanager
    def reading(self, planned: Sequence[PlannedRequest], urgency: int) -> Iterator[None]:
        """Count lines while they are read; those that go on being held count by `hold` from there on."""
        kinds = Counter[_Kind]()
        for one in planned:
            kinds[one.model, urgency] += one.length
        self._held.update(kinds)
        try:
            yield
        finally:
            self._free(kinds)

    def hold(self, planned: PlannedRequest, urgency: int, until: asyncio.Task[Any]) -> None:
        """Count a line until a task ends, be it before its first step."""
        kinds = Counter({(planned.model, urgency): planned.length})
        self._held.update(kinds)
        until.add_done_callback(lambda _: self._free(kinds))

    def _free(self, kinds: Counter[_Kind]) -> None:
        self._held -= kinds  # drops what has become zero
        for _, waiter in sorted(self.waiting, key=lambda waiting: waiting[0]):
            if not waiter.done():
                waiter.set_result(None)
