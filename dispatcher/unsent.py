"""The lines of a shard that are left to send: in the order of the plan, save that a model may be passed over.

When which model is passed over is `quota`'s subject; reading the lines is `batches`'. Pure.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable
from itertools import islice

from dispatcher.batches.plan import PlannedRequest


class Unsent:
    """What is left, by model."""

    def __init__(self, planned: Iterable[PlannedRequest]) -> None:
        """All of these, in this order."""
        self._rows: dict[str | None, deque[tuple[int, PlannedRequest]]] = {}
        for place, request in enumerate(planned):
            self._rows.setdefault(request.model, deque()).append((place, request))

    def __bool__(self) -> bool:
        """Whether anything is left."""
        return bool(self._rows)

    @property
    def models(self) -> Collection[str | None]:
        """Models of which something is left; None: lines that any worker may take."""
        return self._rows.keys()

    def take(
        self, models: Collection[str | None], most: int, most_bytes: int | None = None
    ) -> list[PlannedRequest]:
        """Take the first lines for these models, as many as `most` and no more than `most_bytes` of them.

        The first line is taken however long it is. None: as long as they are.
        """
        rows = (self._rows[model] for model in models if model in self._rows)
        taken: list[PlannedRequest] = []
        total = 0
        for _, request in islice(heapq.merge(*rows), most):
            total += request.length
            if taken and most_bytes is not None and total > most_bytes:
                break
            taken.append(request)
        for request in taken:
            left = self._rows[request.model]
            left.popleft()
            if not left:
                del self._rows[request.model]
        return taken
