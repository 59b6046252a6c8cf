"""The prefix cache of a simulated engine: which part of a prompt it has read lately and need not read again.

Belongs here: blocks, their chain, and which of them are forgotten. Pure. Does not belong here: how long
reading takes (``batching``).

The model is that of both runtimes: a prompt is cut into blocks of a fixed number of tokens, a block is known
by its text and by all before it, only whole blocks count, and the least lately used go first. Here a block is
known from the moment a request that holds it is taken in.
"""

from __future__ import annotations

from collections import OrderedDict

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
        known, chain = 0, 0
        missed = False
        for start in range(0, len(prompt) - _BLOCK, _BLOCK):
            chain = hash((chain, prompt[start : start + _BLOCK]))
            missed = missed or chain not in self._blocks
            known += not missed
            self._blocks[chain] = None
            self._blocks.move_to_end(chain)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)
        return known * BLOCK_TOKENS
