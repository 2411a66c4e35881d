"""Owns slices looked up by indices as policies see them: sizes read from an iteration space, and the parameters of the kernel.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import FIRST_PDL_CAPABILITY, VECTOR_BYTES, WARP_LANES
from kerneldecl.model import Gpu, IterSpace, dtype_bytes

INDEX_DTYPES = frozenset({"int32", "int64"})
MIN_ACCESS_BYTES = 4
MAX_PIECES = 2**31
MAX_UNROLL = 16


class GatherSizes(NamedTuple):
    """Sizes of Y[o, i, :] = X[o, indices[i], :]."""

    outer: int
    extent: int
    """Slices of X along the axis that indices name."""
    indices: int
    """How many there are."""
    inner: int
    """Elements of a slice that are neighbours."""
    dtype: str
    index_dtype: str

    @property
    def access_bytes(self) -> int:
        """Return the bytes of a vector."""
        element = dtype_bytes(self.dtype)
        return math.gcd(self.inner, VECTOR_BYTES // element) * element

    @property
    def vectors(self) -> int:
        """Return the vectors of a slice."""
        return self.inner * dtype_bytes(self.dtype) // self.access_bytes

    @property
    def nbytes(self) -> int:
        """Return the bytes that move: indices, slices, each of X once, and the result."""
        slices = self.outer * (min(self.indices, self.extent) + self.indices)
        return slices * self.inner * dtype_bytes(self.dtype) + self.indices * dtype_bytes(self.index_dtype)


class GatherRowsParams(NamedTuple):
    """The parameters of `gpu_gather_rows`."""

    threads: int
    lanes: int
    """Threads that share a piece of a slice, a power of two."""
    unroll: int
    """Vectors of a thread, `lanes` apart."""
    ahead: int
    """1 where slices are prefetched while the preceding kernel ends, as indices say then; else 0."""

    def pieces(self, sizes: GatherSizes) -> int:
        """Return the pieces of a slice."""
        return -(-sizes.vectors // (self.lanes * self.unroll))

    def blocks(self, sizes: GatherSizes) -> int:
        return -(-sizes.outer * sizes.indices * self.pieces(sizes) // (self.threads // self.lanes))

    def fits(self, sizes: GatherSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built."""
        return (
            takes(sizes)
            and self.threads % WARP_LANES == 0
            and 0 < self.threads <= gpu.max_threads_per_block
            and self.lanes > 0
            and self.lanes & (self.lanes - 1) == 0
            and self.threads % self.lanes == 0
            and 1 <= self.unroll <= MAX_UNROLL
            and self.ahead in {0, 1}
            and (not self.ahead or gpu.compute_capability >= FIRST_PDL_CAPABILITY)
            and sizes.outer * sizes.indices * self.pieces(sizes) < MAX_PIECES - self.threads
        )


def takes(sizes: GatherSizes) -> bool:
    """Say whether the kernel computes such a lookup."""
    return sizes.index_dtype in INDEX_DTYPES and sizes.access_bytes >= MIN_ACCESS_BYTES


def gather_of(space: IterSpace) -> GatherSizes | None:
    """Return the sizes of the lookup that an iteration space may be, None where it is none; the template reads it in full.

    Its one block copies elements whose place is affine but along one axis.
    """
    block, *rest = space.blocks
    if rest or block.is_reduction or block.flops_per_point or block.conditions or len(block.reads) != 2:
        return None
    (x, indices), out = block.reads, block.writes[0]
    looked_up = [dim for dim, index in enumerate(x.index) if index is None]
    if len(looked_up) != 1 or (x.operand, indices.operand) != space.inputs or x.dtype != out.dtype:
        return None
    axis = looked_up[0]
    if out.shape != (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]):
        return None
    outer, inner = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    return GatherSizes(outer, x.shape[axis], math.prod(indices.shape), inner, x.dtype, indices.dtype)
