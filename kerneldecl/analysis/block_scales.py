"""Owns the groups and blocks of 8-bit values that share a scale.

Knows nothing of TVM, instructions or how scales come about.
"""

from __future__ import annotations

import math

from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS, WARPGROUP_THREADS

BLOCK = 128
"""Elements along k that share a scale, and rows of operand B that do: those of one k-tile of 8 bits."""
DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
SCALED_CHAIN = 8
"""K-tiles that a consumer with two sets of registers multiplies in a chain, at whose end nothing is multiplied while the last one is added:
ptxas serialises wgmma where a set is in flight over a loop's end."""
MAX_COLUMN_BLOCKS = 2
"""Blocks in which the columns of a tile may lie."""
MAX_SCALED_REGISTERS = {1: 192, 2: 192, 3: 128}
"""Registers per thread that may hold accumulators and, before they are scaled, those of k-tiles, by the number of consumer warpgroups."""


def column_blocks(block_n: int) -> int:
    """Return the most blocks in which the columns of one tile lie, of all tiles of this width."""
    unit = math.gcd(block_n, BLOCK)
    return -(-(BLOCK - unit + block_n) // BLOCK)


def unpacked_registers(mma_tiles: int, partials: int) -> int:
    """Return the registers of a thread for operand A of a consumer's MMA tiles and a k-tile, in as many sets as there are partial ones."""
    return mma_tiles * partials * MMA_TILE_ROWS * BLOCK // (4 * WARPGROUP_THREADS)


def scaled_registers(accumulators: int, mma_tiles: int, partials: int) -> int:
    """Return the registers of accumulators and of so many sets of partial ones, each of one MMA tile."""
    return accumulators + partials * accumulators // mma_tiles
