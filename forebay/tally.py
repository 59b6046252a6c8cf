"""Who did what in a batch, counted from its result lines; and how near the time came to the possible. Pure.

Only lines that carry the ``forebay`` key can be counted by worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from dispatcher.batches.results import read_usage
from workers.fleet import WorkerView


@dataclass(slots=True)
class Share:
    """What one worker answered: result lines, tokens that it generated, seconds that they took together.

    ``sent_again``: those of the lines that were sent more than once, to it or to others.
    """

    requests: int = 0
    sent_again: int = 0
    tokens: int = 0
    latency_s: float = 0.0

    @property
    def mean_latency_s(self) -> float | None:
        """Seconds that a request took at the worker; None when it answered none."""
        return self.latency_s / self.requests if self.requests else None


class _Detail(msgspec.Struct):
    worker: str | None = None
    attempts: int = 0
    latency_s: float | None = None


class _Response(msgspec.Struct):
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Line(msgspec.Struct):
    response: _Response | None = None
    forebay: _Detail | None = None


_decode = msgspec.json.Decoder(_Line).decode


def count(lines: Iterable[bytes]) -> dict[str, Share]:
    """Result lines by worker; those that name none are left out."""
    shares: dict[str, Share] = {}
    for data in lines:
        line = _decode(data)
        if line.forebay is None or line.forebay.worker is None:
            continue
        share = shares.setdefault(line.forebay.worker, Share())
        share.requests += 1
        share.sent_again += line.forebay.attempts > 1
        share.latency_s += line.forebay.latency_s or 0.0
        if line.response is not None:
            share.tokens += read_usage(bytes(line.response.body)).completion_tokens or 0
    return shares


def estimated_capacity(workers: Sequence[WorkerView]) -> float | None:
    """Tokens per second that the whole fleet can generate, as the monitor estimates it from what it saw.

    None when it has no estimate for some worker.
    """
    rates = [worker.load.capacity_rate if worker.load else None for worker in workers]
    known = [rate for rate in rates if rate]
    return sum(known) if known and len(known) == len(rates) else None


def lower_bound_s(tokens: int, capacity_tokens_per_s: float) -> float:
    """The least time in which a fleet of that capacity can generate so many tokens: full, to the last."""
    return tokens / capacity_tokens_per_s
