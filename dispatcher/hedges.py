"""Which running requests get a second attempt on a faster worker, when nothing is left to start. Pure.

How long an answer gets is rarely known, so the last long answers may sit on slow workers while fast ones
idle; longest first cannot help. How two attempts of a request share one end is `race`'s subject, what they
may cost `hedging`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dispatcher.scheduler.outlook import stands_still

SLOWER = 1.2
"""A second attempt goes to a worker at least so many times as fast, per sequence."""
_WORTH_IT = 0.8
"""It must be expected to end at this part of the first's remaining time."""
_NEAR_THE_TOP = 0.8
"""Where lengths are not foretold, only workers so nearly as fast as the fastest take second attempts: its
slots come free in a moment, a request gets but one, and it may be the longest of all."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running request without a second attempt. `tokens`: what its answer may have at most; `may`: the
    workers that could take it.
    """

    lease: str
    worker_id: str
    since_s: float
    tokens: int
    may: frozenset[str]


@dataclass(frozen=True, slots=True)
class Hedge:
    """Give this request a second attempt there. `idle`: the first seems to stand still, and costs nothing."""

    lease: str
    worker_id: str
    idle: bool = False


def choose(
    running: Iterable[Candidate],
    free: Mapping[str, int],
    speeds: Mapping[str, float],
    now_s: float,
    *,
    foretold: bool,
) -> list[Hedge]:
    """Second attempts for free slots of faster workers: the fastest slot to what the slowest worker holds.

    Among those of one worker the least progressed goes first: its second attempt repeats the least work. A
    worker whose speed is unknown comes before the slowest: it may hang, as may any that holds a request for
    much longer than its longest answer could take.

    `free`: slots by worker. `speeds`: tokens per second and sequence, of the workers whose speed is known.
    `foretold`: answers get about as long as their ceiling says, so what is nearly done is left alone.
    """
    running = list(running)
    left = {worker: count for worker, count in free.items() if worker in speeds}
    fastest_first = {
        may: _fastest_first(left, may, speeds, 0.0 if foretold else _least(running, free, may, speeds, now_s))
        for may in {one.may for one in running}
    }
    waiting = sorted(running, key=lambda one: (speeds.get(one.worker_id, 0.0), _progress(one, speeds, now_s)))
    hedges: list[Hedge] = []
    for one in waiting:
        idle = _stands_still(one, speeds.get(one.worker_id), now_s)
        worker = _rescuer(one, left, speeds) if idle else _fastest_left(fastest_first[one.may], left)
        if worker is not None and _is_worth_it(one, worker, speeds, now_s, foretold=foretold, idle=idle):
            hedges.append(Hedge(one.lease, worker, idle))
            left[worker] -= 1
    return hedges


def _fastest_left(workers: list[str], left: Mapping[str, int]) -> str | None:
    """The last of them that has a slot left; those after it, which have none, are taken off."""
    while workers and not left[workers[-1]]:
        workers.pop()
    return workers[-1] if workers else None


def _rescuer(one: Candidate, left: Mapping[str, int], speeds: Mapping[str, float]) -> str | None:
    """The fastest other worker with a slot left, however slow: nothing is lost by it."""
    others = (worker for worker, count in left.items() if count and worker in one.may)
    return max((worker for worker in others if worker != one.worker_id), key=speeds.__getitem__, default=None)


def _fastest_first(
    free: Iterable[str], may: frozenset[str], speeds: Mapping[str, float], least: float
) -> list[str]:
    """Those of them that may be taken and are fast enough; the fastest is last, to be taken off the end."""
    enough = (worker for worker in free if worker in may and speeds[worker] >= least)
    return sorted(enough, key=lambda worker: speeds[worker])


def _least(
    running: Iterable[Candidate],
    free: Mapping[str, int],
    may: frozenset[str],
    speeds: Mapping[str, float],
    now_s: float,
) -> float:
    """How fast a worker must be where lengths are not foretold: nearly as the fastest that is free, or works
    on one of these; 0: none is known.
    """
    at_work = {one.worker_id for one in running if not _stands_still(one, speeds.get(one.worker_id), now_s)}
    top = max((speeds[worker] for worker in may & {*free, *at_work} if worker in speeds), default=0.0)
    return _NEAR_THE_TOP * top


def _progress(one: Candidate, speeds: Mapping[str, float], now_s: float) -> float:
    return (now_s - one.since_s) * speeds.get(one.worker_id, 0.0)


def _stands_still(one: Candidate, speed: float | None, now_s: float) -> bool:
    """Whether a request should have ended long ago, however long its answer; of unknown speed: it may be."""
    return speed is None or _outlasts(one, speed, now_s)


def _outlasts(one: Candidate, speed: float, now_s: float) -> bool:
    return stands_still(one.since_s, one.tokens, speed, now_s)


def _is_worth_it(
    one: Candidate, worker: str, speeds: Mapping[str, float], now_s: float, *, foretold: bool, idle: bool
) -> bool:
    if idle:
        return _outlasts(one, speeds[worker], now_s)
    own = speeds[one.worker_id]
    if speeds[worker] < SLOWER * own:
        return False
    if not foretold:
        return True
    whole_s = one.tokens / own
    left_s = one.since_s + whole_s - now_s
    if left_s < 0:  # overdue: it waits in the engine's own queue, or the worker has slowed down
        left_s = whole_s
    return one.tokens / speeds[worker] < _WORTH_IT * left_s
