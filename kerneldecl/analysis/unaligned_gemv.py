"""Owns GEMVs of matrices whose rows are no whole vectors, as policies see them: sizes from an iteration space, the kernels' parameters.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.model import Gpu, IterSpace, dtype_bytes

DTYPES = frozenset({"float16", "bfloat16", "float32"})
"""Of the operands, and of the result."""
MAX_OFFSET = 2**31
"""Elements that 32-bit offsets address."""
ADDING_WARPS = 8
"""Warps of a block that adds the sums of parts, a lane for each column."""
MAX_TILE, MAX_UNROLL, MAX_PARTS = 8, 16, 1024


class GemvSizes(NamedTuple):
    """Sizes of y = W x."""

    n: int
    """Elements of y."""
    k: int
    """Elements of x."""
    is_across: bool
    """Whether W is stored as [k, n], so that its rows in memory run along y."""
    dtype: str
    out_dtype: str

    @property
    def line(self) -> int:
        """Return the elements of a row in memory."""
        return self.n if self.is_across else self.k

    @property
    def width(self) -> int:
        """Return the elements of a vector."""
        return VECTOR_BYTES // dtype_bytes(self.dtype)

    @property
    def period(self) -> int:
        """Return after how many rows one begins at the same place in a vector."""
        return self.width // math.gcd(self.line, self.width)


class GemvParams(NamedTuple):
    """The parameters of `gpu_gemv_unaligned`."""

    threads: int
    lanes: int
    """Threads that share a row; a warp's where rows run along y."""
    tile: int
    """Rows of a thread, all of which begin at the same place in a vector; 1 where rows run along y."""
    unroll: int
    """Vectors of each row, or rows that run along y, which a thread loads together."""
    parts: int
    """Thread blocks that share columns where rows run along y; else 1."""

    def fits(self, sizes: GemvSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built."""
        is_block = self.threads % WARP_LANES == 0 and 0 < self.threads <= gpu.max_threads_per_block
        if not takes(sizes) or not is_block or not 1 <= self.unroll <= MAX_UNROLL:
            return False
        if sizes.is_across:
            warps = self.threads // WARP_LANES
            is_split = 1 <= self.parts <= MAX_PARTS and (self.parts - 1) * self.part_rows(sizes) < sizes.k
            return (self.lanes, self.tile) == (WARP_LANES, 1) and warps % sizes.period == 0 and is_split
        is_shared = self.lanes.bit_count() == 1 and self.threads % self.lanes == 0
        return is_shared and 1 <= self.tile <= MAX_TILE and self.parts == 1

    def part_rows(self, sizes: GemvSizes) -> int:
        """Return the rows of each part where rows run along y: as many for each warp."""
        warps = self.threads // WARP_LANES
        return -(-sizes.k // (self.parts * warps)) * warps

    def blocks(self, sizes: GemvSizes) -> int:
        """Return the thread blocks."""
        if sizes.is_across:
            return -(-sizes.n // block_columns(sizes)) * self.parts
        groups = -(-sizes.n // (sizes.period * self.tile)) * sizes.period
        return -(-groups // (self.threads // self.lanes))


def block_columns(sizes: GemvSizes) -> int:
    """Return the elements of y of a block whose warps load rows along y: a vector fewer than they load, since rows begin within one."""
    return (WARP_LANES - 1) * sizes.width


def takes(sizes: GemvSizes) -> bool:
    """Say whether the kernels multiply matrices of such sizes: rows of no whole vectors, but of one at least."""
    is_float = sizes.dtype in DTYPES and sizes.out_dtype in DTYPES
    return is_float and sizes.period > 1 and sizes.line >= sizes.width and sizes.n * sizes.k < MAX_OFFSET


def gemv_sizes_of(space: IterSpace) -> GemvSizes | None:
    """Return the sizes of the GEMV that an iteration space may be, None where it is none."""
    reduction, *after = space.blocks
    is_gemv = [axis.kind for axis in reduction.axes] == ["spatial", "reduce"] and reduction.is_multiply_accumulate
    if not is_gemv or len(reduction.reads) != 2 or len(after) > 1 or len(space.inputs) != 2 or reduction.writes[0].dtype != "float32":
        return None
    matrix, vector = (next((read for read in reduction.reads if read.operand == name), None) for name in space.inputs)
    if matrix is None or vector is None or vector.index != (((1, 1),),) or len(matrix.shape) != 2 or matrix.dtype != vector.dtype:
        return None
    places = [(((0, 1),), ((1, 1),)), (((1, 1),), ((0, 1),))]
    if matrix.index not in places or any(block.flops_per_point or block.conditions for block in after):
        return None
    n, k = (axis.extent for axis in reduction.axes)
    return GemvSizes(n, k, matrix.index == places[1], matrix.dtype, space.blocks[-1].writes[0].dtype)
