"""Owns what time models of fused attention have in common: keys that tiles see, heads that stay in L2 together, blocks worth a try.

Knows nothing of instructions or of how long they take.
"""

from __future__ import annotations

from kerneldecl.analysis.attention import AttentionSizes
from kerneldecl.model import Gpu, dtype_bytes

L2_SHARE = 0.4
"""Part of L2 that the keys and values of heads that are computed together may take."""


MOST_TILES = 1024
"""Tiles of a head that a candidate's time is predicted from at most: a million queries have 65536 tiles of 16."""


def keys_of_tiles(sizes: AttentionSizes, block_m: int, most: int = MOST_TILES) -> list[range]:
    """Return the keys that each tile of so many rows of a head sees; where there are more than `most`, of so many at equal distances.

    The first and the last tile are among them: one of them is the longest.
    """
    count = -(-sizes.queries // block_m)
    tiles = range(count) if count <= most else (at * (count - 1) // (most - 1) for at in range(most))
    rows = (range(tile * block_m, min((tile + 1) * block_m, sizes.queries)) for tile in tiles)
    return [sizes.band.keys_of(each, sizes.keys) for each in rows]


def heads_in_l2(sizes: AttentionSizes, gpu: Gpu) -> int:
    """Return how many heads of queries have keys and values that stay in L2 together: whole groups of those that share them.

    They divide all heads: with a rest, causal tiles would end with few long ones.
    """
    kv_bytes = sizes.keys * (sizes.head_dim + sizes.value_dim) * dtype_bytes(sizes.dtype)
    kv_heads = sizes.batch * sizes.kv_heads
    fitting = max(1, min(kv_heads, int(gpu.l2_bytes * L2_SHARE / kv_bytes)))
    return sizes.group * next(count for count in range(fitting, 0, -1) if kv_heads % count == 0)


def is_worth_a_try(sizes: AttentionSizes, other_rows: int, block_n: int, choices: tuple[int, ...], unit: int) -> bool:
    """Say whether a tile has rows besides `other_rows`, and a block of keys exceeds all keys, in units, by less than the smallest block."""
    keys = -(-sizes.keys // unit) * unit
    return other_rows < sizes.queries and (block_n < keys + min(choices) or block_n == min(choices))
