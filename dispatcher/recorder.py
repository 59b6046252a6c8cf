"""Collects attempts as they end and keeps records of those that shall have one, off the path of requests.

An onlooker: it only notes what it sees; records are made and written in `flush`, which the service calls
every while. Which attempts get a record and what it holds is `records`' subject, where it is kept that of
`archive`. Records are for people: whatever goes wrong with them, requests go on.
"""

from __future__ import annotations

from collections import deque
from random import Random

import structlog

from dispatcher.archive import Archive
from dispatcher.attempts import Seen
from dispatcher.batches.results import read_usage
from dispatcher.outcome import Label
from dispatcher.records import Sighting, record_of, share_recorded
from dispatcher.reply import Reply
from workers.errors import StoreUnavailable

log = structlog.get_logger(__name__)

INTERVAL_S = 0.5
"""From one flush to the next."""
MOST_NOTED = 2048
"""Attempts that may wait to be written, while Redis is away for instance; beyond that the oldest are lost."""
_AT_ONCE = 32
"""Records made and written in one step: a few milliseconds of the event loop."""


class Recorder:
    """One dispatcher's records. `sample` as in `records.share_recorded`."""

    def __init__(self, archive: Archive, *, dispatcher: str, sample: float | None, rng: Random) -> None:
        self._archive = archive
        self._dispatcher = dispatcher
        self._sample = sample
        self._rng = rng
        self._noted: deque[Sighting] = deque()
        self._lost = 0

    def saw(self, seen: Seen) -> None:
        """Note an attempt that ended, if it shall have a record."""
        request, held, turn = seen.request, seen.held, seen.turn
        share = share_recorded(
            attempt=turn.number,
            raced=request.hedge and held.join is None,  # whoever joined it took the way to it
            outcome=seen.outcome.label,
            batch_lines=request.batch_lines,
            sample=self._sample,
        )
        if self._rng.random() >= share:
            return
        if len(self._noted) >= MOST_NOTED:
            self._noted.popleft()
            self._lost += 1
        self._noted.append(
            Sighting(
                request_id=request.id,
                custom_id=request.custom_id,
                batch_id=request.batch_id,
                attempt=turn.number,
                decision=held.decision,
                need=request.need,
                urgency=request.urgency,
                answer_tokens=_answer_tokens(seen),
                sample=share,
                worker=held.worker_id,
                granted_s=held.granted_s,
                waited_s=turn.waited_s,
                outcome=seen.outcome.label,
                verdict=seen.outcome.verdict,
                elapsed_s=seen.elapsed_s,
            )
        )

    async def flush(self) -> None:
        """Keep records of all that was noted. Raises StoreUnavailable; what is left is kept the next time."""
        while self._noted:
            noted = [self._noted.popleft() for _ in range(min(_AT_ONCE, len(self._noted)))]
            try:
                await self._archive.keep([record_of(seen, self._dispatcher) for seen in noted])
            except StoreUnavailable:
                self._noted.extendleft(reversed(noted))
                raise
            except Exception:
                log.exception("decision records could not be kept", count=len(noted))
        if self._lost:
            log.warning("decision records were lost while Redis did not answer", count=self._lost)
            self._lost = 0


def _answer_tokens(seen: Seen) -> int | None:
    if seen.outcome.label is not Label.OK or not isinstance(seen.answer, Reply):
        return None
    return read_usage(seen.answer.body).completion_tokens
