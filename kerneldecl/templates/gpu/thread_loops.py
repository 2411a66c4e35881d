"""Owns what the templates of memory-bound kernels on GPUs share: flat loops over threads, rows and columns of a reduction.

Knows nothing of policies, of parameters or of any one operator.
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

from kerneldecl.compiler.intrinsics.int4_dot import dot_intrinsic, dot_pair_intrinsic
from kerneldecl.model import Value, dtype_bytes
from kerneldecl.templates.shared import blocks, reductions

ACCESS_BYTES = 16
"""The most that one thread reads or writes at once."""
THREADS = 128
"""Of a block where nothing else decides."""


@dataclass(frozen=True)
class RowCut:
    """How a reduction along contiguous memory is cut up."""

    threads: int
    """Threads that share a row."""
    rows: int
    """Rows of one block, each with threads of its own."""
    width: int
    """Elements that a thread loads at once."""
    unroll: int
    """Loads of a thread that are in flight together."""
    tile: int = 1
    """Rows that a thread computes together, so that an operand they share is loaded once."""
    chunks: int = 1
    """Parts of a row that are computed apart, where there are too few rows."""
    is_paired: bool = False
    """Rows of a tile go two by two to an intrinsic that whole warps compute."""


def row_reduction(sch: Schedule, leaf: blocks.Leaf, rest: Sequence[blocks.Leaf], cut: RowCut) -> bool:
    """Reduce along rows: each thread adds up what it loads, then all threads of a row combine what they have.

    With chunks, a second kernel combines those.
    """
    row, along, lanes = _row_loops(sch, leaf, cut.width)
    size, rows, block = blocks.extent(sch, along), blocks.extent(sch, row), leaf.rv
    long = [axis for axis in leaf.block.axes if axis.kind == "spatial" and axis.extent > 1]
    if rows % (cut.rows * cut.tile) or size % cut.chunks or (cut.tile > 1 and len(long) != 1):
        return False
    row, tile = sch.split(row, [None, cut.tile])
    if cut.chunks > 1:
        chunk, along = sch.split(along, [cut.chunks, None])
        sch.reorder(row, chunk, tile)
        block = sch.rfactor(chunk, 0)
        row, chunk, tile, along, *lanes = sch.get_loops(block)
        row = sch.fuse(row, chunk)
        _combine_chunks(sch, leaf.rv, rest)
        rest = ()
    _row_partials(sch, block, (row, tile, along, *lanes), rest, cut)
    return True


def _row_loops(sch: Schedule, leaf: blocks.Leaf, width: int) -> tuple[Any, Any, list[Any]]:
    """Return one loop over rows, one from vector to vector, and those within a vector."""
    walk = reductions.main_walk(leaf)
    order = reductions.memory_order(leaf, "reduce")
    reused = [leaf.loops[axis] for axis in order if walk[axis] == 0 and leaf.block.axes[axis].extent > 1]
    *outer, inner = (leaf.loops[axis] for axis in order if leaf.loops[axis] not in reused)
    # Vectors are cut off before loops are fused: of a fused index, TVM does not see that neighbours are neighbours.
    vectors, lane = sch.split(inner, [None, width])
    spatial = leaf.loops_of("spatial")
    sch.reorder(*spatial, *outer, vectors, lane, *reused)
    row = sch.fuse(*spatial) if spatial else sch.add_unit_loop(sch.get_loops(leaf.rv)[0])
    return row, sch.fuse(*outer, vectors) if outer else vectors, [lane, *reused]


def _row_partials(sch: Schedule, block: Any, loops: Sequence[Any], rest: Sequence[blocks.Leaf], cut: RowCut) -> None:
    # 1. Blocks of threads: over rows, and along each.
    row, tile, along, *lanes = loops
    grid, ty = sch.split(row, [None, cut.rows])
    steps, tx = sch.split(along, [None, cut.threads])
    outer, inner = sch.split(steps, [None, min(cut.unroll, blocks.extent(sch, steps))])
    if cut.is_paired:
        tile, pair = sch.split(tile, [None, 2])
        lanes = [pair, *lanes]
    sch.reorder(grid, ty, tx, outer, inner, tile, *lanes)
    # 2. Partial results, one for each thread and row, from vectors in registers.
    partial = sch.rfactor(tx, 0)
    grid, ty, tx, outer, inner, tile, *lanes = sch.get_loops(partial)
    sch.set_scope(partial, 0, "local")
    for loop, thread in ((grid, "blockIdx.x"), (ty, "threadIdx.y"), (tx, "threadIdx.x")):
        sch.bind(loop, thread)
    sch.unroll(inner)
    sch.unroll(tile)
    load_vectors(sch, partial, tile)
    # 3. What all threads of a row found, then what follows.
    sch.reverse_compute_at(block, ty, preserve_unit_loops=True)
    tx, *others = sch.get_loops(block)[2:]
    sch.reorder(*others, tx)
    sch.bind(tx, "threadIdx.x")
    for leaf in rest:
        sch.reverse_compute_at(leaf.rv, ty, preserve_unit_loops=True)
    if rest:
        sch.set_scope(block, 0, "local")
    sch.decompose_reduction(partial, outer)
    if not _dot_i4(sch, partial, lanes, cut):
        for loop in lanes:
            sch.unroll(loop)


def _dot_i4(sch: Schedule, block: Any, loops: Sequence[Any], cut: RowCut) -> bool:
    """Have an intrinsic for weights of 4 bits compute what a thread has loaded, if that is what the block computes."""
    dtypes = [str(region.source.dtype) for region in sch.get(block).reads]
    if "uint8" not in dtypes or len(loops) < 2:
        return False
    with contextlib.suppress(KeyError, ScheduleError):
        sch.tensorize(loops[0], dot_pair_intrinsic(cut.width) if cut.is_paired else dot_intrinsic(cut.width, dtypes[-1]))
        return True
    return False


def load_vectors(sch: Schedule, block: Any, loop: Any) -> None:
    """Copy what a block reads of global memory in one turn of a loop to registers, in vectors.

    What it reads in several places at once, as a concatenation does, stays where it is: between them may be anything.
    """
    for at in range(len(sch.get(block).reads)):
        read = sch.get(block).reads[at]
        if read.source.scope() != "global" or any(not isinstance(dim.extent, tirx.IntImm) or dim.extent != 1 for dim in read.region):
            continue
        copy = sch.cache_read(block, at, "local", consumer_blocks=[block])
        sch.compute_at(copy, loop, preserve_unit_loops=True)
        vectorize_copy(sch, copy)


def compute_under(sch: Schedule, block: Any, loop: Any) -> None:
    """Compute in registers what a copy to global memory writes in one turn of a loop, from vectors in registers."""
    sch.compute_at(block, loop, preserve_unit_loops=True)
    load_vectors(sch, block, loop)
    sch.unroll(sch.get_loops(block)[-1])


def vectorize_copy(sch: Schedule, copy: Any) -> None:
    """Make accesses of at most 16 bytes of the innermost loop of a copy."""
    loop = sch.get_loops(copy)[-1]
    width = math.gcd(blocks.extent(sch, loop), ACCESS_BYTES // dtype_bytes(str(sch.get(copy).writes[0].source.dtype)))
    outer, inner = sch.split(loop, [None, width])
    sch.unroll(outer)
    sch.vectorize(inner)


def _combine_chunks(sch: Schedule, block: Any, rest: Sequence[blocks.Leaf]) -> None:
    """Add up the chunks' results in a kernel of its own, a warp for each result."""
    row, chunk, tile = sch.get_loops(block)
    sch.reorder(row, tile, chunk)
    row = sch.fuse(row, tile)
    _, tx = sch.split(chunk, [None, min(32, blocks.extent(sch, chunk))])
    sch.bind(row, "blockIdx.x")
    sch.bind(tx, "threadIdx.x")
    for leaf in rest:
        sch.reverse_compute_at(leaf.rv, row, preserve_unit_loops=True)
    if rest:
        sch.set_scope(block, 0, "local")


