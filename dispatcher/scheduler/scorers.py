"""Scorers: what each worker is worth for a request, 0 to 1, 1 best. Each is one function and one line of
``SCORERS``.

Who may be used at all belongs to ``filters``; how scores are weighed, to ``strategies`` and ``decision``.
A scorer answers with a column over the whole fleet in which NaN is "unknown", or None when it knows
nothing of anybody; ``settled`` then makes the numbers whole. No scorer divides by what may be 0, and no
load makes one infinite.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dispatcher.scheduler.fleet import key_hash

if TYPE_CHECKING:
    import numpy.typing as npt

    from dispatcher.scheduler.question import Column, Question

HALF_SCORE_S = 5.0
"""A worker that will be busy for this many seconds scores one half."""
SESSION_HEADROOM = 0.25
"""How far above its share of all leases a worker may be and still be a key's first choice."""
ROUNDING = 1e-9
"""A product this little above a whole number is that number."""
UNKNOWN = 0.5
"""What every worker scores when nobody's score is known."""

_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class ScorerFunction(Protocol):
    def __call__(self, question: Question, /) -> Column | None: ...


@dataclass(frozen=True, slots=True)
class Scorer:
    """``from_load``: it reads the load, so a score may be unknown, and fades as the load grows old.

    Without it no worker's score is unknown, unless all are.
    """

    name: str
    score: ScorerFunction
    from_load: bool = False


def queue(question: Question) -> Column:
    """By the seconds until the waiting requests are served; without a drain rate, by their share of the
    limit.
    """
    fleet = question.fleet
    waiting = fleet.waiting_now
    half = HALF_SCORE_S * fleet.drain_rate
    by_time = half / (half + waiting)  # 1 / (1 + wait_s / 5)
    if fleet.all_drain_known:
        return by_time
    by_share = 1.0 - np.minimum(1.0, waiting / fleet.limit)
    return np.where(np.isnan(half), by_share, by_time)


def kv(question: Question) -> Column:
    """By the free part of the fullest rank's cache, the tokens leased since the sample counted as used."""
    fleet = question.fleet
    return 1.0 - np.minimum(1.0, fleet.kv_usage + fleet.tokens_since * fleet.kv_per_token)


def inflight(question: Question) -> Column:
    """By the free part of the limit."""
    return 1.0 - np.minimum(1.0, question.fleet.leases / question.fleet.limit)


def load(question: Question) -> Column:
    """By the seconds the worker needs for the tokens it has not begun, this request's among them."""
    fleet, cost = question.fleet, float(question.need.cost_tokens)
    tokens = fleet.queued_tokens + fleet.tokens_since + cost
    if fleet.any_unsized:
        tokens += fleet.queued_unsized * cost
    half = HALF_SCORE_S * fleet.capacity_rate
    return half / (half + tokens)  # 1 / (1 + busy_s / 5)


def speed(question: Question) -> Column | None:
    """By how soon it would finish this request once begun: its speed over the fastest candidate's.

    Of unknown speed is as fast as the middle one; unknown for all when no candidate's is known.
    """
    fleet = question.fleet
    known = fleet.speed[question.candidates & ~np.isnan(fleet.speed)]
    if not known.size:
        return None
    speeds: Column = fleet.speed
    if known.size < len(fleet):
        speeds = np.where(np.isnan(speeds), _median(known), speeds)
    share: Column = np.minimum(1.0, speeds / known.max())
    return share


def weight(question: Question) -> Column:
    """By the static preference a person gave."""
    return question.fleet.weight_share


def session(question: Question) -> Column | None:
    """1 for the worker that the request's key belongs to, else 0; unknown for all without a key.

    Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, SODA 2018): the first worker
    of the key's walk over the candidates that stays within (1 + headroom) of its share of all leases,
    shares being in proportion to limits. The walk is rendezvous hashing: each worker's place is the hash
    of key and worker, so that a worker that leaves moves its own keys only, evenly, and there is no ring
    to build.
    """
    key = question.need.affinity_key
    if key is None:
        return None
    fleet = question.fleet
    limits = fleet.limit * question.candidates
    leases = fleet.leases * question.candidates
    share = limits * ((leases.sum() + 1.0) / limits.sum())
    bound = np.ceil((1.0 + SESSION_HEADROOM) * share - ROUNDING)
    within = question.candidates & (leases + 1.0 <= bound)
    walk = _mixed(fleet.hashes ^ np.uint64(key_hash(key))) * within
    column = np.zeros(len(fleet))
    column[walk.argmax()] = 1.0
    return column


SCORERS = {
    scorer.name: scorer
    for scorer in (
        Scorer("queue", queue, from_load=True),
        Scorer("kv", kv, from_load=True),
        Scorer("inflight", inflight),
        Scorer("load", load, from_load=True),
        Scorer("speed", speed),
        Scorer("weight", weight),
        Scorer("session", session),
    )
}


def settled(column: Column, question: Question, freshness: Column | None) -> Column:
    """The score of every worker: what is unknown takes the candidates' median, else one half.

    ``freshness`` (0 to 1; None is all 1) says how far each number may be believed: the score lies that
    far from the unknown's towards its own.
    """
    if freshness is None:
        unknown = np.isnan(column)
        if not np.count_nonzero(unknown):
            return column
        return np.where(unknown, _median(column[question.candidates & ~unknown]), column)
    unknown = np.isnan(column) | (freshness <= 0.0)
    middle = _median(column[question.candidates & ~unknown])
    return np.where(unknown, middle, middle + freshness * (column - middle))


def _median(known: Column) -> float:
    """Of the known scores; ``np.median`` costs twenty times the rest of a decision's step."""
    ordered = known.tolist()
    ordered.sort()
    count = len(ordered)
    if not count:
        return UNKNOWN
    return math.fsum((ordered[(count - 1) // 2], ordered[count // 2])) / 2.0


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Each number thoroughly shuffled: the finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    values = (values ^ (values >> _30)) * _FIRST
    values = (values ^ (values >> _27)) * _SECOND
    return values ^ (values >> _31)
