"""What came of a replay, in numbers: makespan over the lower bound, waiting, shares.

How it is printed is `forebay.cli.simulate_policy`'s subject.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forebay.policy.engine import EngineSpec
from forebay.policy.replay import Attempt, Replayed
from forebay.policy.workload import Workload


@dataclass(frozen=True, slots=True)
class WorkerShare:
    """What one worker did. Shares are 0.0 to 1.0: of all requests, of all tokens, of its slots' time."""

    worker: str
    speed: float
    slots: int
    requests: int
    tokens: int
    request_share: float
    token_share: float
    busy: float


@dataclass(frozen=True, slots=True)
class Report:
    """One strategy's run. Times are in seconds of the model, counted from the start of the batch.

    `waited`: from a request's coming, which for a batch is the start, to its first lease. `second_tokens`:
    written by attempts that lost; None: unknown.
    `busy`: mean share of all slots' time that was used, 0.0 to 1.0.
    """

    strategy: str
    requests: int
    tokens: int
    makespan_s: float
    lower_bound_s: float
    ratio: float
    waited_mean_s: float
    waited_p50_s: float
    waited_p99_s: float
    second_attempts: int
    second_tokens: int | None
    busy: float
    workers: Sequence[WorkerShare]


def lower_bound_s(workload: Workload, fleet: Sequence[EngineSpec]) -> float:
    """The time that no scheduler beats: all tokens at full capacity, or the longest request alone at best; of
    requests that come by and by, those that are yet to come.
    """
    capacity = sum(engine.capacity for engine in fleet)
    kinds = {replace(engine, name="") for engine in fleet}
    arrivals = workload.arrivals or [0.0] * len(workload.requests)
    bound_s, tokens = 0.0, 0
    for request, arrival_s in zip(reversed(workload.requests), reversed(arrivals), strict=True):
        tokens += request.answer_tokens
        alone_s = min(engine.takes_s(request.need.prompt_tokens, request.answer_tokens) for engine in kinds)
        bound_s = max(bound_s, arrival_s + max(alone_s, tokens / capacity))
    return bound_s


def summed_up(strategy: str, workload: Workload, fleet: Sequence[EngineSpec], replayed: Replayed) -> Report:
    """Reduce a whole run to its report."""
    bound_s = lower_bound_s(workload, fleet)
    waited = np.array([ticket.leased_s - ticket.joined_s for ticket in replayed.tickets])
    attempts = [attempt for ticket in replayed.tickets for attempt in ticket.attempts]
    workers = _shares(attempts, replayed)
    slots = sum(engine.slots for engine in fleet)
    return Report(
        strategy=strategy,
        requests=len(replayed.tickets),
        tokens=workload.tokens,
        makespan_s=replayed.elapsed_s,
        lower_bound_s=bound_s,
        ratio=replayed.elapsed_s / bound_s,
        waited_mean_s=float(waited.mean()),
        waited_p50_s=float(np.percentile(waited, 50)),
        waited_p99_s=float(np.percentile(waited, 99)),
        second_attempts=sum(attempt.second for attempt in attempts),
        second_tokens=sum(attempt.tokens for attempt in attempts if not attempt.won),
        busy=sum(share.busy * share.slots for share in workers) / slots,
        workers=workers,
    )


def _shares(attempts: Sequence[Attempt], replayed: Replayed) -> list[WorkerShare]:
    requests = dict.fromkeys((worker.name for worker in replayed.workers), 0)
    tokens = requests.copy()
    for attempt in attempts:
        if attempt.won:
            requests[attempt.worker.name] += 1
            tokens[attempt.worker.name] += attempt.tokens
    all_requests, all_tokens = sum(requests.values()), sum(tokens.values())
    return [
        WorkerShare(
            worker=worker.name,
            speed=(spec := worker.engine.spec).speed,
            slots=spec.slots,
            requests=requests[worker.name],
            tokens=tokens[worker.name],
            request_share=requests[worker.name] / all_requests,
            token_share=tokens[worker.name] / all_tokens,
            busy=worker.engine.busy_slot_s / (spec.slots * replayed.elapsed_s),
        )
        for worker in replayed.workers
    ]
