"""Owns which scales the products of a k-tile are multiplied by before they are added to accumulators, and how TMA loads them.

Knows nothing of the order in which k-tiles are multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kerneldecl.analysis.block_scales import BLOCK
from kerneldecl.analysis.hopper_limits import TMA_ALIGN_BYTES, TMA_SMEM_ALIGN_BYTES
from kerneldecl.templates.hopper.operands import Operand, TensorMap, TmaBoxes

SCALE_BYTES = 4
TMA_SCALES = TMA_ALIGN_BYTES // SCALE_BYTES
"""Neighbouring scales of whose number TMA takes multiples; threads load those of other numbers."""


@dataclass(frozen=True)
class KTileScales:
    """Scales of A's rows and of B's columns, and the sets of registers in which products are until they are scaled."""

    rows: Any
    """Buffer of the scales of A's rows: [k / 128, m], or [m] where a whole row shares one."""
    columns: Any
    """Buffer of those of B's columns: [n / 128, k / 128] of blocks, [k / group, n], or [n] where a whole column shares one."""
    group: int
    """Elements along k that share a scale of a column; 0 where they are those of blocks, or do not vary along k."""
    sets: int
    units: int = 1
    """How many times the product of its operands is what wgmma multiplies."""

    @property
    def has_row_groups(self) -> bool:
        """Say whether a row's scale varies along k."""
        return len(self.rows.shape) > 1

    @property
    def has_blocks(self) -> bool:
        return self.group == 0 and len(self.columns.shape) > 1

    @property
    def has_column_groups(self) -> bool:
        """Say whether each column has a scale of its own, which varies along k."""
        return self.group > 0


def scale_tiles(scales: Any, tile: int, group: int) -> Operand | None:
    """Return how TMA loads the scales of so many neighbours of [k / group, rows] and a k-tile, None where it does not take them.

    Tiles whose bytes would end between the multiples at which TMA's boxes may start have some more neighbours.
    """
    groups, rows = (int(extent) for extent in scales.shape)
    per_line = TMA_SMEM_ALIGN_BYTES // SCALE_BYTES
    loaded, k_tiles = -(-tile // per_line) * per_line, group // BLOCK
    if rows % TMA_SCALES:
        return None
    tensor_map = TensorMap(
        buffer=scales, dtype="float32", dims=(rows, groups), strides_bytes=(rows * SCALE_BYTES,), box=(loaded, 1), swizzle=0
    )

    def coords(_batch: Any, row: Any, k_tile: Any, _number: Any) -> tuple[Any, ...]:
        return (row, k_tile if k_tiles == 1 else k_tile // k_tiles)

    return Operand("float32", loaded, is_k_last=True, tma=TmaBoxes(tensor_map, 1, lambda _: 0, coords), row_bytes=SCALE_BYTES)