@dataclass(frozen=True)
class ColumnCut:
    """How a reduction across contiguous memory is cut up."""

    threads: int
    """Threads side by side along the columns."""
    rows: int
    """Threads of one block that share a column."""
    width: int
    """Columns that a thread loads at once."""
    unroll: int
    """Loads of a thread that are in flight together."""
    chunks: int = 1
    """Parts of a column that are computed apart, where there are too few columns."""


def column_reduction(sch: Schedule, leaf: blocks.Leaf, rest: Sequence[blocks.Leaf], cut: ColumnCut) -> bool:
    """Reduce down columns: each thread adds up `width` of them side by side, then those of a column meet in shared memory.

    With chunks, a second kernel combines those.
    """
    column = reductions.contiguous_axis(leaf)
    assert column is not None
    others = [loop for at, loop in enumerate(leaf.loops) if leaf.block.axes[at].kind == "spatial" and at != column and loop is not None]
    reduce = [leaf.loops[axis] for axis in reductions.memory_order(leaf, "reduce")]
    vectors, lane = sch.split(leaf.loops[column], [None, cut.width])
    sch.reorder(*others, vectors, lane, *reduce)
    along = sch.fuse(*reduce)
    size, block = blocks.extent(sch, along), leaf.rv
    # Blocks are moved from here on, and moving loses what bounds uneven loops.
    if leaf.block.axes[column].extent % (cut.width * cut.threads) or size % cut.chunks:
        return False
    if cut.chunks > 1:
        chunk, _ = sch.split(along, [cut.chunks, None])
        block = sch.rfactor(chunk, 0)
        *others, vectors, lane, chunk, along = sch.get_loops(block)
        others.append(chunk)
        _combine_columns(sch, leaf.rv, rest)
        rest = ()
    _column_partials(sch, block, (others, vectors, lane, along), rest, cut)
    return True


