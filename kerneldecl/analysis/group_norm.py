"""Owns group norms as policies see them: sizes read from an iteration space, and the parameters of their kernels.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.model import Candidate, Gpu, IterSpace, dtype_bytes

STATISTICS = 2
"""Numbers that thread blocks leave of a group: the sum of its elements and that of their squares."""
FACTORS = 3
"""Numbers that a group's elements are computed with: mean, 1 / sqrt(variance + eps), and the element that distances are counted from."""
MAX_OFFSET = 2**31
"""Elements that 32-bit offsets address."""


class GroupNormSizes(NamedTuple):
    """Sizes of a group norm."""

    images: int
    groups: int
    size: int
    """Channels of a group."""
    pixels: int
    dtype: str
    is_channels_last: bool

    @property
    def channels(self) -> int:
        return self.groups * self.size

    @property
    def elements(self) -> int:
        return self.images * self.channels * self.pixels

    @property
    def most_width(self) -> int:
        """Return how many neighbours a thread can access at once: channels of one pixel, or pixels of one channel."""
        return math.gcd(self.channels if self.is_channels_last else self.pixels, VECTOR_BYTES // dtype_bytes(self.dtype))


class GpuGroupNormParams(NamedTuple):
    """The parameters of `gpu_group_norm`."""

    width: int
    """Elements of one access."""
    columns: int
    """Threads beside one another; where channels are last, they cover the channels of whole groups."""
    rows: int
    """Rows of such threads, each with pixels of its own."""
    chunks: int
    """Thread blocks that share groups; with one, there is one kernel instead of two."""
    unroll: int
    """Loads of a thread in flight together."""

    @property
    def threads(self) -> int:
        """Return the threads of a block, whole warps."""
        return -(-self.columns * self.rows // WARP_LANES) * WARP_LANES

    def block_groups(self, sizes: GroupNormSizes) -> int:
        """Return the groups of a thread block."""
        return self.columns * self.width // sizes.size if sizes.is_channels_last else 1

    def cells(self, sizes: GroupNormSizes) -> int:
        """Return how many sums a row of threads keeps apart: one for each channel, or one for each thread."""
        return self.columns * self.width if sizes.is_channels_last else self.columns

    def units(self, sizes: GroupNormSizes) -> int:
        """Return how many sets of groups there are, each of which `chunks` thread blocks share."""
        return sizes.images * (sizes.groups // self.block_groups(sizes))

    def vectors(self, sizes: GroupNormSizes) -> int:
        """Return how many steps a set of groups takes one row of threads: pixels, or vectors beside one another."""
        if sizes.is_channels_last:
            return sizes.pixels
        return -(-sizes.size * sizes.pixels // (self.width * self.columns))

    def steps(self, sizes: GroupNormSizes) -> int:
        """Return the steps of one thread."""
        return -(-self.vectors(sizes) // (self.chunks * self.rows))

    def smem_bytes(self, sizes: GroupNormSizes) -> int:
        """Return the shared memory of a thread block: sums of all rows, in whose place those of chunks come, and factors of all groups."""
        groups = self.block_groups(sizes)
        return 4 * (STATISTICS * max(self.rows * self.cells(sizes), self.parts(sizes) * groups) + FACTORS * groups)

    def parts(self, sizes: GroupNormSizes) -> int:
        """Return among how many threads the sums of one group's chunks are shared."""
        return max(1, min(8, self.chunks, self.threads // (STATISTICS * self.block_groups(sizes))))

    def fits(self, sizes: GroupNormSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built."""
        if min(self) < 1 or self.threads > gpu.max_threads_per_block or sizes.most_width % self.width:
            return False
        if sizes.is_channels_last:
            covered = self.columns * self.width
            if covered % sizes.size or sizes.channels % covered:
                return False
        elif self.rows != 1:
            return False
        return self.chunks <= self.vectors(sizes) and self.smem_bytes(sizes) <= gpu.smem_per_block_bytes

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_group_norm", self._asdict())


def takes(sizes: GroupNormSizes) -> bool:
    """Say whether the kernels compute such a norm."""
    return sizes.dtype in ("float16", "bfloat16", "float32") and sizes.elements < MAX_OFFSET


def group_norm_of(space: IterSpace) -> GroupNormSizes | None:
    """Return the sizes of the group norm that an iteration space is, None where it is none.

    Its blocks are those of `compiler.group_norm`: sums, means, squares, normalised elements and the result.
    """
    kinds = [block.is_reduction for block in space.blocks]
    if kinds != [True, False, True, False, False] or len(space.inputs) != 3:
        return None
    sums, _, _, normalised, result = space.blocks
    shape, axes = result.writes[0].shape, [axis.extent for axis in sums.axes]
    if not sums.reads or sums.reads[0].shape != shape or len(axes) != len(shape) + 1 or axes[0] != shape[0]:
        return None
    gamma = next((read for read in normalised.reads if read.operand == space.inputs[1]), None)
    channel = gamma.index[0][0][0] if gamma is not None and gamma.index and gamma.index[0] else 1
    is_last = channel == len(shape) - 1
    groups, size = axes[1], axes[-1 if is_last else 2]
    if channel not in {1, len(shape) - 1} or shape[channel] != groups * size:
        return None
    return GroupNormSizes(axes[0], groups, size, math.prod(shape[1:]) // shape[channel], sums.reads[0].dtype, is_last)
