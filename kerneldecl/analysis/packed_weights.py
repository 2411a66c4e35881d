"""Owns where packed 4-bit weights lie: tiles in the order of tensor cores' fragments, and what a lane of a warp has of one.

Knows nothing of TVM, instructions or how weights are scaled.
"""

from __future__ import annotations

TILE_ROWS, TILE_K = 16, 64
"""Rows and elements along k of a tile: operand A of four mma.m16n8k16, or a warp's part of four wgmma.m64nNk16."""
LANES, LANE_WORDS = 32, 4
"""Lanes of a warp, and the words of 8 weights that each has of a tile: one for each 16 elements along k."""
TILE_WORDS = LANES * LANE_WORDS
ROW_BYTES = TILE_K // 2
"""Bytes of a row of a tile."""
GROUPS = (32, 64, 128, 256, 512, 1024)
"""Weights along k that may share a scale; one scale for all of k is a group of k."""
FLOAT4_GROUPS = {"uint8": 32, "float8_e4m3fn": 16}
"""Weights along k that share a scale where they are float4_e2m1fn, by the dtype as which scales are passed: MXFP4's are bytes."""


def groups_of(scale_dtype: str, k: int) -> tuple[int, ...]:
    """Return how many weights along k may share a scale of a dtype."""
    return (FLOAT4_GROUPS[scale_dtype],) if scale_dtype in FLOAT4_GROUPS else (*GROUPS, k)


def packed_shape(n: int, k: int) -> tuple[int, int, int, int]:
    """Return the shape of packed weights: tiles along k, tiles of rows, lanes, bytes of a lane."""
    return k // TILE_K, n // TILE_ROWS, LANES, 4 * LANE_WORDS
