"""Owns facts of an iteration space's memory accesses: operands' bytes, points, the axes along which an operand is contiguous.

Knows nothing of devices, operators, templates or TVM.
"""

from __future__ import annotations

import math

from kerneldecl.model import Access, Block, IterSpace, dtype_bytes


def moved_bytes(space: IterSpace) -> int:
    """Return the bytes of all arguments together; of one that is looked up by indices, no more than there are lookups."""
    accesses = {access.operand: (block, access) for block in space.blocks for access in (*block.reads, *block.writes)}
    arguments = {*space.inputs, *space.outputs}
    return sum(_moved(block, access) for operand, (block, access) in accesses.items() if operand in arguments)


def _moved(block: Block, access: Access) -> int:
    looked_up = points(block) * dtype_bytes(access.dtype) if None in access.index else operand_bytes(access)
    return min(operand_bytes(access), looked_up)


def operand_bytes(access: Access) -> int:
    return math.prod(access.shape) * dtype_bytes(access.dtype)


def points(block: Block, kind: str = "") -> int:
    """Return the points of a block's iteration space, or of its axes of one kind."""
    return math.prod(axis.extent for axis in block.axes if kind in {"", axis.kind})


def is_elementwise(space: IterSpace) -> bool:
    """Say whether a function has no reduction and one output, which its last block writes."""
    return not any(block.is_reduction for block in space.blocks) and len(space.outputs) == len(space.blocks[-1].writes) == 1


def writes_at_data(space: IterSpace) -> bool:
    """Say whether a function is one block without reduction that writes its outputs at places that other arguments tell."""
    block = space.blocks[-1]
    return len(space.blocks) == 1 and not block.is_reduction and all(None in write.index for write in block.writes)


def axes_of(access: Access) -> set[int]:
    """Return the axes that occur in an operand's affine indices."""
    return {axis for index in access.index for axis, _ in index or ()}


def largest(block: Block) -> Access:
    """Return the operand of the most elements that a block reads."""
    return max(block.reads, key=lambda access: math.prod(access.shape))


def contiguous_axis(block: Block, access: Access) -> int | None:
    """Return the axis along which an operand's neighbours in memory are read, None where there is no such axis."""
    for index, extent in zip(reversed(access.index), reversed(access.shape), strict=True):
        moving = [(axis, step) for axis, step in index or () if block.axes[axis].extent > 1]
        if moving or index is None:
            return next((axis for axis, step in moving if step == 1), None)
        if extent > 1:
            return None
    return None
