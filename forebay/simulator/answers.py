"""What a simulated engine says: how many tokens an answer gets, and which words.

Pure, and settled by seed and request alone, so that a request that is sent twice, or to another engine of the
same seed, gets the same answer. Does not belong here: reading requests (``calls``) or the shape of an answer
(dialects).
"""

from __future__ import annotations

import hashlib
import math
from random import Random
from statistics import NormalDist

_NORMAL = NormalDist()
_POOL_WORDS = 4096
_VOCABULARY = (
    "the",
    "river",
    "pool",
    "gate",
    "turbine",
    "stream",
    "water",
    "level",
    "slow",
    "steady",
    "rises",
    "falls",
    "over",
    "under",
    "behind",
    "before",
    "intake",
    "channel",
    "spill",
    "crest",
    "bank",
    "stone",
    "light",
    "night",
    "morning",
    "season",
    "flow",
    "carries",
    "holds",
    "feeds",
    "each",
    "every",
    "one",
    "when",
    "then",
    "so",
    "that",
    "many",
    "few",
    "small",
    "large",
    "long",
    "short",
    "answer",
    "question",
    "reason",
    "number",
    "table",
    "letter",
    "line",
    "page",
    "and",
    "or",
    "but",
    "not",
    "with",
    "without",
    "from",
    "into",
    "through",
    "between",
    "again",
    "always",
    "often",
    "seldom",
    "never",
    "here",
    "there",
    "near",
    "far",
)


def _pool() -> tuple[str, list[int]]:
    """Words in one string, twice over, and where each of the first ones starts: a cut costs one slice."""
    chosen = Random(0).choices(_VOCABULARY, k=_POOL_WORDS)
    words = [f" {word}" for word in chosen + chosen]
    starts, position = [], 0
    for word in words:
        starts.append(position)
        position += len(word)
    return "".join(words), [*starts, position]


_TEXT, _STARTS = _pool()


def fingerprint(seed: int, asked: bytes) -> bytes:
    """Sixteen bytes for a seed and what a request asks; all chance in its answer is drawn from them."""
    return hashlib.blake2b(asked, digest_size=16, key=str(seed).encode()[:64]).digest()


def drawn_length(digest: bytes, index: int, *, median: float, sigma: float) -> int:
    """Tokens that the ``index``-th answer to a request would get by itself: lognormal, at least 1."""
    part = int.from_bytes(digest[:8], "big") ^ (index * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
    uniform = ((part >> 11) + 0.5) / 2**53  # never 0 or 1, where the normal quantile is infinite
    return max(1, round(median * math.exp(sigma * _NORMAL.inv_cdf(uniform))))


def words(digest: bytes, index: int, tokens: int) -> str:
    """``tokens`` words, one a token."""
    offset = (int.from_bytes(digest[8:12], "big") + index * 37) % _POOL_WORDS
    whole, rest = divmod(tokens, _POOL_WORDS)
    turn = _TEXT[_STARTS[offset] : _STARTS[offset + _POOL_WORDS]] if whole else ""
    return (turn * whole + _TEXT[_STARTS[offset] : _STARTS[offset + rest]])[1:]


def vector(digest: bytes, index: int, dimensions: int) -> list[float]:
    """An embedding of unit length."""
    random = Random(int.from_bytes(digest, "big") + index)
    raw = [random.gauss(0.0, 1.0) for _ in range(dimensions)]
    norm = math.sqrt(math.fsum(value * value for value in raw))
    return [value / norm for value in raw]
