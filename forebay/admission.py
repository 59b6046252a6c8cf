"""Whether a queue takes more requests. How a file becomes a batch is ``submission``'s subject.

The limit is there for people, against a script gone wild that submits its file a hundred times: two files
that are submitted at the same moment may pass it together.
"""

from __future__ import annotations

from dispatcher.batches.ledger import Ledger
from forebay.errors import QueueFull


async def check_room(ledger: Ledger, queue: str, lines: int, most: int) -> None:
    """Whether so many lines more may wait in a queue. Raises QueueFull, StoreUnavailable.

    What waits is every line without a result in a batch that has not ended. Costs a read of five fields for
    each batch that is known.
    """
    waiting = await ledger.lines_left(queue)
    if waiting + lines > most:
        raise QueueFull(
            f"the queue {queue} is full: {waiting:,} requests wait in it, {lines:,} more would be above "
            f"{most:,} (most_queued_requests); nothing was queued. Submit again when batches have ended, "
            "cancel one (see: forebay batches), name another --queue, or raise the limit"
        )
