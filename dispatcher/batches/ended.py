"""Which batches have ended, as one process remembers it: nobody asks for them again at every look.

Belongs here: what is remembered, and for how long. Asking is the ledger's subject. No I/O.
"""

from __future__ import annotations

from collections.abc import Sequence

SETTLED_S = 60.0
"""So long after its end a batch is remembered: the last writes, which a failover may lose, are younger."""
LOOKS = 40
"""After so many looks all is asked for anew: ten minutes, for who looks every 15 s."""


class Ended:
    """Ids that need not be asked for again, since what was seen of them cannot change any more.

    It can after all, when Redis comes back with older data, or a batch is forgotten and resumed between two
    looks: so nothing is remembered for more than `LOOKS` looks.
    """

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._looks = 0

    def others(self, batch_ids: Sequence[str]) -> list[str]:
        """Begin a look at all batches, which are these; gives those that have to be asked for."""
        self._looks += 1
        if self._looks % LOOKS == 0:
            self._ids.clear()
        self._ids.intersection_update(batch_ids)
        return [batch_id for batch_id in batch_ids if batch_id not in self._ids]

    def saw(self, batch_id: str, ended_s: float | None, now_s: float) -> None:
        """Remember that a batch ended then, if that is long enough ago. None: nobody knows when."""
        if ended_s is not None and ended_s + SETTLED_S <= now_s:
            self._ids.add(batch_id)
