"""Owns what the templates of memory-bound kernels on GPUs share: flat loops over threads, rows and columns of a reduction.

Knows nothing of policies, of parameters or of any one operator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.s_tir import Schedule

from kerneldecl.model import dtype_bytes
from kerneldecl.templates import _blocks

ACCESS_BYTES = 16
"""The most that one thread reads or writes at once."""


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


def row_reduction(sch: Schedule, leaf: _blocks.Leaf, rest: Sequence[_blocks.Leaf], cut: RowCut) -> bool:
    """Reduce along rows: each thread adds up what it loads, then all threads of a row combine what they have.

    With chunks, a second kernel combines those.
    """
    row, along, lanes = _row_loops(sch, leaf, cut.width)
    size, rows, block = _blocks.extent(sch, along), _blocks.extent(sch, row), leaf.rv
    if rows % (cut.rows * cut.tile) or size % cut.chunks or (cut.tile > 1 and len(leaf.loops_of("spatial")) != 1):
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


def _row_loops(sch: Schedule, leaf: _blocks.Leaf, width: int) -> tuple[Any, Any, list[Any]]:
    """Return one loop over rows, one from vector to vector, and those within a vector."""
    walk = _blocks.main_walk(leaf)
    order = _blocks.memory_order(leaf, "reduce")
    reused = [leaf.loops[axis] for axis in order if walk[axis] == 0 and leaf.block.axes[axis].extent > 1]
    *outer, inner = (leaf.loops[axis] for axis in order if leaf.loops[axis] not in reused)
    # Vectors are cut off before loops are fused: of a fused index, TVM does not see that neighbours are neighbours.
    vectors, lane = sch.split(inner, [None, width])
    spatial = leaf.loops_of("spatial")
    sch.reorder(*spatial, *outer, vectors, lane, *reused)
    row = sch.fuse(*spatial) if spatial else sch.add_unit_loop(sch.get_loops(leaf.rv)[0])
    return row, sch.fuse(*outer, vectors) if outer else vectors, [lane, *reused]


def _row_partials(sch: Schedule, block: Any, loops: Sequence[Any], rest: Sequence[_blocks.Leaf], cut: RowCut) -> None:
    # 1. Blocks of threads: over rows, and along each.
    row, tile, along, *lanes = loops
    grid, ty = sch.split(row, [None, cut.rows])
    steps, tx = sch.split(along, [None, cut.threads])
    outer, inner = sch.split(steps, [None, min(cut.unroll, _blocks.extent(sch, steps))])
    sch.reorder(grid, ty, tx, outer, inner, tile, *lanes)
    # 2. Partial results, one for each thread and row, from vectors in registers.
    partial = sch.rfactor(tx, 0)
    grid, ty, tx, outer, inner, tile, *lanes = sch.get_loops(partial)
    sch.set_scope(partial, 0, "local")
    for loop, thread in ((grid, "blockIdx.x"), (ty, "threadIdx.y"), (tx, "threadIdx.x")):
        sch.bind(loop, thread)
    for loop in (inner, tile, *lanes):
        sch.unroll(loop)
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


def load_vectors(sch: Schedule, block: Any, loop: Any) -> None:
    """Copy what a block reads in one turn of a loop to registers, in vectors."""
    for at in range(len(sch.get(block).reads)):
        copy = sch.cache_read(block, at, "local")
        sch.compute_at(copy, loop, preserve_unit_loops=True)
        vectorize_copy(sch, copy)


def vectorize_copy(sch: Schedule, copy: Any) -> None:
    """Make accesses of at most 16 bytes of the innermost loop of a copy."""
    loop = sch.get_loops(copy)[-1]
    width = math.gcd(_blocks.extent(sch, loop), ACCESS_BYTES // dtype_bytes(str(sch.get(copy).writes[0].source.dtype)))
    outer, inner = sch.split(loop, [None, width])
    sch.unroll(outer)
    sch.vectorize(inner)


def _combine_chunks(sch: Schedule, block: Any, rest: Sequence[_blocks.Leaf]) -> None:
    """Add up the chunks' results in a kernel of its own, a warp for each result."""
    row, chunk, tile = sch.get_loops(block)
    sch.reorder(row, tile, chunk)
    row = sch.fuse(row, tile)
    _, tx = sch.split(chunk, [None, min(32, _blocks.extent(sch, chunk))])
    sch.bind(row, "blockIdx.x")
    sch.bind(tx, "threadIdx.x")
    for leaf in rest:
        sch.reverse_compute_at(leaf.rv, row, preserve_unit_loops=True)
    if rest:
        sch.set_scope(block, 0, "local")
