"""Owns the mainloop of a consumer that scales the products of each k-tile before it adds them to accumulators: scales vary along k.

wgmma multiplies an MMA tile of a k-tile into registers of its own, one or two sets of them. With two sets the next k-tile is always being
multiplied while one is scaled and added in float32; with one set other consumers multiply meanwhile. Products of int8 are sums of int32.
Where A has 4 bits, consumers unpack it to registers: one set of them, or two, as of products.

Knows nothing of how operands come to shared memory or what becomes of accumulators.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.block_scales import BLOCK, SCALED_CHAIN, column_blocks
from kerneldecl.analysis.hopper_limits import K_TILE_BYTES, MMA_TILE_ROWS
from kerneldecl.analysis.packed_weights import LANE_WORDS, TILE_K, TILE_ROWS, TILE_WORDS
from kerneldecl.analysis.tensor_cores import K_BYTES
from kerneldecl.compiler.intrinsics import int4_bytes
from kerneldecl.templates.hopper.consumer import Consumer, fence, issue_mma, release
from kerneldecl.templates.hopper.k_tile_scales import KTileScales
from kerneldecl.templates.hopper.kernel_config import A_FRAGMENT

MMAS = K_TILE_BYTES // K_BYTES
"""MMAs of an MMA tile and a k-tile."""


class Scaling(NamedTuple):
    """What a consumer scales with, while a kernel's script is read."""

    of_rows: Any
    """Scales of a thread's two rows: of each of its MMA tiles where threads load them."""
    of_columns: Any
    """Scales of the blocks in which the tile's columns lie: one, or two. Where each column has a scale, those of two neighbours."""
    products: Any
    """For each set of registers, units of columns and the two rows: both scales' product, or the row's where columns have own ones."""
    sums: Any
    """What wgmma has written, in its own dtype."""
    row: Any
    """The tile's first row."""
    column: Any
    """Its first column."""
    begin: Any
    """The tile's first k-tile."""
    unit: int
    """Columns that have one scale whichever block the tile begins in."""
    units: int


def _scales_of(consumer: Consumer) -> KTileScales:
    assert consumer.kernel.k_tile_scales is not None
    return consumer.kernel.k_tile_scales


def _scaling(consumer: Consumer, start: Any) -> Scaling:
    block_n, scales = consumer.kernel.params.block_n, _scales_of(consumer)
    (row, column, begin), unit = start, math.gcd(block_n, BLOCK) if scales.has_blocks else block_n
    mma_tiles = consumer.kernel.params.mma_tiles if _loads_row_scales(consumer) else 1
    units = block_n // unit
    return Scaling(
        of_rows=T.alloc_local((2 * mma_tiles,), "float32"),
        of_columns=T.alloc_local((column_blocks(block_n) if scales.has_blocks else 2,), "float32"),
        products=T.alloc_local((2 * units * scales.sets,), "float32"),
        sums=consumer.kernel.products.of_registers(consumer.partials),
        row=row,
        column=column,
        begin=begin,
        unit=unit,
        units=units,
    )


def _loads_row_scales(consumer: Consumer) -> bool:
    """Say whether threads load the scales of rows for each k-tile."""
    return _scales_of(consumer).has_row_groups and consumer.kernel.scales is None


def _row_of(consumer: Consumer, mma_tile: Any) -> Any:
    """Return the first of a thread's two rows of an MMA tile, among the CTA's."""
    return consumer.first_row + mma_tile * MMA_TILE_ROWS + consumer.warp * 16 + consumer.lane // 4


