"""Owns how packed 4-bit weights, their scales and the activations come from memory to a stage, where weights are wgmma's operand A.

Knows nothing of pipelines, epilogues or how tiles are chosen. A stage has one or two parts of 64 elements along k: activations of each part
lie in a 128-byte swizzle of their own, one part after the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kerneldecl.analysis.packed_weights import ROW_BYTES, TILE_K, TILE_ROWS, TILE_WORDS
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.hopper.operands import Operand, TensorMap, TmaBoxes, io_dtype, operand_of
from kerneldecl.templates.hopper.read_gemm import Matrix
from kerneldecl.templates.hopper.read_quantized import PackedWeights


def packed_operand(weights: PackedWeights, tile_rows: int, parts: int) -> Operand:
    """Return how TMA loads the tiles of packed weights in so many rows and so many parts: 32 bytes a row, one after the other."""
    tensor_map = TensorMap(
        buffer=weights.values,
        dtype="uint32",
        dims=(TILE_WORDS, weights.n // TILE_ROWS, weights.k // TILE_K),
        strides_bytes=(TILE_WORDS * 4, weights.n // TILE_ROWS * TILE_WORDS * 4),
        box=(TILE_WORDS, tile_rows // TILE_ROWS, parts),
        swizzle=0,
    )

    def coords(_batch: Any, row: Any, k_tile: Any, _number: Any) -> tuple[Any, ...]:
        return (0, row // TILE_ROWS, k_tile * parts)

    boxes = TmaBoxes(tensor_map, 1, lambda _: 0, coords)
    return Operand("uint32", tile_rows * parts, is_k_last=True, tma=boxes, in_registers=True, row_bytes=ROW_BYTES)


def factors_of(weights: PackedWeights, tile_rows: int, parts: int) -> tuple[Operand, Operand | None]:
    """Return how TMA loads the scales of a tile's rows, and the zero points where there are some."""
    zeros = None if weights.zeros is None else _factor(weights, weights.zeros, tile_rows, parts)
    return _factor(weights, weights.scales, tile_rows, parts), zeros


def _factor(weights: PackedWeights, buffer: Any, tile_rows: int, parts: int) -> Operand:
    dtype, per_k_tile = io_dtype(str(buffer.dtype)), max(1, parts * TILE_K // weights.group)
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
        return (row, k_tile * per_k_tile if per_k_tile > 1 else k_tile // (weights.group // (parts * TILE_K)))

    boxes = TmaBoxes(tensor_map, 1, lambda _: 0, coords)
    return Operand(dtype, tile_rows * per_k_tile, is_k_last=True, tma=boxes, row_bytes=item)


def activations_operand(matrix: Matrix, tile_rows: int, ctas: int, parts: int) -> Operand | None:
    """Return how `ctas` CTAs of a cluster load a tile of activations by TMA, None where they cannot."""
    operand = operand_of(matrix, tile_rows, ctas)
    if operand is None or operand.tma is None or not operand.is_k_last:
        return None
    if parts == 1:
        return operand
    one = operand.tma
    if one.total:
        return None

    def number_in_part(number: Any) -> Any:
        return number // (parts * one.per_cta) * one.per_cta + number % one.per_cta

    def part(number: Any) -> Any:
        return number % (parts * one.per_cta) // one.per_cta

    def coords(batch: Any, row: Any, k_tile: Any, number: Any) -> tuple[Any, ...]:
        return one.coords(batch, row, k_tile * parts + part(number), number_in_part(number))

    boxes = TmaBoxes(one.map, parts * one.per_cta, lambda number: part(number) * tile_rows + one.first_row(number_in_part(number)), coords)
    return replace(operand, stage_rows=parts * tile_rows, tma=boxes)
