"""Owns what GPU templates of memory-bound kernels share: reductions of rows and columns by threads, accesses in vectors.

Knows nothing of policies or of any one operator.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ScheduleError

from kerneldecl.analysis.combined_columns import chunk_rows, combining_threads, has_warps
from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.compiler.intrinsics.int4_dot import dot_intrinsic, dot_pair_intrinsic
from kerneldecl.model import Value, dtype_bytes
from kerneldecl.templates.shared import blocks, reductions


@dataclass(frozen=True)
class RowTiling:
    """How a reduction along contiguous memory is tiled."""

    threads: int
    """Threads that share a row."""
    rows: int
    """Rows of one block, each with threads of its own."""
    width: int
    """Elements that a thread loads with one instruction."""
    unroll: int
    """Loads of a thread in flight together."""
    tile: int = 1
    """Rows that a thread computes together, so that an operand they share is loaded once."""
    chunks: int = 1
    """Chunks into which each row's reduction is split, where there are too few rows."""
    is_paired: bool = False
    """Whether a warp computes two rows of a tile together, by an intrinsic."""

    @classmethod
    def of(cls, params: Mapping[str, Value], *, is_paired: bool) -> RowTiling:
        sizes = {name: blocks.count(params, name) for name in ("threads", "rows", "width", "unroll", "chunks")}
        return cls(**sizes, tile=blocks.count(params, "tile") if "tile" in params else 1, is_paired=is_paired)


def row_reduction(sch: Schedule, leaf: blocks.Leaf, rest: Sequence[blocks.Leaf], tiling: RowTiling) -> bool:
    """Schedule a reduction along rows: each thread reduces the elements it loads, then all threads of a row reduce their partial results.

    With chunks, a second kernel reduces over them. The last block may have fewer rows than the others.
    """
    row, along, lanes = _row_loops(sch, leaf, tiling.width)
    size, rows, block = blocks.extent(sch, along), blocks.extent(sch, row), leaf.rv
    long = [axis for axis in leaf.block.axes if axis.kind == "spatial" and axis.extent > 1]
    if rows % tiling.tile or size % tiling.chunks or (tiling.tile > 1 and len(long) != 1):
        return False
    row, tile = sch.split(row, [None, tiling.tile])
    if tiling.chunks > 1:
        chunk, along = sch.split(along, [tiling.chunks, None])
        sch.reorder(row, chunk, tile)
        block = sch.rfactor(chunk, 0)
        row, chunk, tile, along, *lanes = sch.get_loops(block)
        row = sch.fuse(row, chunk)
        _combine_chunks(sch, leaf.rv, rest)
        rest = ()
    _row_partials(sch, block, (row, tile, along, *lanes), rest, tiling)
    return True


def _row_loops(sch: Schedule, leaf: blocks.Leaf, width: int) -> tuple[Any, Any, list[Any]]:
    """Return one loop over rows, one over vectors of a row, and those within a vector."""
    strides = reductions.main_strides(leaf)
    order = reductions.memory_order(leaf, "reduce")
    reused = [leaf.loops[axis] for axis in order if strides[axis] == 0 and leaf.block.axes[axis].extent > 1]
    *outer, inner = (leaf.loops[axis] for axis in order if leaf.loops[axis] not in reused)
    # Vectors are split off before loops are fused: TVM does not prove that a fused index is contiguous.
    vectors, lane = sch.split(inner, [None, width])
    spatial = leaf.loops_of("spatial")
    sch.reorder(*spatial, *outer, vectors, lane, *reused)
    row = sch.fuse(*spatial) if spatial else sch.add_unit_loop(sch.get_loops(leaf.rv)[0])
    return row, sch.fuse(*outer, vectors) if outer else vectors, [lane, *reused]


