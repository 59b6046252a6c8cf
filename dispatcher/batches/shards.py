"""How a plan is cut: guided self-scheduling, large shards first and small ones in the end.

[Polychronopoulos and Kuck 1987: each piece is a fixed share of what remains, so the last pieces, which decide
when everyone is done, are small.] Pure.
"""

LARGEST_SHARD = 256
SMALLEST_SHARD = 32
FEWEST_SHARES = 8
"""There may be so many dispatchers at least, each of which should find a shard."""


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
