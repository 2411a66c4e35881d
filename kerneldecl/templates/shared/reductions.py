"""Owns how templates arrange one reduction: along contiguous memory or across it, in vectors of partial results.

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
from kerneldecl.templates.shared.blocks import Leaf, axis_loops, count, extent, give_loops, inline_producers, leaves, strides


@dataclass(frozen=True)
class RowCut:
    """How a reduction along rows is cut up."""

    lanes: int
    """Elements of a vector register."""
    vectors: int
    """Registers that hold partial results of one row."""
    rows: int = 1
    """Rows computed together, so that an operand they share is loaded once."""
    chunks: int = 1
    """Parts of a row that are computed apart, where rows are fewer than cores."""


@dataclass(frozen=True)
class ColumnCut:
    """How a reduction down columns is cut up."""

    columns: int
    """Columns computed together."""
    steps: int
    """Rows added in one go, so that partial results are loaded and stored less often."""
    chunks: int = 1
    """Parts of a column that are computed apart, where there is too little else to share among cores."""


@dataclass(frozen=True)
class Nest:
    """A reduction's loops, arranged and not yet finished: until then, other blocks may be moved into them."""

    outer: Any
    """The loop under which all of the reduction is computed."""
    starts: tuple[tuple[Any, Any], ...]
    """Blocks whose initial value is to be set before a loop."""
    uneven: tuple[Any, int] | None = None
    """A loop whose last iterations are partial, and how many are whole."""


def only_reduction(sch: Schedule) -> tuple[Leaf, list[Leaf]] | None:
    """Inline what comes before a function's one reduction; return it and the blocks after it, None if that is not what is left."""
    inline_producers(sch)
    give_loops(sch)
    found = leaves(sch)
    if found is None or not found[0].block.is_reduction or any(leaf.block.is_reduction for leaf in found[1:]):
        return None
    first, *rest = found
    return (first, rest) if first.loops_of("reduce") and first.block.reads else None


def contiguous_axis(leaf: Leaf) -> int | None:
    """Return the axis of more than one point that the largest operand is contiguous along, None where there is none."""
    walk = main_walk(leaf)
    return next((at for at, axis in enumerate(leaf.block.axes) if walk[at] == 1 and axis.extent > 1), None)


def is_across(leaf: Leaf) -> bool:
    """Say whether a reduction runs across contiguous memory, not along it."""
    axis = contiguous_axis(leaf)
    return axis is not None and leaf.block.axes[axis].kind == "spatial"


def main_walk(leaf: Leaf) -> tuple[int | None, ...]:
    """Return the strides of the largest operand that a block reads."""
    return strides(max(leaf.block.reads, key=lambda access: math.prod(access.shape)), len(leaf.loops))


def memory_order(leaf: Leaf, kind: str) -> list[int]:
    """Return the axes of a kind that have loops, in the order in which the largest operand lies in memory, outermost first."""
    walk = main_walk(leaf)
    axes = (at for at, axis in enumerate(leaf.block.axes) if axis.kind == kind and leaf.loops[at] is not None)
    return sorted(axes, key=lambda at: (leaf.block.axes[at].extent > 1, -abs(walk[at] or 0)))


def complete(sch: Schedule, nest: Nest, rest: Sequence[Leaf], params: Mapping[str, Value]) -> None:
    """Compute what follows a reduction in its nest, unless chunks are to be combined first; spread it over cores; start it."""
    if count(params, "chunks") == 1:
        for leaf in rest:
            sch.reverse_compute_at(leaf.rv, nest.outer)
    if params["parallel"]:
        sch.parallel(nest.outer)
    start(sch, nest)


def start(sch: Schedule, nest: Nest) -> None:
    """Set initial values before the loops, and make a loop of its own of iterations that are partial: others lose their predicate."""
    for block, loop in nest.starts:
        sch.decompose_reduction(block, loop)
    if nest.uneven is not None:
        loop, whole = nest.uneven
        sch.loop_partition(loop, [whole, None])


def start_merged(sch: Schedule, nest: Nest) -> None:
    """Do what `start` does for a nest that was merged with others: there, only lowering can still divide an uneven loop."""
    starts = nest.starts
    if nest.uneven is not None:
        sch.annotate(nest.uneven[0], "pragma_loop_partition_hint", 1)
        starts = starts[1:]
    for block, loop in starts:
        sch.decompose_reduction(block, loop)


