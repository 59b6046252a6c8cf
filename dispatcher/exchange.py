"""A batch's lines as requests, and what came back of them as results.

When a line is sent, and when its result is durable, is the subject of `shard`; how a request is run that of
`attempts`; how a result is written that of `batches.results`. No I/O.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import assert_never

from dispatcher.attempts import Answered, Course, Request, Unanswered
from dispatcher.batches.ledger import Entry
from dispatcher.batches.parse import Line
from dispatcher.batches.parts import Entry as Result
from dispatcher.batches.plan import PlannedRequest
from dispatcher.batches.results import Detail, Usage, error_line, read_usage, record_id, result_line
from dispatcher.reserved import Changes, with_changes
from dispatcher.scheduler.question import Need

_NO_USAGE = Usage(None, None)


class Exchange:
    """One batch's; what the batch itself says of its requests is read from its entry."""

    def __init__(
        self,
        entry: Entry,
        *,
        urgency: int,
        deadline_s: float,
        late_code: str,
        usually_hedge: bool,
        reserved: Changes | None = None,
    ) -> None:
        """`deadline_s` is on the monotonic clock. `usually_hedge` is for a batch that does not say.
        `reserved` is done to all bodies.
        """
        self._batch_id = entry.id
        self._urgency = urgency
        self._deadline_s = deadline_s
        self._late_code = late_code
        self._reserved = reserved or {}
        self._detail = entry.fields.get("detail") != "0"
        self._hedge = {"0": False, "1": True}.get(entry.fields.get("hedge", ""), usually_hedge)
        self._strategy = entry.fields.get("strategy") or None
        self._lines = entry.total
        self._share = float(entry.fields.get("share") or 1)

    def request(self, planned: PlannedRequest, line: Line, shared: frozenset[int]) -> Request:
        """`shared`: prefix keys that are worth going to the same worker for."""
        need = Need(
            model=planned.model,
            prompt_tokens=planned.prompt_tokens,
            asked_tokens=planned.asked_tokens,
            cost_tokens=planned.cost_tokens,
            strategy=line.strategy or self._strategy,
            prefix_key=f"{planned.prefix_key:016x}" if planned.prefix_key in shared else None,
        )
        return Request(
            id=record_id(self._batch_id, line.number),
            path=line.url,
            body=with_changes(line.body, self._reserved),
            need=need,
            urgency=self._urgency,
            deadline_s=self._deadline_s,
            late_code=self._late_code,
            hedge=self._hedge,
            custom_id=line.custom_id,
            batch_id=self._batch_id,
            share=self._share,
            batch_lines=self._lines,
        )

    def result(self, line: Line, answer: Answered | Unanswered) -> Result:
        """What becomes of a line whose answer is final."""
        name = record_id(self._batch_id, line.number)
        detail = _detail(answer.course) if self._detail else None
        match answer:
            case Answered(reply):
                ok = 200 <= reply.status < 300
                record = result_line(
                    line.custom_id,
                    record_id=name,
                    request_id=name,
                    status_code=reply.status,
                    body=reply.body,
                    detail=detail,
                )
                return Result(line.number, ok, read_usage(reply.body) if ok else _NO_USAGE, record)
            case Unanswered(code, message):
                record = error_line(line.custom_id, code, message, detail, record_id=name)
                return Result(line.number, False, _NO_USAGE, record)
            case _:
                assert_never(answer)


def shared_prefixes(planned: Sequence[PlannedRequest]) -> frozenset[int]:
    """Prefix keys that several neighbours share: only these are worth going to the same worker for."""
    return frozenset(
        left.prefix_key for left, right in itertools.pairwise(planned) if left.prefix_key == right.prefix_key
    )


def _detail(course: Course) -> Detail:
    return Detail(
        worker=course.worker,
        attempts=course.attempts,
        queued_s=round(course.queued_s, 6),
        latency_s=None if course.latency_s is None else round(course.latency_s, 6),
    )
