"""Where the adaptive limit goes, in virtual time: how soon it knows an engine's slots, whom it makes wait.

``python benchmarks/limits.py [--json] [--seed N]``. Pure and discrete: the rule is the monitor's own, the
engine is the simulator's batching model, and the batch always has another request.

The first table shows engines that tell their slots, engines that tell only what runs and waits, and silent
ones, which tell nothing; ``waited`` is the time that the batch's requests of the first two minutes spent in
the engine's queue, where no other engine can take them. The second shows ``share = spare`` beside interactive
requests that come as they like and fill half of the engine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from forebay.simulator.batching import Batch, Finished, Pace, Sequence
from monitor.limiting import Limiter
from workers.breaker import BreakerState
from workers.evidence import NONE
from workers.fleet import WorkerState, WorkerView
from workers.limits import DEFAULT_LIMIT, PRESS, LimitDecision, LimitPolicy, Share, queue_target
from workers.load import Load, LoadSource

POLL_S = 1.0
FAST_S = 0.25
PROMPT = 200
TOKENS_PER_S = 50.0
KV_TOKENS = 10_000_000
ALL = LimitPolicy()
BEFORE = LimitPolicy(growth=2.0, initial=16)
"""The rule as it was before the monitor polled an unknown engine fast."""


@dataclass(frozen=True, slots=True)
class Case:
    """One engine and who uses it.

    ``told``: it says its slots. ``silent``: it says nothing at all. ``interactive``: the part of it that
    others fill on average.
    """

    name: str
    slots: int
    told: bool = False
    silent: bool = False
    policy: LimitPolicy = ALL
    learns_fast: bool = True
    interactive: float = 0.0
    median_tokens: float = 256.0
    seconds: float = 120.0


@dataclass(slots=True)
class Outcome:
    """How it went. Shares are 0 to 1, of the time or of the engine."""

    settled_s: float | None = None
    """From when on the limit stays between the slots and the queue's target above; None: it never does."""
    waited_s: float = 0.0
    most_waiting: int = 0
    used: float = 0.0
    used_by_batch: float = 0.0
    interactive_waiting: float = 0.0
    """The part of the time in which an interactive request waits."""
    interactive_waited: float = 0.0
    """The part of the interactive requests that wait at all."""
    limits: list[int] | None = None


