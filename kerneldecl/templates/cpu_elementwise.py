"""Owns the schedule of functions whose every element is computed by itself: pointwise chains, broadcasts, transposes.

Knows nothing of policies or of any one operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.shared import blocks


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Schedule one spatial block, everything before it inlined, in vectors or tiles.

    `parallel`: all cores. `vectors`: vector registers computed at once. The rest matters only where an operand is read
    transposed. `tile`: elements along the axis that operand is contiguous along, elements along the output's contiguous
    axis. `packed`: tiles go through a local array. `rows_outermost`: tiles follow one another along the output.
    """
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
    # 2. Loops in the order of the output's memory; neighbours that every operand walks alike become one.
    groups = _groups(leaf)
    if groups is None:
        return False
    sch.reorder(*(leaf.loops[axis] for group in groups for axis in group))
    loops = [blocks.fused(sch, [leaf.loops[axis] for axis in group], leaf.rv) for group in groups]
    # 3. Tiles where an operand is contiguous along another axis than the output, else vectors.
    across = _transposed(leaf, groups)
    if across is not None and "tile" not in params:
        return False
    if across is None:
        _vectors(sch, loops, leaf, params, arch)
        return True
    return _tiles(sch, loops, across, leaf, params)


def _groups(leaf: blocks.Leaf) -> list[list[int]] | None:
    """Return the axes, outermost first, those that one loop can stand for together; None if the output's place is not affine."""
    count = len(leaf.loops)
    walks = [blocks.strides(access, count) for access in (*leaf.block.writes, *leaf.block.reads)]
    written = [step for step in walks[0] if step is not None]
    if len(written) < count:
        return None
    groups: list[list[int]] = []
    extents = [axis.extent for axis in leaf.block.axes]
    axes = (axis for axis in range(count) if leaf.loops[axis] is not None)
    for axis in sorted(axes, key=lambda axis: (extents[axis] > 1, -abs(written[axis]))):
        if groups and all(_continues(walk, groups[-1][-1], axis, extents) for walk in walks):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    return groups


def _continues(walk: tuple[int | None, ...], outer: int, inner: int, extents: list[int]) -> bool:
    """Say whether an operand is walked through two nested axes as it would be through one."""
    steps = walk[outer], walk[inner]
    return extents[outer] == 1 or (None not in steps and steps[0] == (steps[1] or 0) * extents[inner])


def _transposed(leaf: blocks.Leaf, groups: list[list[int]]) -> int | None:
    """Return which group but the last an operand is contiguous along."""
    for access in leaf.block.reads:
        walk = blocks.strides(access, len(leaf.loops))
        if walk[groups[-1][-1]] not in {0, 1, None}:
            return next((at for at, group in enumerate(groups[:-1]) if walk[group[-1]] == 1), None)
    return None


def _vectors(sch: Schedule, loops: list[Any], leaf: blocks.Leaf, params: Mapping[str, Value], arch: Arch) -> None:
    width = blocks.lanes_of(leaf.block.writes[0].dtype, arch.the_cpu.vector_bytes) * int(str(params["vectors"]))
    *outer, inner = loops
    inner = blocks.vectorized(sch, inner, width)
    if params["parallel"]:
        # Partitioning the innermost loop leaves outer loops whole, and a single loop its vectors.
        sch.parallel(blocks.fused(sch, outer, leaf.rv) if outer else inner)


def _tiles(sch: Schedule, loops: list[Any], across: int, leaf: blocks.Leaf, params: Mapping[str, Value]) -> bool:
    tile = params["tile"]
    assert isinstance(tile, tuple)
    extents = [blocks.extent(sch, loop) for loop in (loops[across], loops[-1])]
    rows, columns = (min(int(str(size)), extent) for size, extent in zip(tile, extents, strict=True))
    if params["packed"] and (extents[0] % rows or extents[1] % columns):
        return False  # the copy would be moved, and what bounds it at the ends would be lost
    copy = sch.cache_write(leaf.rv, 0, "local") if params["packed"] else None
    row, row_in = sch.split(loops[across], [None, rows])
    column, column_in = sch.split(loops[-1], [None, columns])
    others = [loop for at, loop in enumerate(loops[:-1]) if at != across]
    outer = [row, column] if params["rows_outermost"] else [column, row]
    sch.reorder(*others, *outer, *([row_in, column_in] if copy is None else [column_in, row_in]))
    if copy is not None:
        # The tile is read in whole lines into a local array, already transposed, and written in whole lines from there.
        sch.reverse_compute_at(copy, outer[-1])
        sch.vectorize(row_in)
        sch.vectorize(sch.get_loops(copy)[-1])
    if params["parallel"]:
        sch.parallel(sch.fuse(*others, *outer))
    return True
