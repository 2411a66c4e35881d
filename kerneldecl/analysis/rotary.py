"""Owns rotary position embedding as policies see it: sizes read from an iteration space, and the parameters of the kernel.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.model import Gpu, IterSpace, dtype_bytes

DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
MAX_OFFSET = 2**31
"""Elements that 32-bit offsets address."""
MAX_HEADS = 8
FLOPS_PER_POINT = 4


class RotarySizes(NamedTuple):
    """Sizes of heads that are turned by tables of cosines and sines."""

    tokens: int
    heads: int
    """Heads of all sequences, which share the tables."""
    size: int
    """Elements of a head."""
    dtype: str

    @property
    def half(self) -> int:
        return self.size // 2

    @property
    def elements(self) -> int:
        return self.tokens * self.heads * self.size


class RotaryParams(NamedTuple):
    """The parameters of `gpu_rotary`."""

    threads: int
    width: int
    """Elements of one access."""
    heads: int
    """Heads of a thread, for which it loads cosines and sines once."""

    def fits(self, sizes: RotarySizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built."""
        return (
            takes(sizes)
            and min(self) >= 1
            and self.threads % WARP_LANES == 0
            and self.threads <= gpu.max_threads_per_block
            and self.heads <= MAX_HEADS
            and sizes.heads % self.heads == 0
            and math.gcd(sizes.half, VECTOR_BYTES // dtype_bytes(sizes.dtype)) % self.width == 0
        )

    def turns(self, sizes: RotarySizes) -> int:
        """Return how many threads have something to do: each turns two vectors of each of its heads."""
        return sizes.elements // (2 * self.width * self.heads)

    def blocks(self, sizes: RotarySizes) -> int:
        return -(-self.turns(sizes) // self.threads)


def takes(sizes: RotarySizes) -> bool:
    """Say whether the kernel turns such heads."""
    return sizes.dtype in DTYPES and sizes.size % 2 == 0 and sizes.elements < MAX_OFFSET


def rotary_of(space: IterSpace) -> RotarySizes | None:
    """Return the sizes of the rotary embedding that an iteration space may be, None where it is none.

    Its one block reads heads [batch, heads, tokens, size], tokens and heads in either order, and two tables [tokens, size].
    """
    if len(space.blocks) != 1 or len(space.inputs) != 3 or len(space.outputs) != 1:
        return None
    (block,) = space.blocks
    (out,), reads = block.writes, {access.operand: access for access in block.reads}
    if len(reads) != 3 or block.is_reduction or block.flops_per_point != FLOPS_PER_POINT or len(out.shape) != 4:
        return None
    x, cos, sin = (reads[name] for name in space.inputs)
    if len(x.shape) != 4 or len(cos.shape) != 2 or (cos.shape, cos.index) != (sin.shape, sin.index):
        return None
    tokens, size = cos.shape
    heads = math.prod(out.shape[:3]) // tokens
    is_it = (x.shape[0], x.shape[3]) == (out.shape[0], size) and out.shape[3] == size and tokens in out.shape[1:3]
    is_it = is_it and sorted(x.shape) == sorted(out.shape) and len({access.dtype for access in (x, cos, sin, out)}) == 1
    return RotarySizes(tokens, heads, size, out.dtype) if is_it else None
