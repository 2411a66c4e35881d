"""Owns the schedule on GPUs of chains of reductions and elementwise blocks over the same rows: softmax, normalisations.

Knows nothing of policies or of any one operator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu import thread_loops
from kerneldecl.templates.shared import blocks, reductions


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Schedule a chain with at least one reduction so that the same threads compute a row from start to end.

    `threads` share each of a block's `rows` and load `width` neighbours at once. `in_registers`: the loops along a row are
    unrolled, and the compiler, which sees that each step reads the same, keeps the row in registers; else each step
    reads it again, from the nearest cache.
    """
    assert arch.gpu is not None, "templates for GPUs are proposed for GPUs alone"
    # What several steps read, such as a softmax's powers, is computed once if it lies along the rows, too; else by each.
    shared = blocks.attempt(mod, lambda sch: _schedule(sch, params, keep_shared=True)) if params["in_registers"] else None
    return shared or blocks.attempt(mod, lambda sch: _schedule(sch, params, keep_shared=False))


def _schedule(sch: Schedule, params: Mapping[str, Value], *, keep_shared: bool) -> bool:
    threads, rows, width = (blocks.count(params, name) for name in ("threads", "rows", "width"))
    # 1. Blocks that agree on what a row is: their leading axes.
    blocks.inline_producers(sch, keep_shared=keep_shared)
    _inline_row_values(sch)
    blocks.give_loops(sch)
    found = blocks.leaves(sch)
    leading = None if found is None else _leading(found)
    if found is None or leading is None or any(_length(leaf, leading) % width for leaf in found if len(leaf.loops) > leading):
        return False
    # 2. Threads along the rows of each block, the last one as a copy to the output; one loop over rows.
    *_, last = found
    copy = sch.cache_write(last.rv, 0, "local")
    nested = [*(leaf.rv for leaf in found[:-1]), copy]
    nests = [_along(sch, rv, leading, threads, width) for rv in nested]
    if len(nests[-1]) == 1:
        return False
    sch.compute_at(last.rv, nests[-1][2], preserve_unit_loops=True)
    row = sch.merge(*(nest[0] for nest in nests)) if len(nests) > 1 else nests[0][0]
    if blocks.extent(sch, row) % rows:
        return False
    grid, ty = sch.split(row, [None, rows])
    sch.bind(grid, "blockIdx.x")
    sch.bind(ty, "threadIdx.y")
    # 3. Results of each block in registers, rows in vectors.
    for rv in nested[:-1]:
        sch.set_scope(rv, 0, "local")
    for rv, (_, *loops) in zip(nested, nests, strict=True):
        if not loops:
            continue
        tx, step, lane = loops
        sch.bind(tx, "threadIdx.x")
        thread_loops.load_vectors(sch, last.rv if rv is copy else rv, step)
        sch.vectorize(lane) if rv is copy else sch.unroll(lane)
        sch.unroll(step) if params["in_registers"] else None
    sch.unroll(sch.get_loops(last.rv)[-1])
    return True


def _inline_row_values(sch: Schedule) -> None:
    """Inline what is computed once a row: TVM may store it where the threads of a row have exchanged its sum, which they then change."""
    found = blocks.leaves(sch) or []
    rows = min((leaf.extent_of("spatial") for leaf in found if leaf.block.is_reduction), default=0)
    for leaf in found:
        if not leaf.block.is_reduction and leaf.extent_of("spatial") <= rows and sch.get_consumers(leaf.rv):
            sch.compute_inline(leaf.rv)


def _along(sch: Schedule, rv: Any, leading: int, threads: int, width: int) -> list[Any]:
    """Return the loop over rows of a block and, if it has them, those over threads, steps and lanes."""
    loops = sch.get_loops(rv)
    row = sch.fuse(*loops[:leading]) if leading > 1 else loops[0]
    if len(loops) == leading:
        return [row]
    *outer, inner = loops[leading:]
    vectors, lane = sch.split(inner, [None, width])
    step, tx = sch.split(sch.fuse(*outer, vectors) if outer else vectors, [None, threads])
    sch.reorder(tx, step, lane)
    return [row, tx, step, lane]


def _leading(found: Sequence[blocks.Leaf]) -> int | None:
    """Return how many leading axes all blocks share as rows, None where they do not, or where a reduction runs across memory."""
    reducing = [leaf for leaf in found if leaf.block.is_reduction]
    if not reducing or any(not leaf.block.reads or reductions.is_across(leaf) for leaf in reducing):
        return None
    extents = [axis.extent for axis in reducing[0].block.axes if axis.kind == "spatial"]
    results = {access.operand for leaf in found for access in leaf.block.writes}
    rows = tuple(((axis, 1),) if extent > 1 else () for axis, extent in enumerate(extents))
    for leaf in found:
        leading = [axis.extent for axis in leaf.block.axes[: len(extents)] if axis.kind == "spatial"]
        accesses = [access for access in (*leaf.block.reads, *leaf.block.writes) if access.operand in results]
        if leading != extents or None in leaf.loops or any(access.index[: len(rows)] != rows for access in accesses):
            return None
    return len(extents) or None


def _length(leaf: blocks.Leaf, leading: int) -> int:
    """Return the extent of the innermost axis along a row, of which vectors are cut."""
    return leaf.block.axes[-1].extent if len(leaf.block.axes) > leading else 1
