"""Filters: who may take the request at all. Each is one function and one line of ``FILTERS``.

What a candidate is worth belongs to ``scorers``. A filter answers with a mask over the whole fleet, or
None when it drops nobody; it sees in ``question.candidates`` who passed the filters before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from dispatcher.scheduler.question import Mask, Question


class FilterFunction(Protocol):
    def __call__(self, question: Question, /) -> Mask | None: ...


class Emptied(Enum):
    """What it means when a filter leaves nobody."""

    NOT_SERVED = auto()
    NONE_READY = auto()
    BUSY = auto()


@dataclass(frozen=True, slots=True)
class Filter:
    name: str
    keeps: FilterFunction
    emptied: Emptied


def serves_model(question: Question) -> Mask | None:
    """Workers that name the model. One that has not said what it serves stands in only when none names it."""
    return question.fleet.serving(question.need.model)


def ready(question: Question) -> Mask:
    """Answers, and is not draining."""
    return question.fleet.ready


def context_fits(question: Question) -> Mask | None:
    """Prompt and answer fit the context where it is known; when they fit nowhere the engine has the word."""
    if question.need.context_tokens <= question.fleet.least_context:
        return None
    fits = question.fleet.max_model_len >= question.need.context_tokens
    return fits if np.count_nonzero(fits & question.candidates) else None


def breaker_admits(question: Question) -> Mask | None:
    """Closed, half-open, or open for long enough that a trial is due; whether the trial is free Redis
    knows.
    """
    return None if _calm(question) else question.fleet.breaker_until <= question.now_s


def not_deferred(question: Question) -> Mask | None:
    """The worker did not ask to be left alone until later."""
    return None if _calm(question) else question.fleet.deferred_until <= question.now_s


def not_refused(question: Question) -> Mask | None:
    """No acquire was refused since the fleet was last looked at, or its wait is over."""
    return None if _calm(question) else question.fleet.refused_until <= question.now_s


def untried(question: Question) -> Mask | None:
    """Workers this request has not failed on, unless nobody else is left.

    Stands before ``has_room``: when every other worker is full for the moment, a worker that fails fast
    has room, and sending the request there again would spend its attempts on the one place known not to
    work.
    """
    tried = question.need.tried
    if not tried:
        return None
    mask = question.fleet.none_of(tried)
    return mask if np.count_nonzero(mask & question.candidates) else None


def has_room(question: Question) -> Mask:
    """Leases of all dispatchers below the limit."""
    return question.fleet.leases < question.fleet.limit


def _calm(question: Question) -> bool:
    return question.fleet.calm_from_s <= question.now_s


FILTERS = (
    Filter("model", serves_model, Emptied.NOT_SERVED),
    Filter("ready", ready, Emptied.NONE_READY),
    Filter("context", context_fits, Emptied.BUSY),
    Filter("breaker", breaker_admits, Emptied.BUSY),
    Filter("deferral", not_deferred, Emptied.BUSY),
    Filter("refused", not_refused, Emptied.BUSY),
    Filter("tried", untried, Emptied.BUSY),
    Filter("limit", has_room, Emptied.BUSY),
)
"""In this order. Whoever passed the first ``PLACES`` of them is a place the request could run at, now or
later.
"""
PLACES = 3