def _row_partials(sch: Schedule, block: Any, loops: Sequence[Any], rest: Sequence[blocks.Leaf], tiling: RowTiling) -> None:
    # 1. Thread blocks: over rows, and along each row.
    row, tile, along, *lanes = loops
    is_whole = blocks.extent(sch, row) % tiling.rows == 0
    # Loads test the bounds of the last block's rows by themselves. If additions did, too, nvcc would make branches that loads do not cross.
    is_loaded = not is_whole and all(map(_is_element, sch.get(block).reads))
    grid, ty = sch.split(row, [None, tiling.rows], disable_predication=is_loaded)
    iterations, tx = sch.split(along, [None, tiling.threads])
    outer, inner = sch.split(iterations, [None, min(tiling.unroll, blocks.extent(sch, iterations))])
    if tiling.is_paired:
        tile, pair = sch.split(tile, [None, 2])
        lanes = [pair, *lanes]
    sch.reorder(grid, ty, tx, outer, inner, tile, *lanes)
    # 2. One partial result per thread and row, from vectors in registers.
    partial = sch.rfactor(tx, 0)
    grid, ty, tx, outer, inner, tile, *lanes = sch.get_loops(partial)
    sch.set_scope(partial, 0, "local")
    for loop, thread in ((grid, "blockIdx.x"), (ty, "threadIdx.y"), (tx, "threadIdx.x")):
        sch.bind(loop, thread)
    sch.unroll(inner)
    sch.unroll(tile)
    load_vectors(sch, partial, tile)
    # 3. The reduction over the threads of a row, then the blocks after it.
    sch.reverse_compute_at(block, ty, preserve_unit_loops=True)
    tx, *others = sch.get_loops(block)[2:]
    sch.reorder(*others, tx)
    sch.bind(tx, "threadIdx.x")
    for leaf in rest:
        sch.reverse_compute_at(leaf.rv, ty, preserve_unit_loops=True)
    if rest:
        sch.set_scope(block, 0, "local")
    elif not is_whole:
        store_rows(sch, block, ty)
    sch.decompose_reduction(partial, outer)
    if not _dot_i4(sch, partial, lanes, tiling):
        for loop in lanes:
            sch.unroll(loop)


def store_rows(sch: Schedule, block: Any, row: Any) -> None:
    """Store what threads reduced for a row by a copy: it tests the bounds of rows, which TVM 0.27 forgets where it stores a reduction."""
    copy = sch.cache_write(block, 0, "local")
    sch.reverse_compute_at(copy, row, preserve_unit_loops=True)


def _dot_i4(sch: Schedule, block: Any, loops: Sequence[Any], tiling: RowTiling) -> bool:
    """Tensorize a thread's part of a dot product with 4-bit weights, if that is what the block computes; say whether it is.

    TVM 0.27 cannot tensorize single rows of which chunks were factored as well: an extent of 32 bits meets a variable of 64.
    """
    dtypes = [str(region.source.dtype) for region in sch.get(block).reads]
    if "uint8" not in dtypes or len(loops) < 2 or (tiling.chunks > 1 and not tiling.is_paired):
        return False
    with contextlib.suppress(KeyError, ScheduleError):
        sch.tensorize(loops[0], dot_pair_intrinsic(tiling.width) if tiling.is_paired else dot_intrinsic(tiling.width, dtypes[-1]))
        return True
    return False


def load_vectors(sch: Schedule, block: Any, loop: Any) -> None:
    """Load what a block reads of global memory in one iteration of a loop into registers, in vectors.

    Reads of several elements at once, as of a concatenation, are not loaded so: they may not be contiguous.
    """
    for at in range(len(sch.get(block).reads)):
        read = sch.get(block).reads[at]
        if read.source.scope() != "global" or not _is_element(read):
            continue
        copy = sch.cache_read(block, at, "local", consumer_blocks=[block])
        sch.compute_at(copy, loop, preserve_unit_loops=True)
        vectorize_copy(sch, copy)


def _is_element(read: Any) -> bool:
    return all(isinstance(dim.extent, tirx.IntImm) and dim.extent == 1 for dim in read.region)


def compute_under(sch: Schedule, block: Any, loop: Any) -> None:
    """Compute in registers what a copy to global memory writes in one iteration of a loop, from vectors in registers."""
    sch.compute_at(block, loop, preserve_unit_loops=True)
    load_vectors(sch, block, loop)
    sch.unroll(sch.get_loops(block)[-1])


