"""Owns the mainloop of a consumer that scales the products of each k-tile before it adds them to accumulators: float8 with block scales.

wgmma multiplies an MMA tile of a k-tile into registers of its own, one or two sets of them. With two sets the next k-tile is always being
multiplied while one is scaled and added in float32; with one set other consumers multiply meanwhile.

Knows nothing of how operands come to shared memory or what becomes of accumulators.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.block_scales import BLOCK, SCALED_CHAIN, column_blocks
from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS
from kerneldecl.templates.hopper.consumer import Consumer, fence, issue_mma, release


class Scaling(NamedTuple):
    """What a consumer scales with, while a kernel's script is read."""

    of_rows: Any
    """Scales of a thread's two rows: of each of its MMA tiles where threads load them."""
    of_columns: Any
    """Scales of the blocks in which the tile's columns lie: one, or two."""
    products: Any
    """For each set of registers, its units of columns and the two rows: the product of both scales."""
    row: Any
    """The tile's first row."""
    column: Any
    """Its first column."""
    begin: Any
    """The tile's first k-tile."""
    unit: int
    """Columns that have one scale whichever block the tile begins in."""
    units: int


def _scaling(consumer: Consumer, start: Any) -> Scaling:
    block_n, sets = consumer.kernel.params.block_n, consumer.kernel.partial_sets
    unit, (row, column, begin) = math.gcd(block_n, BLOCK), start
    mma_tiles = 1 if consumer.kernel.row_scales is None else consumer.kernel.params.mma_tiles
    units = block_n // unit
    return Scaling(
        of_rows=T.alloc_local((2 * mma_tiles,), "float32"),
        of_columns=T.alloc_local((column_blocks(block_n),), "float32"),
        products=T.alloc_local((2 * units * sets,), "float32"),
        row=row,
        column=column,
        begin=begin,
        unit=unit,
        units=units,
    )


def _row_of(consumer: Consumer, mma_tile: Any) -> Any:
    """Return the first of a thread's two rows of an MMA tile, among the CTA's."""
    return consumer.first_row + mma_tile * MMA_TILE_ROWS + consumer.warp * 16 + consumer.lane // 4


