"""Owns loops of a reduction: which memory it runs along, and on CPUs its loop nest with vectors of partial results.

Knows nothing of policies or of any one operator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.s_tir import Schedule

from kerneldecl.model import Value
from kerneldecl.templates.shared.blocks import (
    Leaf,
    add_missing_loops,
    axis_loops,
    count,
    extent,
    inline_producers,
    is_collapsible,
    leaves,
    strides,
)


@dataclass(frozen=True)
class RowTiling:
    """How a reduction along rows, which are contiguous in memory, is tiled."""

    lanes: int
    """Elements of a vector register."""
    vectors: int
    """Vector registers with partial results of one row."""
    rows: int = 1
    """Rows computed together, so that an operand they share is loaded once."""
    chunks: int = 1
    """Chunks into which each row's reduction is split, where there are fewer rows than cores."""


@dataclass(frozen=True)
class ColumnTiling:
    """How a reduction down columns, which are strided in memory, is tiled."""

    columns: int
    """Columns computed together."""
    steps: int
    """Rows accumulated per iteration, so that partial results are loaded and stored less often."""
    chunks: int = 1
    """Chunks into which each column's reduction is split, where there is too little other work for all cores."""

    @classmethod
    def of(cls, params: Mapping[str, Value]) -> ColumnTiling:
        return cls(*(count(params, name) for name in ("columns", "steps", "chunks")))


@dataclass(frozen=True)
class Nest:
    """A reduction's loop nest before its reductions are decomposed: other blocks may still be moved into it."""

    outer: Any
    """The outermost loop, over results."""
    inits: tuple[tuple[Any, Any], ...]
    """Reduction blocks to be decomposed, each with the loop before which its initial value is set."""
    uneven: tuple[Any, int] | None = None
    """A loop whose last iteration is partial, and its number of whole iterations."""


def isolate_reduction(sch: Schedule) -> tuple[Leaf, list[Leaf]] | None:
    """Inline the producers of a function's one reduction; return it and the blocks after it, None where the function has another form."""
    inline_producers(sch)
    add_missing_loops(sch)
    found = leaves(sch)
    if found is None or not found[0].block.is_reduction or any(leaf.block.is_reduction for leaf in found[1:]):
        return None
    first, *rest = found
    return (first, rest) if first.loops_of("reduce") and first.block.reads else None


def contiguous_axis(leaf: Leaf) -> int | None:
    """Return the axis, longer than 1, along which the largest operand is contiguous, None where there is none."""
    main = main_strides(leaf)
    return next((at for at, axis in enumerate(leaf.block.axes) if main[at] == 1 and axis.extent > 1), None)


def is_strided(leaf: Leaf) -> bool:
    """Say whether the largest operand is contiguous along a spatial axis, so that the reduction is strided."""
    axis = contiguous_axis(leaf)
    return axis is not None and leaf.block.axes[axis].kind == "spatial"


def main_strides(leaf: Leaf) -> tuple[int | None, ...]:
    """Return the strides, by axis, of the largest operand that a block reads."""
    return strides(max(leaf.block.reads, key=lambda access: math.prod(access.shape)), len(leaf.loops))


def memory_order(leaf: Leaf, kind: str) -> list[int]:
    """Return the axes of a kind that have loops by their strides in the largest operand, the longest first."""
    main = main_strides(leaf)
    axes = (at for at, axis in enumerate(leaf.block.axes) if axis.kind == kind and leaf.loops[at] is not None)
    return sorted(axes, key=lambda at: (leaf.block.axes[at].extent > 1, -abs(main[at] or 0)))


def leading_rows(found: Sequence[Leaf]) -> int | None:
    """Return how many leading axes all blocks share as rows, None where they share none or where a reduction is strided."""
    reducing = [leaf for leaf in found if leaf.block.is_reduction]
    if not reducing or any(not leaf.block.reads or is_strided(leaf) for leaf in reducing):
        return None
    extents = [axis.extent for axis in reducing[0].block.axes if axis.kind == "spatial"]
    results = {access.operand for leaf in found for access in leaf.block.writes}
    rows = tuple(((axis, 1),) if extent > 1 else () for axis, extent in enumerate(extents))
    for leaf in found:
        leading = [axis.extent for axis in leaf.block.axes[: len(extents)] if axis.kind == "spatial"]
        accesses = [access for access in (*leaf.block.reads, *leaf.block.writes) if access.operand in results]
        if leading != extents or any(access.index[: len(rows)] != rows for access in accesses):
            return None
    return len(extents) or None