class Simulation:
    """One engine, one limiter, one batch without end."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self.rng = random.Random(seed)
        self.engine = Batch(Pace(TOKENS_PER_S, case.slots, 1.0, 5000.0, KV_TOKENS))
        self.limiter = Limiter(case.policy)
        self.limit, self.version, self.limit_since = case.policy.initial, 1, 0.0
        if case.silent:
            self.limit = DEFAULT_LIMIT
        self.evidence = NONE
        self.now_s = 0.0
        self.keys = 0
        self.ours: dict[int, float] = {}
        self.others: dict[int, float] = {}
        self.outcome = Outcome()
        self.trace: list[tuple[float, int]] = []
        self.late = self.arrived = 0
        self.area = {"all": 0.0, "ours": 0.0, "waiting": 0.0}

    # -- what happens -------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Let it run to its end."""
        poll_s, arrival_s = 0.0, self._next_arrival()
        while self.now_s < self.case.seconds:
            end_s = self.engine.next_event_s()
            self._move(min(poll_s, arrival_s, math.inf if end_s is None else end_s, self.case.seconds))
            if self.now_s >= arrival_s:
                self._arrive()
                arrival_s = self._next_arrival()
            if self.now_s >= poll_s:
                poll_s = self.now_s + self._poll()
            self._fill()
        return self._sum_up()

    def _move(self, to_s: float) -> None:
        span_s = max(0.0, to_s - self.now_s)
        waiting = self.engine.waiting
        others = len(self.others)
        self.area["all"] += span_s * self.engine.running
        self.area["ours"] += span_s * max(0, self.engine.running - others)
        self.area["waiting"] += span_s * (waiting > 0 and others > 0)
        self.outcome.most_waiting = max(self.outcome.most_waiting, waiting)
        self.now_s = to_s
        for finished in self.engine.advance(to_s):
            self._finish(finished)

    def _finish(self, finished: Finished) -> None:
        key = finished.sequence.key
        if key in self.ours:
            begun_s = self.ours.pop(key)
            self.outcome.waited_s += finished.started_s - begun_s
            if begun_s >= self.limit_since:
                tokens = finished.sequence.completion_tokens
                self.evidence = self.evidence.with_answer(tokens, self.now_s - begun_s, self.limit)
        else:
            self.late += finished.started_s > self.others.pop(key) + 1e-9

    def _fill(self) -> None:
        while len(self.ours) < self.limit:
            self.ours[self._submit()] = self.now_s

    def _arrive(self) -> None:
        self.arrived += 1
        self.others[self._submit()] = self.now_s

    def _submit(self) -> int:
        self.keys += 1
        tokens = max(1, round(self.case.median_tokens * self.rng.lognormvariate(0, 0.8)))
        self.engine.submit(Sequence(self.keys, PROMPT, tokens), self.now_s)
        return self.keys

    def _next_arrival(self) -> float:
        if not self.case.interactive:
            return math.inf
        # Of an engine this full a request takes about so long; the mean of the lognormal counts.
        mean_s = self.case.median_tokens * math.exp(0.32) / TOKENS_PER_S * 1.8
        rate = self.case.interactive * self.case.slots / mean_s
        return self.now_s + self.rng.expovariate(rate)

    # -- what the monitor does ----------------------------------------------------------------------------

    def _poll(self) -> float:
        """Read, decide; returns the time until the next poll."""
        view = self._view()
        decision = self._decide(view)
        if decision.value != self.limit or decision.anew:
            self.limit, self.version, self.limit_since = decision.value, self.version + 1, self.now_s
            self.evidence = NONE
        self.trace.append((self.now_s, self.limit))
        pressed = view.leases >= PRESS * view.limit
        learns = self.case.learns_fast and self.limiter.hurries and not self.case.silent
        return FAST_S if pressed and (self.case.told or learns) else POLL_S

    def _decide(self, view: WorkerView) -> LimitDecision:
        if self.case.silent:
            return self.limiter.decide_blind(view, self.now_s)
        load = Load(
            source=LoadSource.NATIVE if self.case.told else LoadSource.METRICS,
            sampled_at=self.now_s,
            received_at=self.now_s,
            running=self.engine.running,
            waiting=self.engine.waiting,
            kv_usage_max=0.1,
            max_running=self.case.slots if self.case.told else None,
        )
        return self.limiter.decide(view, load)

    def _view(self) -> WorkerView:
        return WorkerView(
            id="engine:1", url="http://engine:1", runtime=None, state=WorkerState.READY, incarnation=1,
            models=frozenset(), max_model_len=None, max_running=None, weight=1.0, api_key_env=None,
            version=None, load=None, limit=self.limit, leases=len(self.ours), leases_since_sample=0,
            tokens_since_sample=0, breaker=BreakerState.CLOSED, breaker_open_until=0.0, deferred_until=0.0,
            limit_version=self.version, limit_since=self.limit_since, evidence=self.evidence,
        )  # fmt: skip

    # -- what came of it ----------------------------------------------------------------------------------

    def _sum_up(self) -> Outcome:
        slots, seconds = self.case.slots, self.case.seconds
        outcome = self.outcome
        # Those still in the queue have waited, too.
        outcome.waited_s += sum(
            self.now_s - begun
            for key, begun in self.ours.items()
            if key in self.engine._waiting  # noqa: SLF001 - the model keeps its queue to itself
        )
        outcome.settled_s = self._settled()
        outcome.used = self.area["all"] / (slots * seconds)
        outcome.used_by_batch = self.area["ours"] / (slots * seconds)
        outcome.interactive_waiting = self.area["waiting"] / seconds
        outcome.interactive_waited = self.late / self.arrived if self.arrived else 0.0
        outcome.limits = [limit for _, limit in self.trace]
        return outcome

    def _settled(self) -> float | None:
        slots = self.case.slots
        settled = None
        for at_s, limit in self.trace:
            if slots <= limit <= slots + queue_target(slots) + 1:
                settled = at_s if settled is None else settled
            else:
                settled = None
        return settled


def learning_cases() -> list[Case]:
    """Engines of four sizes: told, silent, and untold, by the rule as it is and as it was."""
    cases = []
    for slots in (4, 8, 32, 256):
        cases += [
            Case(f"{slots} slots, told", slots, told=True),
            Case(f"{slots} slots, untold", slots),
            Case(f"{slots} slots, silent", slots, silent=True),
            Case(f"{slots} slots, untold, doubling from 16 at 1 s", slots, policy=BEFORE, learns_fast=False),
        ]
    return cases


def spare_cases() -> list[Case]:
    """An interactive half, and a batch that takes the rest: all of it, or only what is spare."""
    cases = []
    for slots, told in ((32, True), (32, False), (256, True), (256, False)):
        for share in Share:
            name = f"{slots} slots, {'told' if told else 'untold'}, share = {share}"
            policy = LimitPolicy(share=share)
            cases.append(
                Case(name, slots, told, policy=policy, interactive=0.5, seconds=600.0, median_tokens=128.0)
            )
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    found = {case.name: Simulation(case, options.seed).run() for case in learning_cases() + spare_cases()}
    if options.json:
        print(json.dumps({name: asdict(outcome) for name, outcome in found.items()}))
        return
    print(f"{'':<44}{'settled':>9}{'waited':>11}{'most waiting':>14}{'used':>7}   limits")
    for case in learning_cases():
        row = found[case.name]
        settled = "never" if row.settled_s is None else f"{row.settled_s:.1f} s"
        limits = " ".join(
            str(limit) for limit, _ in itertools.islice(itertools.groupby(row.limits or []), 12)
        )
        numbers = f"{settled:>9}{row.waited_s:>9.0f} s{row.most_waiting:>14}{row.used:>7.0%}"
        print(f"{case.name:<44}{numbers}   {limits}")
    print(f"\n{'':<44}{'interactive waits':>18}{'of the time':>13}{'batch uses':>12}{'all':>7}")
    for case in spare_cases():
        row = found[case.name]
        print(
            f"{case.name:<44}{row.interactive_waited:>18.1%}{row.interactive_waiting:>13.1%}"
            f"{row.used_by_batch:>12.0%}{row.used:>7.0%}"
        )


if __name__ == "__main__":
    main()