def vectorize_copy(sch: Schedule, copy: Any, most: int = VECTOR_BYTES) -> None:
    """Vectorize the innermost loop of a copy, in accesses of at most 16 bytes, and at most so many elements."""
    loop = sch.get_loops(copy)[-1]
    width = math.gcd(blocks.extent(sch, loop), most, VECTOR_BYTES // dtype_bytes(str(sch.get(copy).writes[0].source.dtype)))
    outer, inner = sch.split(loop, [None, width])
    sch.unroll(outer)
    sch.vectorize(inner)


def _combine_chunks(sch: Schedule, block: Any, rest: Sequence[blocks.Leaf]) -> None:
    """Reduce over chunks in a second kernel, with a warp for each result."""
    row, chunk, tile = sch.get_loops(block)
    sch.reorder(row, tile, chunk)
    _combine_by_warps(sch, block, (sch.fuse(row, tile), chunk), rest)


def _combine_by_warps(sch: Schedule, block: Any, loops: tuple[Any, Any], rest: Sequence[blocks.Leaf]) -> None:
    row, chunk = loops
    _, tx = sch.split(chunk, [None, min(WARP_LANES, blocks.extent(sch, chunk))])
    sch.bind(row, "blockIdx.x")
    sch.bind(tx, "threadIdx.x")
    for leaf in rest:
        sch.reverse_compute_at(leaf.rv, row, preserve_unit_loops=True)
    if rest:
        sch.set_scope(block, 0, "local")


@dataclass(frozen=True)
class ColumnTiling:
    """How a strided reduction is tiled."""

    threads: int
    """Threads along the columns."""
    rows: int
    """Threads of one block that share a column."""
    width: int
    """Columns that a thread loads with one instruction."""
    unroll: int
    """Loads of a thread in flight together."""
    chunks: int = 1
    """Chunks into which each column's reduction is split, where there are too few columns."""

    @classmethod
    def of(cls, params: Mapping[str, Value]) -> ColumnTiling:
        return cls(**{name: blocks.count(params, name) for name in ("threads", "rows", "width", "unroll", "chunks")})


def column_reduction(
    sch: Schedule, leaf: blocks.Leaf, rest: Sequence[blocks.Leaf], tiling: ColumnTiling, padding: Sequence[blocks.Leaf] = ()
) -> bool:
    """Schedule a reduction down columns: a thread reduces `width` adjacent columns, then threads of a column reduce in shared memory.

    With chunks, a second kernel reduces over them. Blocks that pad operands are computed in registers.
    """
    column = reductions.contiguous_axis(leaf)
    assert column is not None
    others = [loop for at, loop in enumerate(leaf.loops) if leaf.block.axes[at].kind == "spatial" and at != column and loop is not None]
    reduce = [leaf.loops[axis] for axis in reductions.memory_order(leaf, "reduce")]
    vectors, lane = sch.split(leaf.loops[column], [None, tiling.width])
    sch.reorder(*others, vectors, lane, *reduce)
    along = sch.fuse(*reduce)
    size, block = blocks.extent(sch, along), leaf.rv
    # Threads may be more than columns are left for: their loads and stores test bounds.
    if leaf.block.axes[column].extent % tiling.width:
        return False
    if tiling.chunks > 1:
        length = chunk_rows(size, tiling.chunks, tiling.rows * tiling.unroll)
        chunk, _ = sch.split(along, [tiling.chunks, None if size % tiling.chunks == 0 else length])
        block = sch.rfactor(chunk, 0)
        *others, vectors, lane, chunk, along = sch.get_loops(block)
        others.append(chunk)
        _combine_columns(sch, leaf.rv, rest)
        rest = ()
    inner = _column_partials(sch, block, (others, vectors, lane, along), rest, tiling)
    for leaf_before in padding:
        sch.compute_at(leaf_before.rv, inner, preserve_unit_loops=True)
        sch.set_scope(leaf_before.rv, 0, "local")
        vectorize_copy(sch, leaf_before.rv)
    return True


def _padded(
    sch: Schedule, leaf: blocks.Leaf, rest: Sequence[blocks.Leaf], tiling: ColumnTiling
) -> tuple[blocks.Leaf, Sequence[blocks.Leaf], Sequence[blocks.Leaf]] | None:
    """Pad columns and rows of a sum of products to whole tiles where columns are none; return it, the blocks after it, those that pad.

    None where they are not to be told apart any more.
    """
    column, axes = reductions.contiguous_axis(leaf), leaf.block.axes
    reduced = [at for at, axis in enumerate(axes) if axis.kind == "reduce" and axis.extent > 1]
    is_whole = column is None or axes[column].extent % (tiling.width * tiling.threads) == 0
    if is_whole or len(leaf.block.reads) != 2 or not leaf.block.is_multiply_accumulate or len(reduced) != 1:
        return leaf, rest, ()
    rows = tiling.rows * tiling.chunks
    # Unrolled loads beyond the last row would cost more than their bounds where there are few rows.
    unroll = min(tiling.unroll, -(-axes[reduced[0]].extent // rows))
    tiles = {column: tiling.width * tiling.threads, reduced[0]: rows * unroll}
    try:
        sch.pad_einsum(leaf.rv, [tiles.get(at, 1) for at in range(len(axes))])
    except ScheduleError:  # of other indices than axes, as a convolution's
        return leaf, rest, ()
    found = blocks.leaves(sch) or []
    at = next((at for at, each in enumerate(found) if each.block.is_reduction), len(found))
    if len(found) < at + 2:
        return None
    padding, leaf, (cut, *after) = found[:at], found[at], found[at + 1 :]
    if after:
        sch.compute_inline(cut.rv)
    return leaf, after or [cut], padding


def _column_partials(
    sch: Schedule, block: Any, loops: tuple[list[Any], Any, Any, Any], rest: Sequence[blocks.Leaf], tiling: ColumnTiling
) -> Any:
    """Schedule the partial results of columns; return the loop over the loads that are in flight together."""
    others, vectors, lane, along = loops
    is_whole = blocks.extent(sch, vectors) % tiling.threads == 0
    is_loaded = not is_whole and tiling.rows > 1 and all(map(_is_element, sch.get(block).reads))
    columns, tx = sch.split(vectors, [None, tiling.threads], disable_predication=is_loaded)
    iterations, ty = sch.split(along, [None, tiling.rows])
    outer, inner = sch.split(iterations, [None, min(tiling.unroll, blocks.extent(sch, iterations))])
    sch.reorder(*others, columns, ty, tx, outer, inner, lane) if tiling.rows > 1 else sch.reorder(
        *others, columns, tx, outer, inner, ty, lane
    )
    grid = sch.fuse(*others, columns)
    if tiling.rows == 1:
        tx, outer, inner, _, lane = sch.get_loops(block)[1:]
        sch.bind(tx, "threadIdx.x")
        _finish_columns(sch, block, rest, tx)
        partial = block
    else:
        partial = sch.rfactor(ty, 0)
        grid, ty, tx, outer, inner, lane = sch.get_loops(partial)
        sch.set_scope(partial, 0, "shared")
        accum = sch.cache_write(partial, 0, "local")
        sch.bind(ty, "threadIdx.y")
        sch.bind(tx, "threadIdx.x")
        sch.reverse_compute_at(accum, tx, preserve_unit_loops=True)
        vectorize_copy(sch, accum)
        sch.reverse_compute_at(block, grid, preserve_unit_loops=True)
        _reduce_in_smem(sch, block, rest, tiling, is_whole=is_whole)
    sch.bind(grid, "blockIdx.x")
    sch.unroll(inner)
    sch.unroll(lane)
    load_vectors(sch, partial, inner)
    sch.decompose_reduction(partial, outer)
    return inner


def _reduce_in_smem(sch: Schedule, block: Any, rest: Sequence[blocks.Leaf], tiling: ColumnTiling, *, is_whole: bool) -> None:
    """Reduce over the partial results of each column's threads, in shared memory."""
    ty, *columns = sch.get_loops(block)[1:]
    sch.reorder(*columns, ty)
    # Of fused indices, TVM 0.27 forgets the bounds. All loops but the last one are of one iteration.
    column = sch.fuse(*columns) if is_whole else columns[-1]
    if tiling.width % tiling.rows == 0:
        _, ty, tx = sch.split(column, [None, tiling.rows, tiling.threads])
        sch.bind(ty, "threadIdx.y")
    else:
        _, tx = sch.split(column, [None, tiling.threads])
    sch.bind(tx, "threadIdx.x")
    _finish_columns(sch, block, rest, tx)


def _finish_columns(sch: Schedule, block: Any, rest: Sequence[blocks.Leaf], loop: Any) -> None:
    """Keep a block's results in registers for the blocks after it, or for a copy, which store them."""
    if rest:
        sch.set_scope(block, 0, "local")
    after = [leaf.rv for leaf in rest] or [sch.cache_write(block, 0, "local")]
    for rv in after:
        sch.reverse_compute_at(rv, loop, preserve_unit_loops=True)


def _combine_columns(sch: Schedule, block: Any, rest: Sequence[blocks.Leaf]) -> None:
    """Reduce over chunks in a second kernel, with a thread or a warp for each column."""
    *columns, chunk = sch.get_loops(block)
    column = sch.fuse(*columns)
    if has_warps(blocks.extent(sch, column)):
        _combine_by_warps(sch, block, (column, chunk), rest)
        return
    grid, tx = sch.split(column, [None, combining_threads(blocks.extent(sch, column))])
    sch.bind(grid, "blockIdx.x")
    sch.bind(tx, "threadIdx.x")
    _finish_columns(sch, block, rest, tx)


def reduction(
    sch: Schedule, found: tuple[blocks.Leaf, Sequence[blocks.Leaf]], params: Mapping[str, Value], *, is_paired: bool = False
) -> bool:
    """Schedule a reduction and the blocks after it by its parameters: along rows or, where it is `strided`, down columns.

    Columns of products that threads do not divide are padded, so that bounds of loads alone are tested: with those of additions, nvcc makes
    a branch for each, and has one load in flight.
    """
    leaf, rest = found
    if params["strided"]:
        tiling = ColumnTiling.of(params)
        padded = _padded(sch, leaf, rest, tiling)
        return padded is not None and column_reduction(sch, padded[0], padded[1], tiling, padded[2])
    return row_reduction(sch, leaf, rest, RowTiling.of(params, is_paired=is_paired))
