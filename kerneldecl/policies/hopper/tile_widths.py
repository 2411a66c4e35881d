"""Owns which widths of tiles on wgmma to try, and whether the CTAs of a cluster can multicast their operands.

Knows nothing of stages, consumers or time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from kerneldecl.analysis.hopper_limits import MAX_BLOCK_N, MAX_TMA_BOXES, MMA_TILE_ROWS
from kerneldecl.analysis.tensor_cores import wgmma_instructions
from kerneldecl.model import Gpu

N_UNIT = 8
"""Columns of which every wgmma multiplies a multiple (PTX ISA, "Asynchronous Warpgroup Level Matrix Shape")."""
BLOCK_N_CHOICES = (8, 16, 32, 64, 96, 128, 160, 192, 224, 256)
COARSE_N_UNIT = 32
"""Columns of which the width is a multiple that covers more than `MMA_TILE_ROWS` columns."""
LARGE_N = 512
"""Columns of a GEMM from which on tiles narrower than `LARGE_N_MIN_BLOCK_N` are not tried."""
LARGE_N_MIN_BLOCK_N = 32
WAVE_CHOICES = (1, 2, 4)
"""Waves of tiles that should fill all SMs."""
WAVES_MIN_BLOCK_N = 128
"""Least width of tiles in several waves: with narrower ones, tensor cores wait for shared memory."""


def block_n_choices(n: int, dtype: str, *, is_skinny: bool) -> list[int]:
    """Return the widths to try for a GEMM of n columns, in ascending order: fixed ones below n, and the least that covers n.

    A skinny GEMM's n is small and its A large; each column of tiles reads all of A, so there are at most two, and a single one
    where n is at most `MMA_TILE_ROWS`.
    """
    unit = N_UNIT if n <= MMA_TILE_ROWS else COARSE_N_UNIT
    covering = min(MAX_BLOCK_N, -(-n // unit) * unit)
    least = LARGE_N_MIN_BLOCK_N if n >= LARGE_N else 0
    if is_skinny:
        least = n if n <= MMA_TILE_ROWS else n // 2
    return _supported({*(width for width in BLOCK_N_CHOICES if least <= width < n), covering}, dtype)


def filling_block_n(m_tiles: int, n: int, dtype: str, unit: int, gpu: Gpu) -> list[int]:
    """Return the widths, in ascending order, with which `m_tiles` rows of tiles fill all SMs in one wave, two or four.

    Before dtypes round them up, widths are multiples of `unit`.
    """
    return _supported(set(_filling(m_tiles, n, unit, gpu)), dtype)


def _filling(m_tiles: int, n: int, unit: int, gpu: Gpu) -> Iterator[int]:
    for waves in WAVE_CHOICES:
        n_tiles = waves * gpu.sm_count // m_tiles
        if n_tiles == 0:
            continue
        width, least = -(-n // (n_tiles * unit)) * unit, 1 if waves == 1 else WAVES_MIN_BLOCK_N
        if least <= width <= min(n, MAX_BLOCK_N):
            yield width


def _supported(widths: set[int], dtype: str) -> list[int]:
    return sorted({_rounded_up(width, dtype) for width in widths})


@functools.cache
def _rounded_up(width: int, dtype: str) -> int:
    """Return the least width from this one on that one wgmma multiplies, or two side by side."""
    return next(each for each in range(width, MAX_BLOCK_N + 1, N_UNIT) if wgmma_instructions(dtype, each))


def can_multicast(extent: int, unit: int, ctas: int) -> bool:
    """Say whether each CTA of a cluster can load a part of a tile of `extent` rows (or columns) and multicast it to the others.

    All TMA boxes of the tile have one size, a multiple of `unit` rows; each CTA loads at most `MAX_TMA_BOXES` of them, the last CTA
    maybe fewer.
    """
    if ctas == 1:
        return True
    units = -(-extent // unit)
    units_per_cta = -(-units // ctas)
    # Where k is not last, a box is one swizzled row of 64.
    box_units = 1 if unit == MMA_TILE_ROWS else max(size for size in range(1, units_per_cta + 1) if units % size == 0)
    return -(-units // (box_units * ctas)) <= MAX_TMA_BOXES