@T.inline
def _load_row_scales(consumer, scaling, i):
    """Load the scales of a thread's rows for a k-tile where TMA does not: it takes rows of 16 bytes, which are those of four rows of A."""
    scales = T.meta_var(consumer.kernel.row_scales)
    k_tiles, rows = T.meta_var([int(extent) for extent in scales.shape])
    for number in T.unroll(scaling.of_rows.shape[0]):
        row = T.meta_var(scaling.row + _row_of(consumer, number // 2) + number % 2 * 8)
        scaling.of_rows[number] = scales[T.min(scaling.begin + i, k_tiles - 1), T.min(row, rows - 1)]


@T.inline
def _load_column_scales(consumer, scaling, i):
    """Load the scales of the columns' blocks for a k-tile: before its operands have come, so that nobody waits for them."""
    scales = T.meta_var(consumer.kernel.column_scales)
    blocks, k_tiles = T.meta_var([int(extent) for extent in scales.shape])
    for number in T.unroll(scaling.of_columns.shape[0]):
        scaling.of_columns[number] = scales[T.min(scaling.column // BLOCK + number, blocks - 1), T.min(scaling.begin + i, k_tiles - 1)]


def _column_scale(scaling: Scaling, unit: Any) -> Any:
    """Return the scale of a unit of columns."""
    if int(scaling.of_columns.shape[0]) == 1:
        return scaling.of_columns[0]
    return T.Select(scaling.column % BLOCK < BLOCK - unit * scaling.unit, scaling.of_columns[0], scaling.of_columns[1])


@T.inline
def _multiply_scales(consumer, scaling, set_number, mma_tile):
    """Multiply the scales of a thread's two rows by those of the columns, while wgmma multiplies."""
    row, first = T.meta_var((_row_of(consumer, mma_tile), 0 if consumer.kernel.row_scales is None else mma_tile * 2))
    if consumer.kernel.row_scales is None:
        for half in T.unroll(2):
            scaling.of_rows[half] = consumer.barriers.scales[consumer.state.stage, row + half * 8]
    for unit in T.unroll(scaling.units):
        for half in T.unroll(2):
            scaling.products[(set_number * scaling.units + unit) * 2 + half] = scaling.of_rows[first + half] * _column_scale(scaling, unit)


@T.inline
def _multiply(consumer, scaling, set_number, mma_tile, i):
    """Start the MMAs of an MMA tile of a k-tile into a set of registers; wait for the k-tile before its first one."""
    state, count = T.meta_var((consumer.state, consumer.kernel.accum.per_mma_tile))
    if mma_tile == 0:
        _load_column_scales(consumer, scaling, i)
        if consumer.kernel.row_scales is not None:
            _load_row_scales(consumer, scaling, i)
        consumer.barriers.full.wait(state.stage, state.phase)
    T.ptx.wgmma.fence.sync.aligned()
    first = T.meta_var((set_number - mma_tile) * count)
    issue_mma(consumer._replace(first_partial=first), state.stage, range(mma_tile, mma_tile + 1), tirx.const(True, "bool"))
    T.ptx.wgmma.commit_group.sync.aligned()
    if consumer.kernel.params.is_staggered and mma_tile == 0:
        if (consumer.index == 0) & (i == consumer.kernel.params.stagger_k_tiles) & (consumer.lane == 0):
            consumer.barriers.order.arrive(1)
    _multiply_scales(consumer, scaling, set_number, mma_tile)
    if mma_tile == consumer.kernel.params.mma_tiles - 1:
        state.advance()


@T.inline
def _add(consumer, scaling, set_number, mma_tile, left):
    """Wait until so many MMA tiles are being multiplied, give the stage back after its last one, and add the set's accumulators, scaled."""
    acc, partials, count = T.meta_var((consumer.acc, consumer.partials, consumer.kernel.accum.per_mma_tile))
    T.ptx.wgmma.wait_group.sync.aligned(left)
    fence(partials, set_number * count, (set_number + 1) * count)
    if mma_tile == consumer.kernel.params.mma_tiles - 1:
        release(consumer, consumer.stage_before(left + 1))
    for j in T.unroll(count):
        scale = T.meta_var(scaling.products[(set_number * scaling.units + j // 4 * 8 // scaling.unit) * 2 + j % 4 // 2])
        acc[mma_tile * count + j] = acc[mma_tile * count + j] + partials[set_number * count + j] * scale


@T.inline
def _run_in_turn(consumer, scaling, k_tiles):
    """Multiply with one set of registers: each MMA tile is added before the next one is multiplied."""
    for i in T.serial(k_tiles):
        _multiply(consumer, scaling, 0, 0, i)
        _add(consumer, scaling, 0, 0, 0)
        if consumer.kernel.params.mma_tiles == 2:
            _multiply(consumer, scaling, 0, 1, i)
            _add(consumer, scaling, 0, 1, 0)


@T.inline
def _multiply_chain(consumer, scaling, first, count):
    """Multiply so many k-tiles with two sets of registers, which take turns: one is added while the next one is multiplied."""
    _multiply(consumer, scaling, 0, 0, first)
    for pair in T.unroll((count - 1) // 2):
        _multiply(consumer, scaling, 1, 0, first + pair * 2 + 1)
        _add(consumer, scaling, 0, 0, 1)
        _multiply(consumer, scaling, 0, 0, first + pair * 2 + 2)
        _add(consumer, scaling, 1, 0, 1)
    if count % 2 == 0:
        _multiply(consumer, scaling, 1, 0, first + count - 1)
        _add(consumer, scaling, 0, 0, 1)
        _add(consumer, scaling, 1, 0, 0)
    else:
        _add(consumer, scaling, 0, 0, 0)


@T.inline
def _run_overlapped(consumer, scaling, k_tiles):
    """Multiply with two sets of registers, in chains of k-tiles."""
    for turn in T.serial(k_tiles // SCALED_CHAIN):
        _multiply_chain(consumer, scaling, turn * SCALED_CHAIN, SCALED_CHAIN)
    if k_tiles % SCALED_CHAIN > 0:
        _multiply_chain(consumer, scaling, k_tiles - k_tiles % SCALED_CHAIN, k_tiles % SCALED_CHAIN)


@T.inline
def run_scaled(consumer, k_tiles, start):
    """Multiply so many k-tiles, scaled, and leave the results in the accumulators; `start` is the tile's first row, column and k-tile."""
    scaling = T.meta_var(_scaling(consumer, start))
    for j in T.unroll(consumer.kernel.accum.registers):
        consumer.acc[j] = T.float32(0)
    if consumer.kernel.partial_sets == 2:
        _run_overlapped(consumer, scaling, k_tiles)
    else:
        _run_in_turn(consumer, scaling, k_tiles)