def _column_partials(
    sch: Schedule, block: Any, loops: tuple[list[Any], Any, Any, Any], rest: Sequence[blocks.Leaf], cut: ColumnCut
) -> None:
    others, vectors, lane, along = loops
    columns, tx = sch.split(vectors, [None, cut.threads])
    steps, ty = sch.split(along, [None, cut.rows])
    outer, inner = sch.split(steps, [None, min(cut.unroll, blocks.extent(sch, steps))])
    sch.reorder(*others, columns, ty, tx, outer, inner, lane) if cut.rows > 1 else sch.reorder(*others, columns, tx, outer, inner, ty, lane)
    grid = sch.fuse(*others, columns)
    if cut.rows == 1:
        tx, outer, inner, _, lane = sch.get_loops(block)[1:]
        sch.bind(tx, "threadIdx.x")
        _finish_columns(sch, block, rest, tx)
        partial = block
    else:
        partial = sch.rfactor(ty, 0)
        grid, ty, tx, outer, inner, lane = sch.get_loops(partial)
        sch.set_scope(partial, 0, "shared")
        own = sch.cache_write(partial, 0, "local")
        sch.bind(ty, "threadIdx.y")
        sch.bind(tx, "threadIdx.x")
        sch.reverse_compute_at(own, tx, preserve_unit_loops=True)
        vectorize_copy(sch, own)
        sch.reverse_compute_at(block, grid, preserve_unit_loops=True)
        _meet(sch, block, rest, cut)
    sch.bind(grid, "blockIdx.x")
    sch.unroll(inner)
    sch.unroll(lane)
    load_vectors(sch, partial, inner)
    sch.decompose_reduction(partial, outer)


def _meet(sch: Schedule, block: Any, rest: Sequence[blocks.Leaf], cut: ColumnCut) -> None:
    """Add up what the threads of each column left in shared memory."""
    part, *columns = sch.get_loops(block)[1:]
    sch.reorder(*columns, part)
    column = sch.fuse(*columns)
    if cut.width % cut.rows == 0:
        _, ty, tx = sch.split(column, [None, cut.rows, cut.threads])
        sch.bind(ty, "threadIdx.y")
    else:
        _, tx = sch.split(column, [None, cut.threads])
    sch.bind(tx, "threadIdx.x")
    _finish_columns(sch, block, rest, tx)


def _finish_columns(sch: Schedule, block: Any, rest: Sequence[blocks.Leaf], loop: Any) -> None:
    """Keep a block's results in registers until the blocks that follow, or a copy, write them."""
    if rest:
        sch.set_scope(block, 0, "local")
    after = [leaf.rv for leaf in rest] or [sch.cache_write(block, 0, "local")]
    for rv in after:
        sch.reverse_compute_at(rv, loop, preserve_unit_loops=True)


def _combine_columns(sch: Schedule, block: Any, rest: Sequence[blocks.Leaf]) -> None:
    """Add up the chunks' results in a kernel of its own, a thread for each column."""
    *columns, _ = sch.get_loops(block)
    column = sch.fuse(*columns)
    grid, tx = sch.split(column, [None, math.gcd(blocks.extent(sch, column), THREADS)])
    sch.bind(grid, "blockIdx.x")
    sch.bind(tx, "threadIdx.x")
    _finish_columns(sch, block, rest, tx)


def reduction(
    sch: Schedule, found: tuple[blocks.Leaf, Sequence[blocks.Leaf]], params: Mapping[str, Value], *, is_paired: bool = False
) -> bool:
    """Schedule a reduction and what follows it as parameters say: along contiguous memory, or across it."""
    leaf, rest = found
    threads, rows, width, unroll, chunks = (blocks.count(params, name) for name in ("threads", "rows", "width", "unroll", "chunks"))
    if params["strided"]:
        return column_reduction(sch, leaf, rest, ColumnCut(threads, rows, width, unroll, chunks))
    tile = blocks.count(params, "tile") if "tile" in params else 1
    return row_reduction(sch, leaf, rest, RowCut(threads, rows, width, unroll, tile, chunks, is_paired))
