"""What waits in vain at each dispatcher, told to the others through Redis. The one door to its key.

What is made of it is `demand`'s subject.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dispatcher.demand import Demand
from workers import keys
from workers.connection import AsyncRedis, Refused
from workers.scripts import Scripts

MOST_MODELS = 8
"""Models that one dispatcher tells of at once; the others get their turn when these have theirs."""
_LONGEST = 65_536
"""Characters of what one dispatcher may tell; longer is none of ours."""
_decode = msgspec.json.Decoder(tuple[Demand, ...]).decode
_encode = msgspec.json.Encoder().encode


class SharedDemand:
    """One dispatcher's part in it."""

    def __init__(self, client: AsyncRedis, owner: str) -> None:
        """``owner`` names this dispatcher, as in its leases."""
        self._scripts = Scripts(client, "dispatcher")
        self._owner = owner

    async def exchange(self, mine: Sequence[Demand], for_s: float) -> list[tuple[Demand, ...]]:
        """Tell what waits here, which holds for ``for_s`` seconds; returns what holds of each other one.

        Raises StoreUnavailable.
        """
        told = _encode(mine[:MOST_MODELS]).decode() if mine else ""
        try:
            answer = await self._scripts.run(
                "exchange_demand", [keys.DEMAND.of()], [self._owner, told, repr(for_s)]
            )
        except (Refused, UnicodeDecodeError):
            return []  # what stands there is of another type, or no text: none of ours wrote it
        return [demands for text in msgspec.json.decode(answer) if (demands := _read(text))]


def _read(text: object) -> tuple[Demand, ...]:
    """What a dispatcher told; nothing when it is none of ours, whoever wrote that."""
    if not isinstance(text, str) or len(text) > _LONGEST:
        return ()
    try:
        demands = _decode(text)
    except msgspec.DecodeError:
        return ()
    return tuple(demand for demand in demands[:MOST_MODELS] if demand.sensible)
