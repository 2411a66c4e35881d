"""Owns elementwise functions over flat memory as policies see them: sizes read from an iteration space, and their kernels' parameters.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.model import Gpu, IterSpace, dtype_bytes

DTYPES = frozenset({"float16", "bfloat16", "float32"})
"""Of all arguments."""
MAX_INPUTS = 3
MAX_OFFSET = 2**31
"""Elements that 32-bit offsets address."""


class FlatSizes(NamedTuple):
    """Sizes of a function of which each result depends on the inputs' elements at the same place."""

    elements: int
    inputs: int
    element_bytes: int
    """Bytes of an element of the widest argument."""

    @property
    def width(self) -> int:
        """Return the elements of one access."""
        return VECTOR_BYTES // self.element_bytes


class FlatParams(NamedTuple):
    """The parameters of `gpu_flat_elementwise`."""

    threads: int
    unroll: int
    """Vectors of a thread."""

    def fits(self, sizes: FlatSizes, gpu: Gpu) -> bool:
        is_block = self.threads % WARP_LANES == 0 and 0 < self.threads <= gpu.max_threads_per_block
        return is_block and 1 <= self.unroll <= 8 and takes(sizes)


def takes(sizes: FlatSizes) -> bool:
    """Say whether the kernels compute functions of such sizes."""
    return 1 <= sizes.inputs <= MAX_INPUTS and sizes.elements < MAX_OFFSET


def flat_sizes_of(space: IterSpace) -> FlatSizes | None:
    """Return the sizes of the function that an iteration space is, None where it is no elementwise one over flat memory."""
    if len(space.outputs) != 1 or any(block.is_reduction or block.conditions for block in space.blocks):
        return None
    accesses = [access for block in space.blocks for access in (*block.reads, *block.writes)]
    shape = space.blocks[-1].writes[0].shape
    same = tuple(((axis, 1),) for axis in range(len(shape)))
    if any(access.shape != shape or access.index != same for access in accesses):
        return None
    arguments = {access.operand: access for access in accesses if access.operand in {*space.inputs, *space.outputs}}
    dtypes = {access.dtype for access in arguments.values()}
    if not dtypes <= DTYPES or len(arguments) != len(space.inputs) + 1:
        return None
    return FlatSizes(math.prod(shape), len(space.inputs), max(map(dtype_bytes, dtypes)))
