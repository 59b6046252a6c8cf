"""What a decision record is: an attempt, why it went where it went, how it ended; and which attempts get one.

Knows no clock and does no I/O. Records are made and collected by `recorder`, kept and found by `archive`,
shown by `forebay explain`. A record never holds a prompt, a body, an answer or a key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from dispatcher.outcome import Label
from dispatcher.scheduler.decision import CandidateScores, Chosen, Explanation
from dispatcher.scheduler.question import Need
from workers.breaker import Verdict

LARGE_BATCH = 1000
"""Batches of more lines are sampled unless it is said how."""
_LARGE_BATCH_SAMPLE = 0.01
MOST_NAMES = 16
"""Workers named by a record, of each filter's and of the candidates: a fleet may have a thousand."""

_OR_TEXT = Field(union_mode="left_to_right")


@dataclass(frozen=True, slots=True)
class Sighting:
    """An attempt that ended, as a record is made of it: what `attempts.Seen` holds, without the body."""

    request_id: str
    custom_id: str
    batch_id: str | None
    attempt: int
    decision: Chosen | None
    """None: a second attempt beside one that ran."""
    need: Need
    urgency: int
    answer_tokens: int | None
    sample: float
    worker: str
    granted_s: float
    waited_s: float | None
    outcome: Label
    verdict: Verdict
    elapsed_s: float


class _Kept(BaseModel):
    """What is read back may be of a newer version: a field that is not known here is left out."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Dropped(_Kept):
    """Whom a filter dropped: how many, and the first `MOST_NAMES` of them."""

    count: int
    workers: tuple[str, ...]


class DecisionRecord(_Kept):
    """One attempt. Times are in seconds."""

    request_id: str
    custom_id: str
    """Empty for an inline request, which is known by its job's id alone: the request_id."""
    batch_id: str | None
    attempt: int
    """From 1."""
    beside: bool
    """Whether it was a second attempt beside one that ran: the fastest free worker, nothing was scored."""
    sample: float = 1.0
    """How likely such an attempt gets a record, 0.0 to 1.0: it stands for so many as 1 over it."""
    urgency: int | None = None
    """Of its queue: 0 is the most urgent one that is served. None here and below: it was not recorded."""
    model: str | None = None
    """None as well: any worker would do."""
    prompt_tokens: int | None = None
    """Estimated."""
    asked_tokens: int | None = None
    """The ceiling of the answer; None as well: the request names none."""
    cost_tokens: int | None = None
    """Estimated, of prompt and answer together."""
    answer_tokens: int | None = None
    """Of the answer, by the engine's count; None as well: there is no answer, or it does not say."""
    at: float
    """When its lease was granted, on Redis' clock."""
    waited_s: float | None
    """How long it waited for the lease; None: it did not wait, being beside another."""
    strategy: str | None
    picker: str | None
    weights: dict[str, float]
    """Each scorer's part of the total; they sum to 1."""
    dropped: dict[str, Dropped]
    """By filter, in the order in which they were asked; one that dropped nobody is left out."""
    refusals: dict[str, str]
    """Why a worker refused a lease just before, by worker."""
    candidates: tuple[CandidateScores, ...]
    """The best `MOST_NAMES` and the pick, best total first."""
    candidate_count: int
    picked: str | None
    """The first choice; None when nothing was scored."""
    worker: str
    """Who gave the lease, and was sent the request: another than the pick if that refused."""
    outcome: Annotated[Label | str, _OR_TEXT]
    """Text, here and below, is a word of a newer version."""
    verdict: Annotated[Verdict | str, _OR_TEXT]
    """What the worker's breaker was told."""
    elapsed_s: float
    """From sending to the whole reply; 0 when it was called off."""
    dispatcher: str


def share_recorded(
    *, attempt: int, raced: bool, outcome: Label, batch_lines: int, sample: float | None
) -> float:
    """How likely an attempt gets a record, 0.0 to 1.0.

    Always one that failed and all that come after it, and those that ran beside each other (`raced`): whoever
    asks about such a request wants to see both. Of all others the share `sample`, 0.0 to 1.0; None: all, of
    batches above `LARGE_BATCH` lines one in a hundred.
    """
    if outcome is not Label.OK or attempt > 1 or raced:
        return 1.0
    if sample is None:
        return _LARGE_BATCH_SAMPLE if batch_lines > LARGE_BATCH else 1.0
    return sample


def record_of(seen: Sighting, dispatcher: str) -> DecisionRecord:
    """The record of an attempt. Costs some 0.1 ms, which is why it is not made of every one."""
    why = None if seen.decision is None else seen.decision.explain(MOST_NAMES)
    return DecisionRecord(
        request_id=seen.request_id,
        custom_id=seen.custom_id,
        batch_id=seen.batch_id,
        attempt=seen.attempt,
        beside=why is None,
        sample=seen.sample,
        urgency=seen.urgency,
        model=seen.need.model,
        prompt_tokens=seen.need.prompt_tokens,
        asked_tokens=seen.need.asked_tokens,
        cost_tokens=seen.need.cost_tokens,
        answer_tokens=seen.answer_tokens,
        at=round(seen.granted_s, 6),
        waited_s=None if seen.waited_s is None else round(seen.waited_s, 6),
        strategy=why.strategy if why else None,
        picker=why.picker if why else None,
        weights=why.weights if why else {},
        dropped=_shortened(why.dropped) if why else {},
        refusals=_some(why) if why else {},
        candidates=why.candidates if why else (),
        candidate_count=why.candidate_count if why else 0,
        picked=why.picked if why else None,
        worker=seen.worker,
        outcome=seen.outcome,
        verdict=seen.verdict,
        elapsed_s=round(seen.elapsed_s, 6),
        dispatcher=dispatcher,
    )


def _shortened(dropped: Mapping[str, tuple[str, ...]]) -> dict[str, Dropped]:
    return {
        name: Dropped(count=len(workers), workers=workers[:MOST_NAMES]) for name, workers in dropped.items()
    }


def _some(why: Explanation) -> dict[str, str]:
    return dict(list(why.refusals.items())[:MOST_NAMES])
