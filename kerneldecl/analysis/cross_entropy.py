"""Owns cross entropies of rows as policies see them: sizes read from an iteration space, and the kernel's parameters.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.model import Gpu, IterSpace, dtype_bytes

MAX_OFFSET = 2**31
"""Elements that 32-bit offsets address."""
MAX_LOADED = 64
"""Elements that a thread loads at once at most: each is widened to a register of its own."""


class LossSizes(NamedTuple):
    """Sizes of one cross entropy."""

    rows: int
    classes: int
    dtype: str


class CrossEntropyParams(NamedTuple):
    """The parameters of `gpu_cross_entropy`."""

    width: int
    """Elements of one access."""
    threads: int
    """Threads of a block, which has one row."""
    unroll: int
    """Vectors that a thread loads at once."""

    def steps(self, sizes: LossSizes) -> int:
        """Return how often a thread loads."""
        return -(-sizes.classes // (self.width * self.threads * self.unroll))

    def fits(self, sizes: LossSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built."""
        if min(self) < 1 or self.threads % WARP_LANES or self.threads > gpu.max_threads_per_block or self.width * self.unroll > MAX_LOADED:
            return False
        return sizes.classes % self.width == 0 and VECTOR_BYTES // dtype_bytes(sizes.dtype) % self.width == 0


def takes(sizes: LossSizes) -> bool:
    """Say whether the kernel computes such rows."""
    return sizes.dtype in {"float16", "bfloat16", "float32"} and sizes.rows * sizes.classes < MAX_OFFSET


def loss_sizes_of(space: IterSpace) -> LossSizes | None:
    """Return the sizes of the cross entropy that an iteration space may be, None where it is none; the template reads it in full."""
    if [block.is_reduction for block in space.blocks] != [True, True, False] or len(space.inputs) != 2:
        return None
    x, loss = space.blocks[0].reads[0], space.blocks[-1].writes[0]
    is_looked_up = any(read.operand == x.operand and None in read.index for read in space.blocks[-1].reads)
    return LossSizes(*x.shape, x.dtype) if len(x.shape) == 2 and loss.shape == x.shape[:1] and is_looked_up else None
