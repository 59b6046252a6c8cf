"""How a plan is cut: guided self-scheduling, large shards first and small ones in the end.

[Polychronopoulos and Kuck 1987: each piece is a fixed share of what remains, so the last pieces, which decide
when everyone is done, are small.] Pure.
"""

LARGEST_SHARD = 256
SMALLEST_SHARD = 32


def cut(total: int, slots: int) -> list[int]:
    """Give the sizes of the shards of `total` requests for a fleet that holds `slots` of them at once.

    Each takes half of a slot's share of what remains, but at most 256 requests and at least a quarter of the
    slots (32 at most): a dispatcher sends a whole shard of that size at once, so smaller ones would spread
    nothing and cost a job each. Sizes never grow.
    """
    sizes = []
    remaining, share = total, 2 * max(1, slots)
    smallest = min(max(1, slots // 4), SMALLEST_SHARD)
    while remaining:
        size = min(max(smallest, remaining // share), LARGEST_SHARD, remaining)
        sizes.append(size)
        remaining -= size
    return sizes
