"""Owns what the templates of memory-bound kernels share: blocks with their axes and loops, merging, vectors, partial results.

Knows nothing of policies, of parameters or of any one operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.s_tir import SBlockRealize, Schedule
from tvm.s_tir.schedule import ScheduleError

from kerneldecl.compiler.space import iter_space
from kerneldecl.model import Access, Block, dtype_bytes


def attempt(mod: tvm.IRModule, recipe: Callable[[Schedule], bool]) -> Schedule | None:
    """Return the schedule that a recipe makes of the module, None where the recipe says no or a primitive refuses."""
    sch = Schedule(mod)
    try:
        return sch if recipe(sch) else None
    except ScheduleError:
        return None


@dataclass(frozen=True)
class Leaf:
    """A block of a schedule: its handle, what it computes, and the loop of each axis (None for an axis of extent 1)."""

    rv: Any
    block: Block
    loops: tuple[Any, ...]

    def loops_of(self, kind: str) -> list[Any]:
        return [loop for loop, axis in zip(self.loops, self.block.axes, strict=True) if axis.kind == kind and loop is not None]

    def extent_of(self, kind: str) -> int:
        """Return the number of points that the axes of a kind span."""
        return extent_of(self.block, kind)


def extent_of(block: Block, kind: str) -> int:
    size = 1
    for axis in block.axes:
        size *= axis.extent if axis.kind == kind else 1
    return size


def leaves(sch: Schedule) -> list[Leaf] | None:
    """Return the blocks of an unscheduled function in order of execution, None where an axis is not bound to one whole loop."""
    try:
        space = iter_space(sch.mod)
    except ValueError:
        return None
    found = []
    for rv, block in zip(sch.get_child_blocks(sch.get_sblock("root")), space.blocks, strict=True):
        loops = axis_loops(sch, rv)
        if any(
            axis.extent > 1 and (loop is None or extent(sch, loop) != axis.extent) for axis, loop in zip(block.axes, loops, strict=True)
        ):
            return None
        found.append(Leaf(rv, block, loops))
    return found


def axis_loops(sch: Schedule, rv: Any) -> tuple[Any, ...]:
    """Return the loop that each axis of a block is bound to, None for an axis bound to anything else."""
    loops = sch.get_loops(rv)
    loop_vars = [sch.get(loop).loop_var for loop in loops]
    block = sch.get(rv)
    realize = next(found for found in _realizes(sch.mod["main"].body) if found.block.same_as(block))
    return tuple(
        next((loop for loop, var in zip(loops, loop_vars, strict=True) if value.same_as(var)), None) for value in realize.iter_values
    )


def _realizes(stmt: Any) -> Iterator[Any]:
    match stmt:
        case SBlockRealize():
            yield stmt
            yield from _realizes(stmt.block.body)
        case tirx.SeqStmt():
            for part in stmt.seq:
                yield from _realizes(part)
        case tirx.For():
            yield from _realizes(stmt.body)
        case tirx.IfThenElse():
            yield from _realizes(stmt.then_case)


def extent(sch: Schedule, loop: Any) -> int:
    return int(sch.get(loop).extent)


def strides(access: Access, axes: int) -> tuple[int | None, ...]:
    """Return how many elements one step along each axis moves, None for an axis that a dimension which is not affine may use."""
    steps: list[int | None] = [0] * axes
    size = 1
    for dim, index in zip(reversed(access.shape), reversed(access.index), strict=True):
        for axis, coefficient in index or ():
            step = steps[axis]
            steps[axis] = None if step is None else step + coefficient * size
        size *= dim
    if None in access.index:
        used = {axis for index in access.index for axis, _ in index or ()}
        steps = [step if axis in used else None for axis, step in enumerate(steps)]
    return tuple(steps)


def inline_producers(sch: Schedule, keep_shared: bool = False) -> None:
    """Inline each spatial block whose result is no output into the blocks that read it.

    With `keep_shared`, a block stays that calls a function (exp, say) and is read more than once: computing it again
    would cost more than storing it.
    """
    for leaf in leaves(sch) or ():
        if leaf.block.is_reduction or len(leaf.block.writes) != 1:
            continue
        consumers = sch.get_consumers(leaf.rv)
        if not consumers or (keep_shared and len(consumers) > 1):
            continue
        if not _is_output(sch, leaf):
            sch.compute_inline(leaf.rv)


def _is_output(sch: Schedule, leaf: Leaf) -> bool:
    params = sch.mod["main"].params
    return any(region.buffer.same_as(param) for region in sch.get(leaf.rv).writes for param in params)


def lanes_of(dtype: str, vector_bytes: int) -> int:
    return max(1, vector_bytes // dtype_bytes(dtype))


def fused(sch: Schedule, loops: Sequence[Any], rv: Any) -> Any:
    """Return one loop in place of several nested ones; a new loop of extent 1 around the block in place of none."""
    if not loops:
        return sch.add_unit_loop(rv)
    return sch.fuse(*loops) if len(loops) > 1 else loops[0]


def vectorized(sch: Schedule, loop: Any, width: int) -> Any:
    """Make vectors of `width` elements of an innermost spatial loop; return the loop over whole vectors.

    What is left over at the end becomes a scalar loop of its own: a vector with a predicate is computed element by element.
    """
    whole = extent(sch, loop) // width * width
    if whole == 0:
        return loop
    if whole < extent(sch, loop):
        loop, _ = sch.loop_partition(loop, [whole, None])
    outer, inner = sch.split(loop, [None, width])
    if width > 1:
        sch.vectorize(inner)
    return outer


def partial_results(sch: Schedule, leaf: Leaf, lanes: int, accumulators: int) -> list[Any]:
    """Split a reduction into blocks that keep `accumulators` vectors, then one vector, of partial results; return those blocks.

    LLVM keeps the order of floating-point operations, so that without this step a sum is one long chain of scalars.
    The block itself is left to combine the lanes of the last one. Its spatial loops stay outside, in their order.
    """
    reduce = leaf.loops_of("reduce")
    sch.reorder(*leaf.loops_of("spatial"), *reduce)
    loop = fused(sch, reduce, leaf.rv)
    size = extent(sch, loop)
    if size < 2 * lanes:
        return []
    accumulators = min(accumulators, size // lanes)
    axis = len(leaf.block.writes[0].shape)
    _, wide = sch.split(loop, [None, lanes * accumulators])
    partials = [sch.rfactor(wide, axis)]
    if accumulators > 1:
        _, lane = sch.split(sch.get_loops(leaf.rv)[-1], [accumulators, lanes])
        partials.append(sch.rfactor(lane, axis))
    return partials


def compute_partials(sch: Schedule, partials: Sequence[Any], at: Any) -> None:
    """Compute blocks made by `partial_results` under a loop of the block that combines them, in vectors."""
    for rv in reversed(partials):
        sch.compute_at(rv, at)
    for rv in partials:
        kinds = [axis.iter_type for axis in sch.get(rv).iter_vars]
        inside = [(loop, kind) for loop, kind in zip(axis_loops(sch, rv), kinds, strict=True) if loop is not None]
        print(inside, sch.get_loops(rv), at)