def finish_nest(sch: Schedule, nest: Nest, rest: Sequence[Leaf], params: Mapping[str, Value]) -> None:
    """Move the blocks after a reduction into its nest, unless it only computes chunks; parallelize the nest; decompose its reductions."""
    if count(params, "chunks") == 1:
        for leaf in rest:
            sch.reverse_compute_at(leaf.rv, nest.outer)
    if params["parallel"]:
        sch.parallel(nest.outer)
    decompose(sch, nest)


def decompose(sch: Schedule, nest: Nest) -> None:
    """Decompose a nest's reductions, and partition its uneven loop, so that whole iterations have no predicate."""
    for block, loop in nest.inits:
        sch.decompose_reduction(block, loop)
    if nest.uneven is not None:
        loop, whole = nest.uneven
        sch.loop_partition(loop, [whole, None])


def decompose_merged(sch: Schedule, nest: Nest) -> None:
    """Do what `decompose` does for a nest that was merged with others: there, only lowering can still partition an uneven loop."""
    inits = nest.inits
    if nest.uneven is not None:
        sch.annotate(nest.uneven[0], "pragma_loop_partition_hint", 1)
        inits = inits[1:]
    for block, loop in inits:
        sch.decompose_reduction(block, loop)


def row_reduction(sch: Schedule, leaf: Leaf, tiling: RowTiling) -> Nest:
    """Tile a reduction along contiguous memory: into vectors of partial results, these into one vector, that one over its lanes.

    The block itself is the last one in the nest, and reduces over lanes. With chunks, it reduces over chunks, outside the nest.
    """
    block, row, loops_of_row = _rows(sch, leaf, tiling)
    size = extent(sch, loops_of_row.along)
    if size < tiling.lanes:
        return Nest(row, ((block, sch.get_loops(block)[1]),))
    first, *second = partial_results(sch, block, loops_of_row.along, tiling)
    # The vectors' loops stay in place: moving a block drops the predicate of a loop that was split unevenly.
    row, *loops = sch.get_loops(first)
    steps, (wide, *reused) = loops[: loops_of_row.outer + 1], loops[loops_of_row.outer + 1 :]
    inner = []
    if tiling.rows > 1:
        row, tile = sch.split(row, [None, tiling.rows])
        inner.append(tile)
    sch.reorder(*steps, *inner, *reused, wide)
    for loop in (*inner, *reused):
        sch.unroll(loop)
    sch.vectorize(wide)
    inits = [(first, steps[0])]
    for rv in second:
        sch.reverse_compute_at(rv, row)
        inits.append((rv, vectorize_lanes(sch, rv)))
    sch.reverse_compute_at(block, row)
    width = extent(sch, wide)
    return Nest(row, tuple(inits), (steps[-1], size // width) if size % width else None)


def partial_results(sch: Schedule, block: Any, loop: Any, tiling: RowTiling) -> list[Any]:
    """Split a reduction along a loop into one to several vectors and, unless one suffices, a second one from these to one vector."""
    vectors = min(tiling.vectors, extent(sch, loop) // tiling.lanes)
    _, wide = sch.split(loop, [None, vectors * tiling.lanes])
    axis = len(sch.get(block).writes[0].region)
    partials = [sch.rfactor(wide, axis)]
    if vectors > 1:
        _, lane = sch.split(sch.get_loops(block)[-1], [vectors, tiling.lanes])
        partials.append(sch.rfactor(lane, axis))
    return partials


def vectorize_lanes(sch: Schedule, partial: Any) -> Any:
    """Vectorize the first axis of a block that was moved; return its outermost reduction loop."""
    kinds = [axis.iter_type for axis in sch.get(partial).iter_vars]
    loops = list(zip(kinds, axis_loops(sch, partial), strict=True))
    reduced = [loop for kind, loop in loops if kind == tirx.IterVar.CommReduce]
    _, lanes = loops[0]
    sch.reorder(*reduced, lanes)
    sch.vectorize(lanes)
    return reduced[0]


@dataclass(frozen=True)
class _RowLoops:
    """Reduction loops of one row: the number of those over contiguous segments, and the one within a segment."""

    outer: int
    along: Any


def _rows(sch: Schedule, leaf: Leaf, tiling: RowTiling) -> tuple[Any, Any, _RowLoops]:
    """Return a reduction's block, a new one if rows are split into chunks, its loop over rows and those along a row."""
    segments, along, reused = ([leaf.loops[axis] for axis in axes] for axes in row_axes(leaf, tiling.lanes))
    spatial = leaf.loops_of("spatial")
    sch.reorder(*spatial, *segments, *along, *reused)
    loops = [sch.fuse(*several) for several in (segments, along) if several]
    row = sch.fuse(*spatial) if spatial else sch.add_unit_loop(loops[0])
    outer = len(loops) - 1
    align = 1 if outer else tiling.lanes * tiling.vectors
    length = -(-extent(sch, loops[0]) // (tiling.chunks * align)) * align
    if tiling.chunks < 2 or length >= extent(sch, loops[0]):
        return leaf.rv, row, _RowLoops(outer, loops[-1])
    chunk, _ = sch.split(loops[0], [None, length])
    partial = sch.rfactor(chunk, 0)
    row, chunk, *loops = sch.get_loops(partial)
    return partial, sch.fuse(row, chunk), _RowLoops(outer, loops[outer])


def row_axes(leaf: Leaf, lanes: int) -> tuple[list[int], list[int], list[int]]:
    """Return the reduction axes over contiguous segments of a row, those within a segment, and those that the largest operand lacks.

    Where segments are shorter than a vector, a whole row counts as one.
    """
    main = main_strides(leaf)
    every = [strides(access, len(leaf.loops)) for access in leaf.block.reads]
    axes = memory_order(leaf, "reduce")
    reused = [axis for axis in axes if main[axis] == 0 and leaf.block.axes[axis].extent > 1]
    axes = [axis for axis in axes if axis not in reused]
    first, size = len(axes), 1
    while first and main[axes[first - 1]] == size and all(_continues(each, axes[first - 1 : first + 1], leaf) for each in every):
        first -= 1
        size *= leaf.block.axes[axes[first]].extent
    return (axes[:first], axes[first:], reused) if size >= lanes else ([], [*axes, *reused], [])


def _continues(axis_strides: tuple[int | None, ...], axes: Sequence[int], leaf: Leaf) -> bool:
    """Say whether an axis has no other one within it, or is collapsible with that one."""
    return len(axes) < 2 or is_collapsible(axis_strides, axes[0], axes[1], leaf.block.axes[axes[1]].extent)


def column_reduction(sch: Schedule, leaf: Leaf, tiling: ColumnTiling) -> Nest:
    """Tile a strided reduction: into partial results of many contiguous columns.

    With chunks, the block itself reduces over them, outside the nest.
    """
    column = contiguous_axis(leaf)
    assert column is not None
    # 1. Loops: the other spatial axes, the columns, the reduction; a block of its own for chunks.
    others = [loop for at, loop in enumerate(leaf.loops) if leaf.block.axes[at].kind == "spatial" and at != column and loop is not None]
    reduce = [leaf.loops[axis] for axis in memory_order(leaf, "reduce")]
    sch.reorder(*others, leaf.loops[column], *reduce)
    loop = sch.fuse(*reduce)
    block, size = leaf.rv, extent(sch, loop)
    length = -(-size // (tiling.chunks * tiling.steps)) * tiling.steps
    if tiling.chunks > 1 and length < size:
        chunk, _ = sch.split(loop, [None, length])
        block = sch.rfactor(chunk, 0)
        *others, across, chunk, loop = sch.get_loops(block)
        others.append(chunk)
        size = length
        *outer, combined, chunk = sch.get_loops(leaf.rv)
        sch.reorder(*outer, chunk, combined)
        sch.decompose_reduction(leaf.rv, chunk)
    else:
        across = leaf.loops[column]
    # 2. Tiles of columns by a few rows.
    steps, columns = min(tiling.steps, size), min(tiling.columns, extent(sch, across))
    is_whole = extent(sch, across) % columns == 0
    group, inner = sch.split(across, [None, columns])
    step, unrolled = sch.split(loop, [None, steps])
    sch.reorder(*others, group, step, inner, unrolled)
    group = sch.fuse(*others, group)
    copy = sch.cache_write(block, 0, "local")
    sch.reverse_compute_at(copy, group)
    sch.unroll(unrolled)
    if is_whole:
        # Otherwise TVM would scalarize vectors because of the predicate; LLVM vectorizes the plain loop with masks.
        for columns_loop in (inner, sch.get_loops(copy)[-1]):
            _vectorize_columns(sch, columns_loop)
    return Nest(group, ((block, step),), (step, size // steps) if size % steps else None)


MOST_LANES = 64
"""Columns that are one vector. More are a loop: as one vector, each of its registers has instructions of its own.

Measured on a Zen 4 in November 2026, one core, 8 rows at a time: 2048 x 1000 from L3 takes 0.27 ms as one vector of 1000 columns, 0.10 as
a loop. LLVM compiles vectors of thousands for minutes.
"""


def _vectorize_columns(sch: Schedule, loop: Any) -> None:
    """Vectorize a loop over columns, all of which exist, or leave it to LLVM where they are many and no whole vectors."""
    columns = extent(sch, loop)
    lanes = columns if columns <= MOST_LANES else next((each for each in (MOST_LANES, 32, 16) if columns % each == 0), 0)
    if lanes:
        _, vector = sch.split(loop, [None, lanes])
        sch.vectorize(vector)