def row_reduction(sch: Schedule, leaf: Leaf, cut: RowCut) -> Nest:
    """Arrange a reduction along contiguous memory: vectors of partial results, then one vector, then its lanes.

    The block itself is the last in the nest, and combines lanes. With chunks, it combines those, outside of the nest.
    """
    block, row, parts = _rows(sch, leaf, cut)
    size = extent(sch, parts.along)
    if size < cut.lanes:
        return Nest(row, ((block, sch.get_loops(block)[1]),))
    first, *second = partial_results(sch, block, parts.along, cut)
    # The vectors' loops stay in place: moving a block drops the predicate of a loop that was cut unevenly.
    row, *loops = sch.get_loops(first)
    steps, (wide, *reused) = loops[: parts.outer + 1], loops[parts.outer + 1 :]
    inner = []
    if cut.rows > 1:
        row, tile = sch.split(row, [None, cut.rows])
        inner.append(tile)
    sch.reorder(*steps, *inner, *reused, wide)
    for loop in (*inner, *reused):
        sch.unroll(loop)
    sch.vectorize(wide)
    starts = [(first, steps[0])]
    for rv in second:
        sch.reverse_compute_at(rv, row)
        starts.append((rv, vectorize_lanes(sch, rv)))
    sch.reverse_compute_at(block, row)
    width = extent(sch, wide)
    return Nest(row, tuple(starts), (steps[-1], size // width) if size % width else None)


def partial_results(sch: Schedule, block: Any, loop: Any, cut: RowCut) -> list[Any]:
    """Split a reduction along one loop into a block of several vectors and, unless it is one only, a block that adds them up to one."""
    vectors = min(cut.vectors, extent(sch, loop) // cut.lanes)
    _, wide = sch.split(loop, [None, vectors * cut.lanes])
    axis = len(sch.get(block).writes[0].region)
    partials = [sch.rfactor(wide, axis)]
    if vectors > 1:
        _, lane = sch.split(sch.get_loops(block)[-1], [vectors, cut.lanes])
        partials.append(sch.rfactor(lane, axis))
    return partials


def vectorize_lanes(sch: Schedule, partial: Any) -> Any:
    """Make vectors of the first axis of a block that was moved; return its outermost reduced loop."""
    kinds = [axis.iter_type for axis in sch.get(partial).iter_vars]
    loops = list(zip(kinds, axis_loops(sch, partial), strict=True))
    reduced = [loop for kind, loop in loops if kind == tirx.IterVar.CommReduce]
    _, lanes = loops[0]
    sch.reorder(*reduced, lanes)
    sch.vectorize(lanes)
    return reduced[0]


@dataclass(frozen=True)
class _Parts:
    """Loops of one row: how many go from piece to piece of contiguous memory, and the one along a piece."""

    outer: int
    along: Any


def _rows(sch: Schedule, leaf: Leaf, cut: RowCut) -> tuple[Any, Any, _Parts]:
    """Return a reduction's block, a new one if rows are cut into chunks, with its loops over and along rows."""
    pieces, along, reused = ([leaf.loops[axis] for axis in part] for part in row_parts(leaf, cut.lanes))
    spatial = leaf.loops_of("spatial")
    sch.reorder(*spatial, *pieces, *along, *reused)
    loops = [sch.fuse(*part) for part in (pieces, along) if part]
    row = sch.fuse(*spatial) if spatial else sch.add_unit_loop(loops[0])
    outer = len(loops) - 1
    align = 1 if outer else cut.lanes * cut.vectors
    length = -(-extent(sch, loops[0]) // (cut.chunks * align)) * align
    if cut.chunks < 2 or length >= extent(sch, loops[0]):
        return leaf.rv, row, _Parts(outer, loops[-1])
    chunk, _ = sch.split(loops[0], [None, length])
    partial = sch.rfactor(chunk, 0)
    row, chunk, *loops = sch.get_loops(partial)
    return partial, sch.fuse(row, chunk), _Parts(outer, loops[outer])


def row_parts(leaf: Leaf, lanes: int) -> tuple[list[int], list[int], list[int]]:
    """Return the reduced axes from piece to piece of contiguous memory, along a piece, and those along which the largest operand is reused.

    Where pieces are shorter than a vector, all of a row counts as one.
    """
    walk = main_walk(leaf)
    walks = [strides(access, len(leaf.loops)) for access in leaf.block.reads]
    axes = memory_order(leaf, "reduce")
    reused = [axis for axis in axes if walk[axis] == 0 and leaf.block.axes[axis].extent > 1]
    axes = [axis for axis in axes if axis not in reused]
    first, size = len(axes), 1
    while first and walk[axes[first - 1]] == size and all(_continues(walk, axes[first - 1 : first + 1], leaf) for walk in walks):
        first -= 1
        size *= leaf.block.axes[axes[first]].extent
    return (axes[:first], axes[first:], reused) if size >= lanes else ([], [*axes, *reused], [])


def _continues(walk: tuple[int | None, ...], axes: Sequence[int], leaf: Leaf) -> bool:
    """Say whether one step along the first axis is as far as all steps along the second, if there is a second."""
    steps = [walk[axis] for axis in axes]
    return len(axes) < 2 or (None not in steps and steps[0] == (steps[1] or 0) * leaf.block.axes[axes[1]].extent)


def column_reduction(sch: Schedule, leaf: Leaf, cut: ColumnCut) -> Nest:
    """Arrange a reduction across contiguous memory: partial results of many columns side by side.

    With chunks, the block itself combines them, outside of the nest.
    """
    column = contiguous_axis(leaf)
    assert column is not None
    # 1. Loops: the other spatial axes, the columns, what is reduced; a block of its own for chunks.
    others = [loop for at, loop in enumerate(leaf.loops) if leaf.block.axes[at].kind == "spatial" and at != column and loop is not None]
    reduce = [leaf.loops[axis] for axis in memory_order(leaf, "reduce")]
    sch.reorder(*others, leaf.loops[column], *reduce)
    loop = sch.fuse(*reduce)
    block, size = leaf.rv, extent(sch, loop)
    length = -(-size // (cut.chunks * cut.steps)) * cut.steps
    if cut.chunks > 1 and length < size:
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
    steps, columns = min(cut.steps, size), min(cut.columns, extent(sch, across))
    is_whole = extent(sch, across) % columns == 0
    group, inner = sch.split(across, [None, columns])
    step, unrolled = sch.split(loop, [None, steps])
    sch.reorder(*others, group, step, inner, unrolled)
    group = sch.fuse(*others, group)
    copy = sch.cache_write(block, 0, "local")
    sch.reverse_compute_at(copy, group)
    sch.unroll(unrolled)
    if is_whole:
        # Otherwise the predicate would make scalars of vectors; LLVM makes masked vectors of the plain loop.
        sch.vectorize(inner)
        sch.vectorize(sch.get_loops(copy)[-1])
    return Nest(group, ((block, step),), (step, size // steps) if size % steps else None)
