"""Owns facts of an iteration space's reductions: whether there is only one, along which axes it runs, how often it uses an element.

Knows nothing of devices, operators, templates or TVM.
"""

from __future__ import annotations

import math

from kerneldecl.model import Block, IterSpace
from kerneldecl.policies.shared.traffic import contiguous_axis, largest, points

MAX_REUSE = 2
"""Uses of each element of the largest operand up to which memory limits a reduction: one, or two where two values share a byte."""


def only_reduction(space: IterSpace) -> tuple[Block, tuple[Block, ...]] | None:
    """Return the one reduction and the blocks after it, None unless these compute one element for each of its results."""
    found = [at for at, block in enumerate(space.blocks) if block.is_reduction]
    if len(found) != 1:
        return None
    block, *after = space.blocks[found[0] :]
    is_elementwise = all(points(later) == points(block, "spatial") for later in after)
    return (block, tuple(after)) if is_elementwise and block.reads else None


def streamed_reduction(space: IterSpace) -> Block | None:
    """Return the one reduction of a function if memory limits it, None where there are several or operands are used again and again."""
    found = only_reduction(space)
    return None if found is None or reuse(found[0]) > MAX_REUSE else found[0]


def matrix_vector(space: IterSpace) -> Block | None:
    """Return the one reduction of a matrix-vector multiplication, None where the matrix is used more often than a vector would."""
    block = streamed_reduction(space)
    return None if block is None or len({access.operand for access in block.reads}) < 2 else block


def rowwise_reductions(space: IterSpace) -> list[Block]:
    """Return the reductions of a function that runs along rows, its blocks' leading axes; none where they do not share their rows.

    None either where the function is one reduction and what follows it elementwise: there are better schedules for that.
    """
    reductions = [block for block in space.blocks if block.is_reduction]
    rows = {tuple(axis.extent for axis in block.axes if axis.kind == "spatial") for block in reductions}
    if only_reduction(space) is not None or len(rows) != 1 or any(not block.reads or is_across(block) for block in reductions):
        return []
    (shape,) = rows
    leading = space.blocks[-1].axes[: len(shape)]
    return reductions if shape and tuple(axis.extent for axis in leading) == shape else []


def reuse(block: Block) -> float:
    """Return how often a block uses each element of its largest operand."""
    return points(block) / max(1, math.prod(largest(block).shape))


def is_across(block: Block) -> bool:
    """Say whether a reduction runs across the contiguous axis of its largest operand, not along it."""
    axis = contiguous_axis(block, largest(block))
    return axis is not None and block.axes[axis].kind == "spatial"
