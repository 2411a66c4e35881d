"""Owns the schedule on CPUs of functions without reductions: elementwise operations, broadcasts, transposes.

Knows nothing of policies or of any one operator.

Parameters:
  parallel        True runs on all cores
  vectors         vector registers computed per iteration
and, only where an operand is read transposed:
  tile            elements along the axis along which that operand is contiguous, and elements along the output's contiguous axis
  packed          True copies tiles through a local array
  rows_outermost  True computes tiles in the order of the output's memory
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.shared import blocks


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the schedule of one spatial block, its producers inlined, in vectors or tiles; None where it has another form."""
    return blocks.attempt(mod, lambda sch: _schedule(sch, params, arch))


def _schedule(sch: Schedule, params: Mapping[str, Value], arch: Arch) -> bool:
    # 1. One block.
    blocks.inline_producers(sch)
    found = blocks.leaves(sch)
    if found is None or len(found) != 1 or found[0].block.is_reduction or len(found[0].block.writes) != 1:
        return False
    leaf = found[0]
    if not any(loop is not None for loop in leaf.loops):
        return True
    # 2. Loops in the order of the output's memory; adjacent ones that are collapsible in every operand are fused.
    groups = _groups(leaf)
    if groups is None:
        return False
    sch.reorder(*(leaf.loops[axis] for group in groups for axis in group))
    loops = [blocks.fused(sch, [leaf.loops[axis] for axis in group], leaf.rv) for group in groups]
    # 3. Tiles where an operand is contiguous along another axis than the output, else vectors.
    transposed = _transposed(leaf, groups)
    if transposed is not None and "tile" not in params:
        return False
    if transposed is None:
        _vectors(sch, loops, leaf, params, arch)
        return True
    return _tiles(sch, loops, transposed, leaf, params)


def _groups(leaf: blocks.Leaf) -> list[list[int]] | None:
    """Return the axes, outermost first, in groups that can be fused; None where the output's index is not affine."""
    count = len(leaf.loops)
    all_strides = [blocks.strides(access, count) for access in (*leaf.block.writes, *leaf.block.reads)]
    written = [step for step in all_strides[0] if step is not None]
    if len(written) < count:
        return None
    groups: list[list[int]] = []
    extents = [axis.extent for axis in leaf.block.axes]
    axes = (axis for axis in range(count) if leaf.loops[axis] is not None)
    for axis in sorted(axes, key=lambda axis: (extents[axis] > 1, -abs(written[axis]))):
        outer = groups[-1][-1] if groups else axis
        if groups and all(extents[outer] == 1 or blocks.is_collapsible(strides, outer, axis, extents[axis]) for strides in all_strides):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return groups


def _transposed(leaf: blocks.Leaf, groups: list[list[int]]) -> int | None:
    """Return the group, other than the last, along which an operand is contiguous; None where there is none."""
    for access in leaf.block.reads:
        strides = blocks.strides(access, len(leaf.loops))
        if strides[groups[-1][-1]] not in {0, 1, None}:
            return next((at for at, group in enumerate(groups[:-1]) if strides[group[-1]] == 1), None)
    return None


def _vectors(sch: Schedule, loops: list[Any], leaf: blocks.Leaf, params: Mapping[str, Value], arch: Arch) -> None:
    width = blocks.lanes_of(leaf.block.writes[0].dtype, arch.the_cpu.vector_bytes) * int(str(params["vectors"]))
    *outer, inner = loops
    inner = blocks.vectorized(sch, inner, width)
    if params["parallel"]:
        # Partitioning the innermost loop leaves outer loops whole, and a single loop its vectors.
        sch.parallel(blocks.fused(sch, outer, leaf.rv) if outer else inner)


def _tiles(sch: Schedule, loops: list[Any], transposed: int, leaf: blocks.Leaf, params: Mapping[str, Value]) -> bool:
    tile = params["tile"]
    assert isinstance(tile, tuple)
    extents = [blocks.extent(sch, loop) for loop in (loops[transposed], loops[-1])]
    rows, columns = (min(int(str(size)), extent) for size, extent in zip(tile, extents, strict=True))
    if params["packed"] and (extents[0] % rows or extents[1] % columns):
        return False  # the copy is moved, and moving drops its predicate at the ends
    copy = sch.cache_write(leaf.rv, 0, "local") if params["packed"] else None
    row, row_in = sch.split(loops[transposed], [None, rows])
    column, column_in = sch.split(loops[-1], [None, columns])
    others = [loop for at, loop in enumerate(loops[:-1]) if at != transposed]
    outer = [row, column] if params["rows_outermost"] else [column, row]
    sch.reorder(*others, *outer, *([row_in, column_in] if copy is None else [column_in, row_in]))
    if copy is not None:
        # The tile is read in whole cache lines into a local array, transposed there, and written in whole lines.
        sch.reverse_compute_at(copy, outer[-1])
        sch.vectorize(row_in)
        sch.vectorize(sch.get_loops(copy)[-1])
    if params["parallel"]:
        sch.parallel(sch.fuse(*others, *outer))
    return True
