"""What is replayed: requests in the order of a batch's plan, and how long each answer gets.

Reading a batch file belongs to the command, running the requests to `replay`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from dispatcher.batches.plan import PlannedRequest, Rows, sending_order, with_scouts
from dispatcher.batches.shards import cut
from dispatcher.scheduler.question import Need

_PROMPT_TOKENS = 16
"""Of a request that is made up."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal lengths of answers, in tokens; `most` cuts them. Whoever asks for none gets this ceiling."""

    median: float = 128.0
    sigma: float = 0.8
    most: int = 2048

    def draw(self, rng: Random) -> int:
        """One length, 1 or more."""
        return max(1, min(self.most, round(self.median * rng.lognormvariate(0.0, self.sigma))))


@dataclass(frozen=True, slots=True)
class Request:
    """One request: what a dispatcher knows of it, and the tokens that its answer will have."""

    need: Need
    answer_tokens: int
    urgency: int = 0
    batch_id: str | None = None
    """Batches take turns; None: it is of the only one."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of sending, at least one, and how that order is cut into shards.

    `arrivals`: when each comes, in seconds from the start, never earlier than the one before; then shards do
    not matter. None: all are there from the start, and come in shards as there is room.
    """

    requests: Sequence[Request]
    shards: Sequence[int]
    arrivals: Sequence[float] | None = None

    @property
    def tokens(self) -> int:
        """Tokens that all answers have together."""
        return sum(request.answer_tokens for request in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest answer."""
        return max(request.answer_tokens for request in self.requests)


def drawn(lengths: Lengths, count: int, rng: Random, *, foretold: bool, slots: int) -> Workload:
    """Make requests up. Foretold: each asks for as many tokens as it gets; else all for the same ceiling."""
    rows = Rows()
    model = rows.model_index(None) or 0
    answers = [lengths.draw(rng) for _ in range(count)]
    for line, answer in enumerate(answers):
        asked = answer if foretold else lengths.most
        rows.add(line, 0, 0, model, _PROMPT_TOKENS, asked, _PROMPT_TOKENS + asked, line, line)
    table = rows.table()
    order = with_scouts(sending_order(table), slots).tolist()
    asked_tokens = table["asked_tokens"].tolist()
    requests = [Request(_made_up(asked_tokens[line]), answers[line]) for line in order]
    return Workload(requests, cut(count, slots))


def _made_up(asked_tokens: int) -> Need:
    return Need(None, _PROMPT_TOKENS, asked_tokens, _PROMPT_TOKENS + asked_tokens)


def planned(plan: Sequence[PlannedRequest], lengths: Lengths | None, *, seed: int, slots: int) -> Workload:
    """Give a batch's requests answers: as long as they ask for, or drawn, cut where they ask for less.

    `lengths` None: as asked; who names no ceiling gets what the plan expects. A drawn length depends on seed
    and line only, not on the plan.
    """
    shared = {left.prefix_key for left, right in pairwise(plan) if left.prefix_key == right.prefix_key}
    requests = [
        Request(_planned_need(row, shared=row.prefix_key in shared), _answer(row, lengths, seed))
        for row in plan
    ]
    return Workload(requests, cut(len(requests), slots))


def for_strategy(workload: Workload, name: str) -> Workload:
    """Let every request go by a strategy; what the policy sends by long-context goes by that all the same."""
    requests = [replace(request, need=replace(request.need, strategy=name)) for request in workload.requests]
    return replace(workload, requests=requests)


def _planned_need(row: PlannedRequest, *, shared: bool) -> Need:
    """The need as a dispatcher has it: only a beginning that neighbours share ties a request to caches."""
    prefix_key = f"{row.prefix_key:016x}" if shared else None
    return Need(None, row.prompt_tokens, row.asked_tokens, row.cost_tokens, prefix_key=prefix_key)


def _answer(row: PlannedRequest, lengths: Lengths | None, seed: int) -> int:
    expected = row.cost_tokens - row.prompt_tokens if row.asked_tokens is None else row.asked_tokens
    if lengths is None:
        return max(1, expected)
    ceiling = math.inf if row.asked_tokens is None else max(1, row.asked_tokens)
    return int(min(ceiling, lengths.draw(Random(f"{seed}:{row.line}"))))
