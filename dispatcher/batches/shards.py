"""How a plan is cut: guided self-scheduling, large shards first and single requests in the end.

[Polychronopoulos and Kuck 1987: each piece is a fixed share of what remains, so the last pieces, which decide
when everyone is done, are small.] Pure.
"""

LARGEST_SHARD = 256


def cut(total: int, slots: int) -> list[int]:
    """Give the sizes of the shards of `total` requests for a fleet that holds `slots` of them at once.

    Each takes half of a slot's share of what remains, between 1 and 256; sizes never grow.
    """
    sizes = []
    remaining, share = total, 2 * max(1, slots)
    while remaining:
        size = min(max(1, remaining // share), LARGEST_SHARD)
        sizes.append(size)
        remaining -= size
    return sizes
