"""Owns how packed 4-bit weights and their scales come from memory to a stage, as operand A of wgmma that comes from registers.

Knows nothing of pipelines, epilogues or how tiles are chosen.
"""

from __future__ import annotations

from typing import Any

from kerneldecl.analysis.packed_weights import ROW_BYTES, TILE_K, TILE_ROWS, TILE_WORDS
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.hopper.operands import Operand, TensorMap, TmaBoxes
from kerneldecl.templates.hopper.read_quantized import PackedWeights


def packed_operand(weights: PackedWeights, tile_rows: int) -> Operand:
    """Return how TMA loads the tiles of packed weights in so many rows and 64 elements along k: 32 bytes a row, one after the other."""
    tensor_map = TensorMap(
        buffer=weights.values,
        dtype="uint32",
        dims=(TILE_WORDS, weights.n // TILE_ROWS, weights.k // TILE_K),
        strides_bytes=(TILE_WORDS * 4, weights.n // TILE_ROWS * TILE_WORDS * 4),
        box=(TILE_WORDS, tile_rows // TILE_ROWS, 1),
        swizzle=0,
    )

    def coords(_batch: Any, row: Any, k_tile: Any, _number: Any) -> tuple[Any, ...]:
        return (0, row // TILE_ROWS, k_tile)

    boxes = TmaBoxes(tensor_map, 1, lambda _: 0, coords)
    return Operand("uint32", tile_rows, is_k_last=True, tma=boxes, in_registers=True, row_bytes=ROW_BYTES)


def factors_of(weights: PackedWeights, tile_rows: int) -> tuple[Operand, Operand | None]:
    """Return how TMA loads the scales of a tile's rows, and the zero points where there are some."""
    zeros = None if weights.zeros is None else _factor(weights, weights.zeros, tile_rows)
    return _factor(weights, weights.scales, tile_rows), zeros


def _factor(weights: PackedWeights, buffer: Any, tile_rows: int) -> Operand:
    dtype, per_k_tile = str(buffer.dtype), max(1, TILE_K // weights.group)
    item = dtype_bytes(dtype)
    tensor_map = TensorMap(
        buffer=buffer,
        dtype=dtype,
        dims=(weights.n, weights.k // weights.group),
        strides_bytes=(weights.n * item,),
        box=(tile_rows, per_k_tile),
        swizzle=0,
    )

    def coords(_batch: Any, row: Any, k_tile: Any, _number: Any) -> tuple[Any, ...]:
        return (row, k_tile * per_k_tile if per_k_tile > 1 else k_tile // (weights.group // TILE_K))

    boxes = TmaBoxes(tensor_map, 1, lambda _: 0, coords)
    return Operand(dtype, tile_rows * per_k_tile, is_k_last=True, tma=boxes, row_bytes=item)
