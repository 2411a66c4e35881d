"""Owns how an operand's last rows are loaded where they fill no tile: by a box of their own, that has no row beyond the last one.

Knows nothing of who waits for the loads.

TMA fills rows beyond a tensor with zeros, and by all signs takes longer for one of them than for one that it reads: five to seven cycles
for 128 bytes, against three, fit the times of GEMMs with and without. One of 305 rows by a kernel of two tiles of 168 took 24.4 us, of
336 rows 20.8; one of 361 by two tiles of 208 30.3, of 416 rows 23.2 (float16, n = k = 4096, H200, 2026-11). What wgmma makes of rows that
nobody loaded belongs to results that are not stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import SWIZZLE_ROWS
from kerneldecl.templates.hopper.operands import Operand, TensorMap
from kerneldecl.templates.hopper.read_gemm import Matrix


@dataclass(frozen=True)
class Tail:
    """The last rows of an operand, which fill no tile."""

    map: TensorMap
    """With boxes of so many rows; of a whole tile's where all are full, as kernels of any number of rows may find."""
    rows: int
    """Rows of the whole operand."""
    tile_rows: int
    row_bytes: int
    ctas: int = 1
    """CTAs of a cluster that share the tile: each loads a box, of whole groups of rows that the swizzle permutes together."""

    def fills(self, first: Any) -> Any:
        """Say whether a tile that begins at a row is full."""
        return first + self.tile_rows <= self.rows

    def begins(self, first: Any) -> Any:
        """Say whether a tile that begins at a row has any; the last ones of a cluster may have none."""
        return first < self.rows

    def box_rows(self, first: Any) -> Any:
        """Return the rows of each CTA's box of a tile that begins at a row."""
        return _cut(T.max(T.min(self.rows - first, self.tile_rows), 0), self.ctas)

    def loaded_bytes(self, first: Any) -> Any:
        """Return the bytes that are loaded of a tile that begins at a row, by all CTAs that share it."""
        return self.box_rows(first) * (self.ctas * self.row_bytes)


def with_tail(operand: Operand | None, matrix: Matrix, tile_rows: int) -> Operand | None:
    """Return an operand whose last rows TMA loads by boxes of their own, where they fill no tile and each CTA loads one box of it."""
    rows, boxes = matrix.rows[0], None if operand is None else operand.tma
    if operand is None or boxes is None or not operand.is_k_last or rows % tile_rows == 0:
        return operand
    if boxes.per_cta > 1 or boxes.total:
        return operand
    ctas = tile_rows // boxes.map.box[1]
    tail_map = replace(boxes.map, box=(boxes.map.box[0], _cut(_last_rows(rows, tile_rows), ctas), *boxes.map.box[2:]))
    return replace(operand, tma=replace(boxes, tail=Tail(tail_map, rows, tile_rows, operand.row_bytes, ctas)))


def _cut(rows: Any, ctas: int) -> Any:
    """Return the rows of a box where CTAs share so many rows."""
    if ctas == 1:
        return rows
    groups, least = (tirx.IntImm("int32", value) for value in (SWIZZLE_ROWS, SWIZZLE_ROWS * ctas - 1))
    return tirx.Mul(tirx.FloorDiv(tirx.Add(rows, least), tirx.IntImm("int32", SWIZZLE_ROWS * ctas)), groups)


def _last_rows(rows: int, tile_rows: int) -> Any:
    """Return the rows of the last tile as an expression: of any number of rows it is no linear function (`compiler/rows.py`)."""
    number, one, tile = (tirx.IntImm("int32", value) for value in (rows, 1, tile_rows))
    return tirx.Add(tirx.FloorMod(tirx.Sub(number, one), tile), one)
