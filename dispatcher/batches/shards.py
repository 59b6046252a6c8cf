"""How a plan is cut: guided self-scheduling, large shards first and small ones in the end; what shards cost.

[Polychronopoulos and Kuck 1987: each piece is a fixed share of what remains, so the last pieces, which decide
when everyone is done, are small.] Pure.
"""

import math
from collections.abc import Sequence

LARGEST_SHARD = 256
SMALLEST_SHARD = 32
FEWEST_SHARES = 8
"""There may be so many dispatchers at least, each of which should find a shard."""
MOST_COST_STEPS = 16


def cut(total: int, slots: int) -> list[int]:
    """Give the sizes of the shards of `total` requests for a fleet that holds `slots` of them at once.

    Each takes one share of what remains, but at most 256 requests and at least a quarter of the slots (32 at
    most). It is dispatchers that take shards, and each keeps many slots busy: there are as many shares as
    quarters of the slots, 8 or more where the slots allow; smaller shards would spread nothing and cost a job
    each. Sizes never grow.
    """
    sizes = []
    remaining, slots = total, max(1, slots)
    shares = min(2 * slots, max(FEWEST_SHARES, slots // 4))
    smallest = min(max(1, slots // 4), SMALLEST_SHARD)
    while remaining:
        size = min(max(smallest, remaining // shares), LARGEST_SHARD, remaining)
        sizes.append(size)
        remaining -= size
    return sizes


def cost_steps(costs: Sequence[int]) -> list[tuple[int, int]]:
    """Say what shards cost in at most 16 steps: (first shard, mean cost from there on).

    Early shards cost many times what late ones do, and there are too many to keep the cost of each in Redis.
    """
    size = max(1, math.ceil(len(costs) / MOST_COST_STEPS))
    steps = (costs[first : first + size] for first in range(0, len(costs), size))
    return [(index * size, round(sum(step) / len(step))) for index, step in enumerate(steps)]
