"""Owns places of the largest or smallest elements along an axis as policies see them: sizes from an iteration space, kernels' parameters.

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
MAX_UNROLL, MAX_UNROLL_COLUMNS, MAX_PARTS = 8, 16, 256
KEPT_PLACE = 2**31 - 1
"""What the rule's second reduction has for an element that is not the extreme."""


class ArgSizes(NamedTuple):
    """Sizes of what extreme elements are looked for in, along the middle one of three axes."""

    outer: int
    extent: int
    inner: int
    """Elements between neighbours along the axis; 1 where it is rows."""
    dtype: str

    @property
    def elements(self) -> int:
        return self.outer * self.extent * self.inner


class ArgReduceParams(NamedTuple):
    """The parameters of `gpu_arg_reduce`."""

    threads: int
    width: int
    """Elements of one access."""
    unroll: int
    """Accesses of a thread under way together."""
    parts: int
    """Thread blocks that share a row."""
    rows: int = 1
    """Rows of a thread block, a warp each."""

    def vectors(self, sizes: ArgSizes) -> int:
        """Return the vectors of one part of a row."""
        return -(-sizes.extent // (self.width * self.parts))

    def fits(self, sizes: ArgSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built, of which every thread has something to do."""
        return (
            takes(sizes)
            and sizes.inner == 1
            and min(self) >= 1
            and self.threads % WARP_LANES == 0
            and self.threads * self.rows <= gpu.max_threads_per_block
            and (self.rows == 1 or (self.threads, self.parts) == (WARP_LANES, 1))
            and self.unroll <= MAX_UNROLL
            and self.parts <= MAX_PARTS
            and math.gcd(sizes.extent, VECTOR_BYTES // dtype_bytes(sizes.dtype)) % self.width == 0
            and (self.parts - 1) * self.vectors(sizes) * self.width < sizes.extent
        )


class ArgColumnsParams(NamedTuple):
    """The parameters of `gpu_arg_columns`."""

    threads: int
    lanes: int
    """Threads side by side, each with a vector of neighbouring columns; the others are below them."""
    width: int
    """Columns of a thread, and elements of one access."""
    unroll: int
    """Rows of a thread whose loads are under way together."""
    parts: int
    """Thread blocks that share a column."""

    @property
    def below(self) -> int:
        """The threads of a block that share a column."""
        return self.threads // self.lanes

    @property
    def sharing(self) -> int:
        """The threads that compare what those of a column have found, a power of two that divides a warp."""
        most = min(self.below, self.threads // (self.lanes * self.width), WARP_LANES)
        return 1 << max(0, most.bit_length() - 1)

    @property
    def parts_sharing(self) -> int:
        """The threads that compare what thread blocks have found in a column."""
        return min(WARP_LANES, 1 << (self.parts - 1).bit_length())

    @property
    def smem(self) -> tuple[str, int]:
        """Dtype and elements of shared memory; where a thread has whole columns, their places are enough. Pitches are odd for its banks."""
        cell = "uint32" if self.below == self.parts == 1 else "uint64"
        return cell, self.below * (self.width * (self.lanes | 1) | 1)

    def part(self, sizes: ArgSizes) -> int:
        """Return the rows of one part."""
        return -(-sizes.extent // self.parts)

    def strips(self, sizes: ArgSizes) -> int:
        """Return the thread blocks of one part of everything: a strip may reach over several of the outer axis."""
        return -(-sizes.outer * sizes.inner // (self.width * self.lanes))

    def fits(self, sizes: ArgSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built, of which every part has rows."""
        return (
            takes(sizes)
            and sizes.inner > 1
            and min(self) >= 1
            and self.threads % WARP_LANES == 0
            and self.threads % self.lanes == 0
            and self.threads <= gpu.max_threads_per_block
            and self.unroll <= MAX_UNROLL_COLUMNS
            and self.parts <= MAX_PARTS
            and math.gcd(sizes.inner, VECTOR_BYTES // dtype_bytes(sizes.dtype)) % self.width == 0
            and (self.parts - 1) * self.part(sizes) < sizes.extent
            and self.smem[1] * dtype_bytes(self.smem[0]) <= gpu.smem_per_block_bytes
        )


def takes(sizes: ArgSizes) -> bool:
    """Say whether the kernels look through such sizes."""
    return sizes.dtype in DTYPES and sizes.elements < MAX_OFFSET


def arg_sizes_of(space: IterSpace) -> ArgSizes | None:
    """Return the sizes of what an iteration space may look for extreme elements in, None where it does not.

    Two reductions along one axis: one reads the argument alone, the other the argument and what the first one found.
    """
    reductions = [block for block in space.blocks if block.is_reduction]
    if len(reductions) != 2 or len(space.blocks) != 3 or len(space.inputs) != 1 or len(space.outputs) != 1:
        return None
    first, second = reductions
    (x,) = first.reads if len(first.reads) == 1 else (None,)
    if x is None or x.operand != space.inputs[0] or len(second.reads) != 2 or second.writes[0].dtype != "int64":
        return None
    is_same = second.axes == first.axes and {read.operand for read in second.reads} == {x.operand, first.writes[0].operand}
    along = len(first.axes) - 1
    if not is_same or first.axes[along].kind != "reduce" or [axis.kind for axis in first.axes].count("reduce") != 1:
        return None
    # The argument's axes in order, but for the one that is reduced, which is the last one of the reductions.
    place = next((place for place, index in enumerate(x.index) if index == ((along, 1),)), None)
    if place is None or len(x.shape) != len(first.axes):
        return None
    kept = [axis for axis in range(len(x.shape)) if axis != place]
    if any(x.index[axis] != ((spatial, 1),) for spatial, axis in enumerate(kept) if x.shape[axis] > 1):
        return None
    return ArgSizes(math.prod(x.shape[:place]), x.shape[place], math.prod(x.shape[place + 1 :]), x.dtype)
