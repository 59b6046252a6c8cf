"""What is sent next of a shard whose claims keep dying, so that the line that kills them is found.

A claim died when its shard was claimed anew while nobody had said that it ended. From the third death on the
shard runs carefully: what is left is sent in groups, one at a time, each noted before it is sent. The group
that was noted last is under suspicion, and half of it is sent first; so a killer is alone in its group after
about log2(lines) deaths, and given up after some more.

Pure. How deaths are counted is the subject of the Lua steps, sending that of `dispatcher.shard`. A line goes
here by its position: its place in its shard's part of the plan, from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

CAREFUL_AFTER = 3
"""Deaths of a shard's claims from which on it runs carefully."""
LONE_DEATHS = 3
"""Deaths that one line is given up after, each while nothing else was being sent by its dispatcher. Not one:
somebody may have killed the dispatcher for reasons of his own."""


@dataclass(frozen=True, slots=True)
class Past:
    """What befell a shard's earlier claims, as far as the ledger remembers.

    `died` counts claims that died, up to 8. `group` is the one noted last, None: none was. `alone` counts the
    claims that died while that group was a single line, and it was being sent alone.
    """

    died: int = 0
    group: range | None = None
    alone: int = 0

    @property
    def careful(self) -> bool:
        """Whether the shard has to be run in groups."""
        return self.died >= CAREFUL_AFTER

    @classmethod
    def read(cls, fields: Mapping[str, str]) -> Self:
        """Read the fields `died=2,5`, `group=10-19@5` (the claim that noted it) and `alone=7,8`."""
        first, _, last = fields.get("group", "").partition("@")[0].partition("-")
        return cls(
            died=_count(fields.get("died", "")),
            group=range(int(first), int(last) + 1) if last else None,
            alone=_count(fields.get("alone", "")),
        )


@dataclass(frozen=True, slots=True)
class Send:
    """Send these lines, by position, and nothing else of the shard until they are durable."""

    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GiveUp:
    """This line kills whoever sends it."""

    position: int


def next_step(past: Past, left: Sequence[int], size: int) -> Send | GiveUp:
    """What to do next in one claim on a shard of `size` lines, of which `left` have no result yet.

    `left` is ascending and not empty. `past` is what was known when the claim began; it stays the same while
    groups get through, and what is left of the suspects shrinks. Suspects come first, half of them at a time;
    when all got through there is nothing to suspect, and the rest goes as one group.
    """
    group = range(size) if past.group is None else past.group
    suspects = [position for position in left if position in group]
    if not suspects:
        return Send(tuple(left))
    if past.alone >= LONE_DEATHS:  # then the group was one line, and this is it
        return GiveUp(suspects[0])
    return Send(tuple(suspects[: (len(suspects) + 1) // 2]))


def _count(numbers: str) -> int:
    return len(numbers.split(",")) if numbers else 0
