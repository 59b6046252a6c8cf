"""Whether anybody who took a shard up sent lines again whose results he could have seen. Pure.

A claim reads what is durable when it begins. So a line that was durable before must not be answered by it;
what was in flight when the claim before it died may be answered twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

_STANDING = re.compile(r"claim=(\d+) .*?by=(\S+)")
_PART = re.compile(r"parts/(\d+)/(\d+)\.(.+)\.\w+-\d+\.jsonl")
_SLACK_S = 0.2
"""Clocks of files are coarse, and a name may be seen a moment later than it was written."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """One claim on one shard."""

    shard: int
    number: int
    owner: str


@dataclass(frozen=True, slots=True)
class Part:
    """One durable part: whose it is, when it became durable (seconds since 1970), which lines it holds."""

    claimed: Claimed
    durable_s: float
    lines: frozenset[int]


def claimed_of(path: str) -> Claimed | None:
    """Whose part a path below a batch's folder is; None: of lines that were refused at intake."""
    found = _PART.fullmatch(path)
    return Claimed(int(found[1]), int(found[2]), found[3]) if found else None


class Takeovers:
    """When the claims of one batch began at the earliest, from looks at its shards in Redis."""

    def __init__(self, now_s: float) -> None:
        self._looked_s = now_s
        self._begun_s: dict[Claimed, float] = {}

    def look(self, shards: Mapping[str, str], now_s: float) -> None:
        """See who holds which shard. A claim that is new began after the look before this one."""
        for shard, text in shards.items():
            if standing := _STANDING.match(text):
                claimed = Claimed(int(shard), int(standing[1]), standing[2])
                self._begun_s.setdefault(claimed, self._looked_s)
        self._looked_s = now_s

    def needless(self, parts: Sequence[Part]) -> Iterator[str]:
        """Lines that were answered again although their result was durable, and seen, before; in words."""
        for later in parts:
            begun_s = self._begun_s.get(later.claimed)
            if begun_s is None:
                continue
            for earlier in parts:
                if _precedes(earlier, later) and earlier.durable_s < begun_s - _SLACK_S:
                    for line in sorted(earlier.lines & later.lines):
                        yield f"line {line}: {later.claimed} answered it again, {earlier.claimed} had before"


def _precedes(earlier: Part, later: Part) -> bool:
    return earlier.claimed.shard == later.claimed.shard and earlier.claimed.number < later.claimed.number
