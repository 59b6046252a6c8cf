"""Leases as they are asked for, granted, refused and ended: what goes to Redis' scripts and what comes back.

A lease is the right of one request in flight to occupy a worker. The steps themselves are ``lua/acquire``,
``lua/settle`` and ``lua/renew``; they are called by ``store``. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from workers.breaker import Verdict


class Ask(msgspec.Struct, frozen=True):
    """One attempt that wants a lease, with the ids of its candidates, best first."""

    lease: str
    candidates: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease was taken. ``epoch`` goes back with the end of the attempt."""

    worker_id: str
    epoch: int
    trial: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """One worker's no: why, and from when on asking again may help (0: unknown)."""

    worker_id: str
    why: str
    again_at: float


@dataclass(frozen=True, slots=True)
class End:
    """How one attempt ended, for its worker."""

    lease: str
    worker_id: str
    epoch: int
    verdict: Verdict
    reason: str = ""
    defer_s: float = 0.0
    halve: bool = False


def lease_id(owner: str, serial: int, tokens: int) -> str:
    """A lease's id: who holds it, which attempt, and how many tokens it is expected to cost."""
    return f"{owner}:{serial}|{max(0, tokens)}"


def asked(asks: Sequence[Ask]) -> tuple[list[str], list[dict[str, object]]]:
    """The workers that are asked for, and each ask with its candidates by their number among them, from 1."""
    workers, numbers = _numbered(worker for ask in asks for worker in ask.candidates)
    return workers, [
        {"id": ask.lease, "candidates": [numbers[worker] for worker in ask.candidates]} for ask in asks
    ]


def answered(text: str, workers: Sequence[str]) -> list[Grant | tuple[Refusal, ...]]:
    """What ``acquire`` answered to each ask."""
    return [_to_grant(answer, workers) for answer in msgspec.json.decode(text)]


def ended(
    ends: Sequence[End], jitter: Callable[[], float]
) -> tuple[list[str], list[dict[str, str | float | bool]]]:
    """The workers of these attempts, and each end with its worker's number among them, from 1.

    ``jitter``: a part, -1.0 to 1.0, by which the time that a breaker stays open differs from its policy.
    """
    workers, numbers = _numbered(end.worker_id for end in ends)
    return workers, [
        {
            "id": end.lease,
            "worker": numbers[end.worker_id],
            "epoch": end.epoch,
            "verdict": end.verdict.value,
            "reason": end.reason,
            "jitter": jitter(),
            "defer_s": end.defer_s,
            "halve": end.halve,
        }
        for end in ends
    ]


def _numbered(names: Iterable[str]) -> tuple[list[str], dict[str, int]]:
    numbers: dict[str, int] = {}
    for name in names:
        numbers.setdefault(name, len(numbers) + 1)
    return list(numbers), numbers


def _to_grant(answer: Mapping[str, object], workers: Sequence[str]) -> Grant | tuple[Refusal, ...]:
    match answer:
        case {"worker": int(number), "epoch": int(epoch), "trial": bool(trial)}:
            return Grant(workers[number - 1], epoch, trial)
        case {"refused": list(refused)}:
            return tuple(Refusal(workers[int(n) - 1], str(why), float(at)) for n, why, at in refused)
        case {"refused": dict()}:  # how Lua encodes an empty list
            return ()
        case _:
            raise AssertionError(f"acquire answered {answer!r}")
