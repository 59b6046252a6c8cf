"""The decision: which workers a request may be sent to, best first, or why to none; and the whole account
of it.

Pure: the fleet, the clock's reading and the source of chance come in as arguments. Who is dropped and what is
scored how belongs to ``filters`` and ``scorers``; taking the lease, to the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from pydantic import BaseModel, ConfigDict

from dispatcher.scheduler.filters import FILTERS, PLACES, Emptied
from dispatcher.scheduler.pickers import Ballot, MaxScore
from dispatcher.scheduler.question import Question
from dispatcher.scheduler.scorers import UNKNOWN, kv, settled

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from dispatcher.scheduler.fleet import FleetModel
    from dispatcher.scheduler.question import Column, Mask, Need
    from dispatcher.scheduler.strategies import Strategy

OVER_CEILING = 0.01
"""What the total of a worker at or over the KV ceiling is multiplied by."""
_LAST_RESORT = MaxScore()


class NoWorkerReason(StrEnum):
    """Why there is no worker. not_served: no worker registered serves the model. none_ready: those that
    do are starting, unready or draining. Both end when the fleet changes, not when it is less busy.
    """

    NOT_SERVED = "not_served"
    NONE_READY = "none_ready"


class CandidateScores(BaseModel):
    """One candidate's scores, 0.0 to 1.0; ``total`` is their weighted mean, small when over the KV
    ceiling.
    """

    model_config = ConfigDict(frozen=True)

    worker: str
    total: float
    over_kv_ceiling: bool
    scores: dict[str, float]


class Explanation(BaseModel):
    """A decision for people: what ``forebay explain`` shows."""

    model_config = ConfigDict(frozen=True)

    strategy: str
    picker: str
    picked: str | None
    weights: dict[str, float]
    """Each scorer's part of the total; they sum to 1."""
    dropped: dict[str, tuple[str, ...]]
    """Workers by the filter that dropped them; a filter that dropped nobody is left out."""
    refusals: dict[str, str]
    """What the last acquire on a worker was answered, of the workers that were refused."""
    candidates: tuple[CandidateScores, ...]
    """Best total first; as many as were asked for."""
    candidate_count: int
    """How many there were."""


@dataclass(slots=True)
class Account:
    """What a decision saw, in the columns it was made with: kept by reference, so keeping it costs
    nothing.
    """

    ids: tuple[str, ...]
    strategy: Strategy
    refusals: Mapping[str, str]
    passed: list[tuple[str, Mask]] = field(default_factory=list)
    """Who was left after each filter that dropped somebody."""
    candidates: Mask | None = None
    scores: list[tuple[str, Column | None]] = field(default_factory=list)
    """None: unknown for all."""
    totals: Column | None = None
    over: Mask | None = None

    def explain(self, picked: str | None, most: int | None = None) -> Explanation:
        return Explanation(
            strategy=self.strategy.name,
            picker=self.strategy.picker_name,
            picked=picked,
            weights={scorer.name: share for scorer, share in self.strategy.shares},
            dropped=self._dropped(),
            refusals=dict(self.refusals),
            candidates=self._candidates(picked, most),
            candidate_count=0 if self.candidates is None else int(np.count_nonzero(self.candidates)),
        )

    def _dropped(self) -> dict[str, tuple[str, ...]]:
        dropped = {}
        before = np.ones(len(self.ids), dtype=bool)
        for name, after in self.passed:
            dropped[name] = tuple(self.ids[place] for place in np.flatnonzero(before & ~after))
            before = after
        return dropped

    def _candidates(self, picked: str | None, most: int | None) -> tuple[CandidateScores, ...]:
        if self.totals is None or self.candidates is None:
            return ()
        places = sorted(np.flatnonzero(self.candidates), key=(-self.totals).__getitem__)
        if most is not None:
            places = [place for rank, place in enumerate(places) if rank < most or self.ids[place] == picked]
        return tuple(
            CandidateScores(
                worker=self.ids[place],
                total=float(self.totals[place]),
                over_kv_ceiling=self.over is not None and bool(self.over[place]),
                scores={
                    name: UNKNOWN if column is None else float(column[place]) for name, column in self.scores
                },
            )
            for place in places
        )


@dataclass(frozen=True, slots=True)
class Chosen:
    """Workers to ask for a lease."""

    candidates: tuple[str, ...]
    """Ids, best first, at least one and at most the strategy's ``keep``."""
    account: Account = field(repr=False, compare=False)

    @property
    def pick(self) -> str:
        return self.candidates[0]

    def explain(self, most: int | None = None) -> Explanation:
        """The account for people: all candidates, or the best ``most`` and the pick."""
        return self.account.explain(self.pick, most)