@T.inline
def _load_row_scales(consumer, scaling, i):
    """Load the scales of a thread's rows for a k-tile where TMA does not: it takes rows of 16 bytes, which are those of four rows of A."""
    scales = T.meta_var(consumer.kernel.k_tile_scales.rows)
    k_tiles, rows = T.meta_var([int(extent) for extent in scales.shape])
    for number in T.unroll(scaling.of_rows.shape[0]):
        row = T.meta_var(scaling.row + _row_of(consumer, number // 2) + number % 2 * 8)
        scaling.of_rows[number] = scales[T.min(scaling.begin + i, k_tiles - 1), T.min(row, rows - 1)]


@T.inline
def _load_block_scales(consumer, scaling, i):
    """Load the scales of the columns' blocks for a k-tile: before its operands have come, so that nobody waits for them."""
    scales = T.meta_var(consumer.kernel.k_tile_scales.columns)
    blocks, k_tiles = T.meta_var([int(extent) for extent in scales.shape])
    for number in T.unroll(scaling.of_columns.shape[0]):
        scaling.of_columns[number] = scales[T.min(scaling.column // BLOCK + number, blocks - 1), T.min(scaling.begin + i, k_tiles - 1)]


@T.inline
def _load_scales(consumer, scaling, i):
    """Load what threads load themselves of a k-tile's scales, but for those of single columns."""
    if consumer.kernel.k_tile_scales.has_blocks:
        _load_block_scales(consumer, scaling, i)
    if _loads_row_scales(consumer):
        _load_row_scales(consumer, scaling, i)


@T.inline
def _load_pair(consumer, scaling, place, i):
    """Load the scales of a thread's two columns of eight for a k-tile: `place` is its stage and the first of these columns."""
    stage, first = T.meta_var(place)
    scales, staged = T.meta_var((consumer.kernel.k_tile_scales, consumer.barriers.column_scales))
    column = T.meta_var(first + consumer.lane % 4 * 2)
    if consumer.kernel.column_scales is not None:
        for v in T.vectorized(2):
            scaling.of_columns[v] = staged[stage, column + v]
    else:
        # In one clamped line of all scales, since a bound of each column takes a register: what lies beyond n is never stored.
        groups, columns = T.meta_var([int(extent) for extent in scales.columns.shape])
        group = T.meta_var((scaling.begin + i) // (scales.group // BLOCK))
        for v in T.unroll(2):
            at = T.meta_var(T.min(group * columns + scaling.column + column + v, groups * columns - 1))
            scaling.of_columns[v] = scales.columns[at // columns, at % columns]


def _block_scale(scaling: Scaling, unit: Any) -> Any:
    """Return the scale of a unit of columns."""
    if int(scaling.of_columns.shape[0]) == 1:
        return scaling.of_columns[0]
    return T.Select(scaling.column % BLOCK < BLOCK - unit * scaling.unit, scaling.of_columns[0], scaling.of_columns[1])


def _has_products(consumer: Consumer) -> bool:
    """Say whether there are scales that vary along k and are known before products are added."""
    return _scales_of(consumer).has_blocks or _scales_of(consumer).has_row_groups


def _product(consumer: Consumer, scaling: Scaling, number: Any, unit: Any) -> Any:
    """Return the scale of one of a thread's rows times that of a unit of columns, as far as both vary along k and are known by then."""
    scales, row = _scales_of(consumer), scaling.of_rows[number]
    if scales.units > 1:
        row = row * T.float32(1 / scales.units)
    if not scales.has_blocks:
        return row
    return row * _block_scale(scaling, unit) if scales.has_row_groups else _block_scale(scaling, unit)


@T.inline
def _multiply_scales(consumer, scaling, set_number, mma_tile):
    """Multiply the scales of a thread's two rows by those of the columns' blocks, while wgmma multiplies."""
    row, first = T.meta_var((_row_of(consumer, mma_tile), mma_tile * 2 if _loads_row_scales(consumer) else 0))
    if consumer.kernel.scales is not None:
        for half in T.unroll(2):
            scaling.of_rows[half] = consumer.barriers.scales[consumer.state.stage, row + half * 8]
    for unit in T.unroll(scaling.units):
        for half in T.unroll(2):
            scaling.products[(set_number * scaling.units + unit) * 2 + half] = _product(consumer, scaling, first + half, unit)


@T.inline
def _unpack(consumer, mma_tile):
    """Unpack an MMA tile of a stage's 4-bit weights to registers: parts of 64 elements along k are one after the other there."""
    parts = T.meta_var(K_TILE_BYTES // TILE_K)
    tiles, per_part = T.meta_var((consumer.kernel.params.block_m // TILE_ROWS, MMAS // parts * A_FRAGMENT))
    first = T.meta_var(consumer.first_row // TILE_ROWS + mma_tile * (MMA_TILE_ROWS // TILE_ROWS) + consumer.warp)
    lane = T.meta_var(consumer.lane // 4 * 4 + consumer.lane % 2 * 2)
    for part in T.unroll(parts):
        registers = T.meta_var(consumer.fragments.ptr_to([consumer.first_fragment + mma_tile * MMAS * A_FRAGMENT + part * per_part]))
        place = T.meta_var((part * tiles + first) * TILE_WORDS + lane * LANE_WORDS)
        words = T.meta_var(consumer.barriers.a.ptr_to([consumer.state.stage, place]))
        T.cuda.func_call(int4_bytes.NAME, registers, words, consumer.lane, source_code=int4_bytes.SOURCE)


@T.inline
def _multiply(consumer, scaling, set_number, mma_tile, i):
    """Start the MMAs of an MMA tile of a k-tile into a set of registers; wait for the k-tile before its first one."""
    state, count = T.meta_var((consumer.state, consumer.kernel.accum.per_mma_tile))
    if mma_tile == 0:
        _load_scales(consumer, scaling, i)
        consumer.barriers.full.wait(state.stage, state.phase)
    first = T.meta_var((set_number - mma_tile) * count)
    writing = T.meta_var(consumer._replace(first_partial=first, first_fragment=set_number * A_FRAGMENT * MMAS))
    if consumer.kernel.a.in_registers:
        _unpack(writing, mma_tile)
    T.ptx.wgmma.fence.sync.aligned()
    issue_mma(writing, state.stage, range(mma_tile, mma_tile + 1), tirx.const(True, "bool"))
    T.ptx.wgmma.commit_group.sync.aligned()
    if consumer.kernel.params.is_staggered and mma_tile == 0:
        if (consumer.index == 0) & (i == consumer.kernel.params.stagger_k_tiles) & (consumer.lane == 0):
            consumer.barriers.order.arrive(1)
    if _has_products(consumer):
        _multiply_scales(consumer, scaling, set_number, mma_tile)
    if mma_tile == consumer.kernel.params.mma_tiles - 1:
        state.advance()


@T.inline
def _add_columns(consumer, scaling, set_number, mma_tile, place):
    """Add a set's accumulators, scaled, where each column has a scale of its own; `place` is the k-tile and its stage."""
    acc, count, has_row_groups = T.meta_var(
        (consumer.acc, consumer.kernel.accum.per_mma_tile, consumer.kernel.k_tile_scales.has_row_groups)
    )
    i, stage = T.meta_var(place)
    for block in T.unroll(count // 4):
        _load_pair(consumer, scaling, (stage, block * 8), i)
        for j in T.unroll(4):
            of_row = T.meta_var(scaling.products[set_number * 2 + j // 2])
            scale = T.meta_var(scaling.of_columns[j % 2] * of_row if has_row_groups else scaling.of_columns[j % 2])
            at = T.meta_var(mma_tile * count + block * 4 + j)
            acc[at] = acc[at] + T.cast(scaling.sums[set_number * count + block * 4 + j], "float32") * scale


@T.inline
def _add(consumer, scaling, set_number, mma_tile, left, i):
    """Wait until so many MMA tiles are being multiplied, give k-tile i's stage back after its last one, add the set's products, scaled."""
    acc, partials, count = T.meta_var((consumer.acc, consumer.partials, consumer.kernel.accum.per_mma_tile))
    has_products = T.meta_var(_has_products(consumer))
    is_last, is_staged = T.meta_var((mma_tile == consumer.kernel.params.mma_tiles - 1, consumer.kernel.column_scales is not None))
    T.ptx.wgmma.wait_group.sync.aligned(left)
    fence(partials, set_number * count, (set_number + 1) * count)
    if is_last and not is_staged:
        release(consumer, consumer.stage_before(left + 1))
    if not consumer.kernel.k_tile_scales.has_column_groups:
        for j in T.unroll(count):
            scale = T.meta_var(scaling.products[(set_number * scaling.units + j // 4 * 8 // scaling.unit) * 2 + j % 4 // 2])
            added = T.meta_var(T.cast(scaling.sums[set_number * count + j], "float32"))
            acc[mma_tile * count + j] = acc[mma_tile * count + j] + (added * scale if has_products else added)
    else:
        stage = T.meta_var(consumer.stage_before(left + 1) if is_last else consumer.state.stage)
        _add_columns(consumer, scaling, set_number, mma_tile, (i, stage))
    if is_last and is_staged:
        T.cuda.warp_sync()
        release(consumer, consumer.stage_before(left + 1))


@T.inline
def _run_in_turn(consumer, scaling, k_tiles):
    """Multiply with one set of registers: each MMA tile is added before the next one is multiplied."""
    for i in T.serial(k_tiles):
        _multiply(consumer, scaling, 0, 0, i)
        _add(consumer, scaling, 0, 0, 0, i)
        if consumer.kernel.params.mma_tiles == 2:
            _multiply(consumer, scaling, 0, 1, i)
            _add(consumer, scaling, 0, 1, 0, i)


@T.inline
def _multiply_chain(consumer, scaling, first, count):
    """Multiply so many k-tiles with two sets of registers, which take turns: one is added while the next one is multiplied."""
    _multiply(consumer, scaling, 0, 0, first)
    for pair in T.unroll((count - 1) // 2):
        _multiply(consumer, scaling, 1, 0, first + pair * 2 + 1)
        _add(consumer, scaling, 0, 0, 1, first + pair * 2)
        _multiply(consumer, scaling, 0, 0, first + pair * 2 + 2)
        _add(consumer, scaling, 1, 0, 1, first + pair * 2 + 1)
    if count % 2 == 0:
        _multiply(consumer, scaling, 1, 0, first + count - 1)
        _add(consumer, scaling, 0, 0, 1, first + count - 2)
        _add(consumer, scaling, 1, 0, 0, first + count - 1)
    else:
        _add(consumer, scaling, 0, 0, 0, first + count - 1)


@T.inline
def _run_overlapped(consumer, scaling, k_tiles):
    """Multiply with two sets of registers, in chains of k-tiles."""
    for turn in T.serial(k_tiles // SCALED_CHAIN):
        _multiply_chain(consumer, scaling, turn * SCALED_CHAIN, SCALED_CHAIN)
    if k_tiles % SCALED_CHAIN > 0:
        _multiply_chain(consumer, scaling, k_tiles - k_tiles % SCALED_CHAIN, k_tiles % SCALED_CHAIN)


@T.inline
def _scale_rows(consumer, scaling):
    """Multiply the accumulators of each row by its scale, where that does not vary along k."""
    acc, count, scales = T.meta_var((consumer.acc, consumer.kernel.accum.per_mma_tile, consumer.kernel.k_tile_scales.rows))
    units = T.meta_var(consumer.kernel.k_tile_scales.units)
    for mma_tile in T.unroll(consumer.kernel.params.mma_tiles):
        for half in T.unroll(2):
            row = T.meta_var(scaling.row + _row_of(consumer, mma_tile) + half * 8)
            scale = T.meta_var(scales[T.min(row, int(scales.shape[0]) - 1)])
            scaling.of_rows[half] = scale * T.float32(1 / units) if units > 1 else scale
        for j in T.unroll(count):
            acc[mma_tile * count + j] = acc[mma_tile * count + j] * scaling.of_rows[j % 4 // 2]


@T.inline
def _scale_columns(consumer, scaling):
    """Multiply the accumulators of each column by its scale, where that does not vary along k."""
    acc, count, scales = T.meta_var((consumer.acc, consumer.kernel.accum.per_mma_tile, consumer.kernel.k_tile_scales.columns))
    for block in T.unroll(count // 4):
        for v in T.unroll(2):
            column = T.meta_var(scaling.column + block * 8 + consumer.lane % 4 * 2 + v)
            scaling.of_columns[v] = scales[T.min(column, int(scales.shape[0]) - 1)]
        for mma_tile in T.unroll(consumer.kernel.params.mma_tiles):
            for j in T.unroll(4):
                at = T.meta_var(mma_tile * count + block * 4 + j)
                acc[at] = acc[at] * scaling.of_columns[j % 2]


@T.inline
def run_scaled(consumer, k_tiles, start):
    """Multiply so many k-tiles, scaled, and leave the results in the accumulators; `start` is the tile's first row, column and k-tile."""
    scaling = T.meta_var(_scaling(consumer, start))
    for j in T.unroll(consumer.kernel.accum.registers):
        consumer.acc[j] = T.float32(0)
    if consumer.kernel.k_tile_scales.sets == 2:
        _run_overlapped(consumer, scaling, k_tiles)
    else:
        _run_in_turn(consumer, scaling, k_tiles)
    if not consumer.kernel.k_tile_scales.has_row_groups:
        _scale_rows(consumer, scaling)
    if len(consumer.kernel.k_tile_scales.columns.shape) == 1:
        _scale_columns(consumer, scaling)
