"""Owns the schedule of chains of reductions and elementwise blocks over the same rows: softmax, normalisations.

Knows nothing of policies or of any one operator.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.shared import blocks, reductions


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Schedule a chain with at least one reduction so that each row is computed from start to end while it is in cache.

    `vectors`: registers that hold partial results of a reduction. `parallel`: all cores.
    """
    return blocks.attempt(mod, lambda sch: _schedule(sch, params, arch))


def _schedule(sch: Schedule, params: Mapping[str, Value], arch: Arch) -> bool:
    # 1. Blocks that agree on what a row is: their leading axes.
    blocks.inline_producers(sch, keep_shared=True)
    blocks.give_loops(sch)
    found = blocks.leaves(sch)
    rows = None if found is None else _rows(found)
    if found is None or rows is None:
        return False
    # 2. A nest for each block, reductions in vectors.
    nests, loops = [], []
    for leaf in found:
        if leaf.block.is_reduction:
            nests.append(reductions.row_reduction(sch, leaf, reductions.RowCut(_lanes(leaf, arch), blocks.count(params, "vectors"))))
            loops.append(nests[-1].outer)
        else:
            loops.append(sch.fuse(*leaf.loops[:rows]))
    # 3. One loop over rows. Merging loops leaves those inside alone; moving blocks would drop predicates of uneven ones.
    row = sch.merge(*loops) if len(loops) > 1 else loops[0]
    if params["parallel"]:
        sch.parallel(row)
    # 4. Initial values, and vectors of what is not a reduction.
    for nest in nests:
        reductions.start_merged(sch, nest)
    for leaf in found:
        if not leaf.block.is_reduction:
            blocks.vectorize_under(sch, leaf.rv, _lanes(leaf, arch))
    return True


def _lanes(leaf: blocks.Leaf, arch: Arch) -> int:
    return blocks.lanes_of(leaf.block.writes[0].dtype, arch.the_cpu.vector_bytes)


def _rows(found: list[blocks.Leaf]) -> int | None:
    """Return how many leading axes all blocks share as rows, None where they do not, or where a reduction runs across memory."""
    reducing = [leaf for leaf in found if leaf.block.is_reduction]
    if not reducing or any(not leaf.loops_of("reduce") or reductions.is_across(leaf) for leaf in reducing):
        return None
    extents = [axis.extent for axis in reducing[0].block.axes if axis.kind == "spatial"]
    results = {access.operand for leaf in found for access in leaf.block.writes}
    rows = tuple(((axis, 1),) if extent > 1 else () for axis, extent in enumerate(extents))
    for leaf in found:
        leading = [axis.extent for axis in leaf.block.axes[: len(extents)] if axis.kind == "spatial"]
        accesses = [access for access in (*leaf.block.reads, *leaf.block.writes) if access.operand in results]
        if leading != extents or None in leaf.loops[: len(extents)] or any(access.index[: len(rows)] != rows for access in accesses):
            return None
    return len(extents) or None