@dataclass(frozen=True, slots=True)
class Busy:
    """There are workers for the request, but none may take it now: it waits, and no attempt is charged."""

    earliest_s: float | None
    """When a breaker, deferral or refusal next ends; None: only a lease given back can help."""
    account: Account = field(repr=False, compare=False)

    def explain(self) -> Explanation:
        return self.account.explain(None)


@dataclass(frozen=True, slots=True)
class NoWorker:
    """Nothing that runs could take the request, however idle."""

    reason: NoWorkerReason
    account: Account = field(repr=False, compare=False)

    def explain(self) -> Explanation:
        return self.account.explain(None)


Decision: TypeAlias = Chosen | Busy | NoWorker


def decide(need: Need, fleet: FleetModel, strategy: Strategy, rng: Random, now_s: float) -> Decision:
    """Where a request goes. ``now_s`` is Redis' clock; costs some 30 us for a few workers, 150 us for 1,000.

    Changes nothing but the picker's turn: tell ``fleet`` when a lease was taken.
    """
    question = Question(need, fleet, now_s, np.ones(len(fleet), dtype=bool))
    account = Account(fleet.ids, strategy, fleet.refusals.copy())
    emptied = _narrow(question, account)
    match emptied:
        case None:
            return Chosen(_ranked(question, account, rng), account)
        case Emptied.BUSY:
            return Busy(_earliest(question, account), account)
        case Emptied.NONE_READY:
            return NoWorker(NoWorkerReason.NONE_READY, account)
        case Emptied.NOT_SERVED:
            return NoWorker(NoWorkerReason.NOT_SERVED, account)


def _narrow(question: Question, account: Account) -> Emptied | None:
    """Apply the filters in turn; the first that leaves nobody says what that means."""
    left = len(question.fleet)
    if not left:
        return Emptied.NOT_SERVED
    for rule in FILTERS:
        mask = rule.keeps(question)
        if mask is None:
            continue
        mask = question.candidates & mask
        count = int(np.count_nonzero(mask))
        if count < left:
            account.passed.append((rule.name, mask))
            question.candidates = mask
            left = count
        if not count:
            return rule.emptied
    return None


def _ranked(question: Question, account: Account, rng: Random) -> tuple[str, ...]:
    strategy, ids = account.strategy, account.ids
    account.candidates = question.candidates
    totals, over = _weigh(question, account)
    account.totals, account.over = totals, over
    places = np.flatnonzero(question.candidates if over is None else question.candidates & ~over)
    ranked: list[int] = []
    if len(places):
        ballot = Ballot(totals[places], places, ids)
        ranked = places[strategy.picker.order(ballot, rng, strategy.keep)].tolist()
    if over is not None and len(ranked) < strategy.keep:
        places = np.flatnonzero(question.candidates & over)
        ballot = Ballot(totals[places], places, ids)
        ranked += places[_LAST_RESORT.order(ballot, rng, strategy.keep - len(ranked))].tolist()
    return tuple([ids[place] for place in ranked])


def _weigh(question: Question, account: Account) -> tuple[Column, Mask | None]:
    """Every worker's total, and which candidates are at or over the KV ceiling (None: none is)."""
    freshness = question.fleet.freshness(question.now_s)
    free = kv(question)
    totals = np.zeros(len(question.fleet))
    for scorer, share in account.strategy.shares:
        column = free if scorer.score is kv else scorer.score(question)
        if column is not None and scorer.from_load:
            column = settled(column, question, freshness)
        account.scores.append((scorer.name, column))
        totals += share * (UNKNOWN if column is None else column)
    over = _over_ceiling(free, question, freshness, account.strategy.kv_ceiling)
    if over is None:
        return totals, None
    return np.where(over, totals * OVER_CEILING, totals), over


def _over_ceiling(free: Column, question: Question, freshness: Column | None, ceiling: float) -> Mask | None:
    over = question.candidates & (free <= 1.0 - ceiling)
    if freshness is not None and np.count_nonzero(over):
        over &= settled(free, question, freshness) <= 1.0 - ceiling
    return over if np.count_nonzero(over) else None


def _earliest(question: Question, account: Account) -> float | None:
    fleet = question.fleet
    until = np.maximum(np.maximum(fleet.breaker_until, fleet.deferred_until), fleet.refused_until)
    known = until[_places(account) & (until > question.now_s) & (until < np.inf)]
    return float(known.min()) if known.size else None


def _places(account: Account) -> Mask:
    """Whoever could run the request, now or later."""
    standing = {rule.name for rule in FILTERS[:PLACES]}
    masks = [mask for name, mask in account.passed if name in standing]
    return masks[-1] if masks else np.ones(len(account.ids), dtype=bool)
