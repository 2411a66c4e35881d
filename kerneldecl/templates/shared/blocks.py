"""Owns blocks of a schedule with their axes and loops: reading them, inlining producers, splitting into vectors.

Knows nothing of policies, of parameters or of any one operator.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.error import InternalError
from tvm.s_tir import SBlockRealize, Schedule
from tvm.s_tir.schedule import ScheduleError

from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Access, Block, Value, dtype_bytes


def attempt(mod: tvm.IRModule, recipe: Callable[[Schedule], bool]) -> Schedule | None:
    """Return the module as a recipe schedules it, None where the recipe returns False or a schedule primitive raises."""
    sch = Schedule(mod)
    try:
        return sch if recipe(sch) else None
    except (ScheduleError, InternalError):
        return None


@dataclass(frozen=True)
class Leaf:
    """A block without blocks inside: its handle, what it computes, and the loop of each axis (None for an axis of extent 1)."""

    rv: Any
    block: Block
    loops: tuple[Any, ...]

    def loops_of(self, kind: str) -> list[Any]:
        return [loop for loop, axis in zip(self.loops, self.block.axes, strict=True) if axis.kind == kind and loop is not None]

    def extent_of(self, kind: str) -> int:
        """Return the number of points that the axes of a kind span."""
        return math.prod(axis.extent for axis in self.block.axes if axis.kind == kind)


def leaves(sch: Schedule) -> list[Leaf] | None:
    """Return the blocks of an unscheduled function in order of execution, None where an axis is not bound to exactly one loop."""
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
    """Return the stride of each axis in elements, None for an axis that a dimension without an affine index may use."""
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


def is_collapsible(axis_strides: Sequence[int | None], outer: int, inner: int, extent: int) -> bool:
    """Say whether two axes address memory as one axis would: the outer stride is the inner one times the inner axis's extent."""
    steps = axis_strides[outer], axis_strides[inner]
    return None not in steps and steps[0] == (steps[1] or 0) * extent


def inline_producers(sch: Schedule, keep_shared: bool = False, but: Sequence[Any] = ()) -> None:
    """Inline each spatial block whose result is no output into its consumers, `but` those of some.

    With `keep_shared`, a block that does arithmetic and has several consumers is not inlined: storing a row of its results
    costs less than computing, say, an exp again.
    """
    kept = {sch.get(block).name_hint for block in but}
    for leaf in leaves(sch) or ():
        if leaf.block.is_reduction or len(leaf.block.writes) != 1 or sch.get(leaf.rv).name_hint in kept:
            continue
        consumers = sch.get_consumers(leaf.rv)
        if not consumers or (keep_shared and len(consumers) > 1 and leaf.block.flops_per_point):
            continue
        if not _is_output(sch, leaf):
            with contextlib.suppress(ScheduleError):  # a block that TVM cannot inline stays
                sch.compute_inline(leaf.rv)


def _is_output(sch: Schedule, leaf: Leaf) -> bool:
    params = sch.mod["main"].params
    return any(region.source.same_as(param) for region in sch.get(leaf.rv).writes for param in params)


def lanes_of(dtype: str, vector_bytes: int) -> int:
    return max(1, vector_bytes // dtype_bytes(dtype))


def fused(sch: Schedule, loops: Sequence[Any], rv: Any) -> Any:
    """Fuse nested loops and return the fused loop; for no loops, return a new loop of extent 1 around the block."""
    if not loops:
        return sch.add_unit_loop(rv)
    return sch.fuse(*loops) if len(loops) > 1 else loops[0]


def vectorized(sch: Schedule, loop: Any, width: int) -> Any:
    """Vectorize an innermost spatial loop by `width` elements; return the loop over whole vectors.

    The remainder becomes a scalar loop of its own: TVM computes a vector with a predicate element by element.
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


def add_missing_loops(sch: Schedule) -> None:
    """Put a loop of extent 1 around each block without loops: rfactor fails on a function that has such a block."""
    for rv in sch.get_child_blocks(sch.get_sblock("root")):
        if not sch.get_loops(rv):
            sch.add_unit_loop(rv)


def count(params: Mapping[str, Value], name: str) -> int:
    """Return a parameter that must be an integer."""
    value = params[name]
    assert isinstance(value, int)
    return value


def vectorize_under(sch: Schedule, rv: Any, lanes: int) -> None:
    """Vectorize a spatial block that was moved under one loop."""
    _, *loops = sch.get_loops(rv)
    if loops:
        vectorized(sch, sch.fuse(*loops), lanes)
