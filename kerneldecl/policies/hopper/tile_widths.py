"""Owns how wide tiles on wgmma should be, and whether the blocks of a cluster can share their operands.

Knows nothing of stages, consumers or time.
"""

from __future__ import annotations

from collections.abc import Iterator

from kerneldecl.model import Gpu
from kerneldecl.policies.hopper.time_model import WGMMA_ROWS

COLUMNS = (8, 16, 32, 64, 96, 128, 160, 192, 224, 256)
COLUMN_UNIT = 8
"""Columns that one wgmma more multiplies, and rows of an operand that TMA's swizzle permutes together."""
MAX_COLUMNS = 256
INT8_COLUMNS = (8, 16, 24, *range(32, 225, 16))
"""That one wgmma on int8 multiplies, as TVM has it; twice as many take two."""
LARGE, LEAST = 512, 32
"""Columns of a product that are many, and those of its tiles."""
WAVES = (1, 2, 4)
WIDE = 128
"""Of several waves: narrower tiles keep tensor cores waiting for shared memory."""
MOST_BOXES = 4
"""That a block brings of a tile."""


def widths_of(extent: int, dtype: str, *, is_whole: bool) -> list[int]:
    """Return the widths of tiles up to the first that covers the extent, and the one that fits it: in steps of 8, wide ones of 32.

    An extent that is to stay whole is cut in two at most, and not where one wgmma's rows would do for it.
    """
    unit = COLUMN_UNIT if extent <= WGMMA_ROWS else 4 * COLUMN_UNIT
    least = extent // 2 if is_whole and extent > WGMMA_ROWS else extent if is_whole else LEAST if extent >= LARGE else 0
    narrower = (size for size in COLUMNS if least <= size < extent)
    return _taken({*narrower, min(MAX_COLUMNS, -(-extent // unit) * unit)}, dtype)


def filling_widths(rows: int, extent: int, dtype: str, unit: int, gpu: Gpu) -> list[int]:
    """Return the widths, in multiples of a unit, with which so many rows of tiles make one wave, two or four, that fill the SMs."""
    return _taken(set(_filling(rows, extent, unit, gpu)), dtype)


def _filling(rows: int, extent: int, unit: int, gpu: Gpu) -> Iterator[int]:
    for waves in WAVES:
        across = waves * gpu.sm_count // rows
        width = -(-extent // (across * unit)) * unit if across else 0
        if (1 if waves == 1 else WIDE) <= width <= min(extent, MAX_COLUMNS):
            yield width


def _taken(sizes: set[int], dtype: str) -> list[int]:
    """Return the widths that wgmma takes, or the next wider ones."""
    if dtype != "int8":
        return sorted(sizes)
    return sorted({next(width for width in (*INT8_COLUMNS, MAX_COLUMNS) if width >= size) for size in sizes})


def can_share(extent: int, unit: int, blocks: int) -> bool:
    """Say whether blocks can bring a tile of an operand together: each one some boxes, alike and of whole units, the last ones fewer."""
    units = -(-extent // unit)
    most = -(-units // blocks)
    box = 1 if unit == WGMMA_ROWS else max(size for size in range(1, most + 1) if units % size == 0)
    return blocks == 1 or -(-units // (box * blocks)) <= MOST_BOXES
