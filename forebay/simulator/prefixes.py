"""The prefix cache of a simulated engine: which part of a prompt it has read lately and need not read again.

Belongs here: blocks, their chain, and which of them are forgotten. Pure. Does not belong here: how long
reading takes (``batching``).

The model is that of both runtimes: a prompt is cut into blocks of a fixed number of tokens, a block is known
by its text and by all before it, only whole blocks count, and the least lately used go first. Here a block is
known from the moment a request that holds it is taken in.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK_TOKENS = 16
_CHARS_PER_TOKEN = 4
_BLOCK = BLOCK_TOKENS * _CHARS_PER_TOKEN


class PrefixCache:
    """Blocks of at most ``tokens`` tokens together."""

    def __init__(self, tokens: int) -> None:
        self._most = tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def read(self, prompt: bytes) -> int:
        """Take a prompt in; returns how many of its first tokens were known.

        The last block never is: an engine always computes something.
        """
        chain = list(_chain(prompt))
        known = sum(1 for _ in takewhile(self._blocks.__contains__, chain))
        for block in reversed(chain):  # so that the beginning, which others may share, is forgotten last
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
        return known * BLOCK_TOKENS


def _chain(prompt: bytes) -> Iterator[int]:
    """What each block but the last is known by: its text and all before it."""
    known_by = 0
    for start in range(0, len(prompt) - _BLOCK, _BLOCK):
        known_by = hash((known_by, prompt[start : start + _BLOCK]))
        yield known_by
