"""Owns places of the largest or smallest elements of rows as policies see them: sizes from an iteration space, the kernel's parameters.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.model import Gpu, IterSpace, dtype_bytes

DTYPES = frozenset({"float16", "bfloat16", "float32", "int8", "uint8", "int16", "int32"})
MAX_OFFSET = 2**31
"""Elements that 32-bit offsets address."""
MAX_UNROLL, MAX_PARTS = 8, 256
KEPT_PLACE = 2**31 - 1
"""What the rule's second reduction has for an element that is not the extreme."""


class ArgSizes(NamedTuple):
    """Sizes of rows whose extreme elements are looked for."""

    rows: int
    columns: int
    dtype: str


class ArgReduceParams(NamedTuple):
    """The parameters of `gpu_arg_reduce`."""

    threads: int
    width: int
    """Elements of one access."""
    unroll: int
    """Accesses of a thread under way together."""
    parts: int
    """Thread blocks that share a row."""

    def vectors(self, sizes: ArgSizes) -> int:
        """Return the vectors of one part of a row."""
        return -(-sizes.columns // (self.width * self.parts))

    def fits(self, sizes: ArgSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built, of which every thread has something to do."""
        return (
            takes(sizes)
            and min(self) >= 1
            and self.threads % WARP_LANES == 0
            and self.threads <= gpu.max_threads_per_block
            and self.unroll <= MAX_UNROLL
            and self.parts <= MAX_PARTS
            and math.gcd(sizes.columns, VECTOR_BYTES // dtype_bytes(sizes.dtype)) % self.width == 0
            and (self.parts - 1) * self.vectors(sizes) * self.width < sizes.columns
        )


def takes(sizes: ArgSizes) -> bool:
    """Say whether the kernel looks through such rows."""
    return sizes.dtype in DTYPES and sizes.rows * sizes.columns < MAX_OFFSET


def arg_sizes_of(space: IterSpace) -> ArgSizes | None:
    """Return the sizes of the rows that an iteration space may look for extreme elements in, None where it does not.

    Two reductions along the last axis: one reads the argument alone, the other the argument and what the first one found.
    """
    reductions = [block for block in space.blocks if block.is_reduction]
    if len(reductions) != 2 or len(space.blocks) != 3 or len(space.inputs) != 1 or len(space.outputs) != 1:
        return None
    first, second = reductions
    (x,) = first.reads if len(first.reads) == 1 else (None,)
    if x is None or x.operand != space.inputs[0] or len(second.reads) != 2 or second.writes[0].dtype != "int64":
        return None
    is_along = x.index == tuple(((axis, 1),) for axis in range(len(x.shape))) and first.axes[-1].kind == "reduce"
    is_row = second.axes == first.axes and {read.operand for read in second.reads} == {x.operand, first.writes[0].operand}
    if not is_along or not is_row or [axis.kind for axis in first.axes].count("reduce") != 1:
        return None
    return ArgSizes(math.prod(x.shape[:-1]), x.shape[-1], x.dtype)
