"""Decision records as a workload: requests as they were asked and answered, and when; and what happened.

Only what was recorded is known. A record of a sample stands for several requests: it is replayed that often,
its copies coming between it and the next. What records are is `dispatcher.records`' subject. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dispatcher.batches.shards import cut
from dispatcher.outcome import Label
from dispatcher.records import DecisionRecord
from dispatcher.scheduler.question import Need
from forebay.policy.engine import EngineSpec
from forebay.policy.report import Report, WorkerShare, lower_bound_s
from forebay.policy.workload import Request, Workload
from workers.errors import SettingsError

HAPPENED = "(what happened)"
AS_RECORDED = "(as recorded)"
"""Among strategies: what the records tell, and a replay in which each request goes by its own."""


@dataclass(frozen=True, slots=True)
class _Told:
    """One request that was answered: its attempts, oldest first, and the one whose answer counted."""

    attempts: Sequence[DecisionRecord]
    won: DecisionRecord

    @property
    def weight(self) -> float:
        """For how many requests it stands: what is always recorded, as a failure is, for itself alone."""
        return 1.0 / max(record.sample for record in self.attempts)

    @property
    def came_at(self) -> float:
        first = self.attempts[0]
        return first.at - (first.waited_s or 0.0)

    @property
    def ended_at(self) -> float:
        return self.won.at + self.won.elapsed_s

    @property
    def answer_tokens(self) -> int:
        return max(1, self.won.answer_tokens or 0)

    def request(self) -> Request:
        first = self.attempts[0]
        assert first.prompt_tokens is not None
        assert first.cost_tokens is not None
        need = Need(None, first.prompt_tokens, first.asked_tokens, first.cost_tokens, first.strategy)
        return Request(need, self.answer_tokens, first.urgency or 0, first.batch_id)


@dataclass(frozen=True, slots=True)
class Recorded:
    """Records, read. `requests`: those recorded; `stand_for`: how many they stand for; `left_out`: those
    without an answer, or recorded without what a replay needs.
    """

    told: Sequence[_Told]
    left_out: int

    @property
    def requests(self) -> int:
        return len(self.told)

    @property
    def stand_for(self) -> int:
        return round(sum(one.weight for one in self.told))

    @property
    def models(self) -> int:
        """How many models were asked for, counting "any" as one."""
        return len({one.won.model for one in self.told})

    def notes(self, lines: int | None, replayed: Workload) -> list[str]:
        """How much this says. `lines`: of the batch; None: there is no one batch."""
        whose = "" if lines is None else f" of {lines:,} lines"
        told = [f"{self.requests:,} answered requests{whose} are recorded"]
        if self.stand_for > self.requests:
            told.append(
                f"the record is a sample that stands for {self.stand_for:,}: so many are replayed, copies of "
                "a request coming between it and the next; slots are estimated"
            )
        if self.left_out:
            told.append(f"{self.left_out:,} more have no answer, or lack tokens, and are left out")
        if self.models > 1:
            told.append(f"they are for {self.models} models, which the replay has every worker serve")
        if replayed.arrivals is not None:
            told.append(
                "they come when they came: lines of a batch when a dispatcher had room, so that no replay "
                "ends much sooner; --at-once has all come at the start"
            )
        return told

    def fleet(self) -> list[EngineSpec]:
        """The workers that answered: the speed of their answers, and as many slots as were taken at once."""
        by_worker: dict[str, list[tuple[DecisionRecord, float]]] = defaultdict(list)
        for one in self.told:
            by_worker[one.won.worker].append((one.won, one.weight))
        return [_engine(name, by_worker[name]) for name in sorted(by_worker)]

    def workload(self, *, at_once: bool, slots: int) -> Workload:
        """The requests, in the order in which they came. `at_once`: all from the start, as of one file."""
        starts = [one.came_at for one in self.told]
        spans = [later - sooner for sooner, later in pairwise(starts)] + [0.0]
        requests: list[Request] = []
        arrivals: list[float] = []
        owed = 0.0
        for one, start, span in zip(self.told, starts, spans, strict=True):
            owed += one.weight
            copies = max(0, round(owed))
            owed -= copies
            requests += [one.request()] * copies
            arrivals += [start - starts[0] + span * number / copies for number in range(copies)]
        return Workload(requests, cut(len(requests), slots), None if at_once else arrivals)

    def as_it_was(self, workload: Workload, fleet: Sequence[EngineSpec]) -> Report:
        """What happened, as a report; the bound is that of `workload` and `fleet`, which are replayed."""
        weights = np.array([one.weight for one in self.told])
        waited = np.array([one.attempts[0].waited_s or 0.0 for one in self.told])
        elapsed_s = max(one.ended_at for one in self.told) - self.told[0].came_at
        bound_s = lower_bound_s(workload, fleet)
        workers = self._shares(elapsed_s)
        seconds = sum(any(record.beside for record in one.attempts) for one in self.told)
        return Report(
            strategy=HAPPENED,
            requests=self.stand_for,
            tokens=round(sum(one.answer_tokens * one.weight for one in self.told)),
            makespan_s=elapsed_s,
            lower_bound_s=bound_s,
            ratio=elapsed_s / bound_s,
            waited_mean_s=float(np.average(waited, weights=weights)),
            waited_p50_s=_percentile(waited, weights, 0.5),
            waited_p99_s=_percentile(waited, weights, 0.99),
            second_attempts=seconds,
            second_tokens=0 if not seconds else None,
            busy=sum(one.busy * one.slots for one in workers) / sum(one.slots for one in workers),
            workers=workers,
        )

    def _shares(self, elapsed_s: float) -> list[WorkerShare]:
        requests: dict[str, float] = defaultdict(float)
        tokens: dict[str, float] = defaultdict(float)
        taken_s: dict[str, float] = defaultdict(float)
        for one in self.told:
            requests[one.won.worker] += one.weight
            tokens[one.won.worker] += one.weight * one.answer_tokens
            taken_s[one.won.worker] += one.weight * one.won.elapsed_s
        return [
            WorkerShare(
                worker=engine.name,
                speed=engine.speed,
                slots=engine.slots,
                requests=round(requests[engine.name]),
                tokens=round(tokens[engine.name]),
                request_share=requests[engine.name] / sum(requests.values()),
                token_share=tokens[engine.name] / sum(tokens.values()),
                busy=min(1.0, taken_s[engine.name] / (engine.slots * elapsed_s)),
            )
            for engine in self.fleet()
        ]


def read(records: Iterable[DecisionRecord]) -> Recorded:
    """Make sense of records. Raises SettingsError when no request among them can be replayed."""
    by_request: dict[str, list[DecisionRecord]] = defaultdict(list)
    for record in records:
        by_request[record.request_id].append(record)
    found = [_told(attempts) for attempts in by_request.values()]
    told = sorted((one for one in found if one is not None), key=lambda one: one.came_at)
    if not found:
        raise SettingsError("no decision is recorded there: nothing was sent, or its records have gone")
    if not told:
        raise SettingsError(
            f"of {len(found):,} recorded requests none can be replayed: they have no answer, or their tokens "
            "were not recorded"
        )
    return Recorded(told, len(found) - len(told))


def _told(attempts: Sequence[DecisionRecord]) -> _Told | None:
    attempts = sorted(attempts, key=lambda record: record.attempt)
    won = next((record for record in attempts if record.outcome is Label.OK), None)
    first = attempts[0]
    if won is None or won.answer_tokens is None or None in (first.prompt_tokens, first.cost_tokens):
        return None
    return _Told(attempts, won)


def _engine(name: str, answered: Sequence[tuple[DecisionRecord, float]]) -> EngineSpec:
    tokens = sum(max(1, record.answer_tokens or 0) for record, _ in answered)
    taken_s = sum(record.elapsed_s for record, _ in answered)
    return EngineSpec(speed=tokens / max(taken_s, 1e-6), slots=_most_at_once(answered), name=name)


def _most_at_once(answered: Sequence[tuple[DecisionRecord, float]]) -> int:
    """Ends go before the starts of the same moment: one slot may have served both."""
    moments = [(record.at, weight) for record, weight in answered]
    moments += [(record.at + record.elapsed_s, -weight) for record, weight in answered]
    now = most = 0.0
    for _, change in sorted(moments):
        now += change
        most = max(most, now)
    return max(1, round(most))


def _percentile(values: np.ndarray, weights: np.ndarray, part: float) -> float:
    order = values.argsort()
    reached = weights[order].cumsum()
    return float(values[order][np.searchsorted(reached, part * reached[-1])])


def check_strategies(workload: Workload, known: Container[str]) -> None:
    """Raises SettingsError for requests that went by a strategy which is not known."""
    used = {one.need.strategy for one in workload.requests if one.need.strategy}
    if unknown := sorted(name for name in used if name not in known):
        raise SettingsError(
            f"recorded requests went by {', '.join(unknown)}, which the policy does not have; give it with "
            "--policy, or say --strategy"
        )
