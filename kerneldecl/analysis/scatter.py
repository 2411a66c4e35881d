"""Owns rows added at indices as policies see them: sizes read from an iteration space, and the parameters of the kernel.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.model import Gpu, IterSpace, dtype_bytes

GPU_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64", "int32", "int64"})
MAX_OFFSET = 2**31
MAX_SMEM_BYTES = 96 * 1024
"""Shared memory of a thread block at most, so that two of them fit an SM."""


LIST_THREADS = 1024
"""Threads of a block that lists updates."""
MAX_THREAD_ROWS = 8
MANY_LOADS = 32
"""Loads of a thread at once where a row has many updates."""


class ScatterSizes(NamedTuple):
    """Sizes of rows added at indices."""

    rows: int
    """Rows of the result."""
    columns: int
    updates: int
    """Rows that are added."""
    dtype: str
    index_dtype: str
    has_base: bool
    """Whether they are added to rows that are given, rather than to zeros."""


class GpuScatterParams(NamedTuple):
    """The parameters of `gpu_scatter_add`."""

    tile_rows: int
    """Rows of the result that a thread block owns."""
    lanes: int
    """Threads beside one another along columns."""
    width: int
    """Elements of one access."""
    warps: int

    @property
    def threads(self) -> int:
        return self.warps * WARP_LANES

    def fits(self, sizes: ScatterSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built."""
        return (
            takes(sizes)
            and min(self) >= 1
            and self.threads <= gpu.max_threads_per_block
            and self.threads % self.lanes == 0
            and smem_sums(sizes, self) * sum_bytes(sizes) <= min(MAX_SMEM_BYTES, gpu.smem_per_block_optin_bytes)
            and math.gcd(sizes.columns, VECTOR_BYTES // dtype_bytes(sizes.dtype)) % self.width == 0
        )

    def blocks(self, sizes: ScatterSizes) -> int:
        return -(-sizes.rows // self.tile_rows) * -(-sizes.columns // (self.lanes * self.width))


class GpuScatterRowsParams(NamedTuple):
    """The parameters of `gpu_scatter_rows`."""

    threads: int
    lanes: int
    """Threads beside one another along columns."""
    width: int
    """Elements of one access; of an odd number of columns, those of a thread, which lie `lanes` apart."""
    rows: int
    """Rows of a thread."""
    part_rows: int
    """Rows whose updates one thread block lists."""

    @property
    def list_threads(self) -> int:
        """Return the threads of a block that lists updates."""
        return LIST_THREADS

    @property
    def list_words(self) -> int:
        """Return its shared memory in words: where lists go on, what it has found, and counts of warps."""
        return self.part_rows + 2 * self.list_threads + 2 * WARP_LANES

    def is_apart(self, sizes: ScatterSizes) -> bool:
        """Say whether a thread's elements lie apart, so that a warp's loads are neighbours: odd rows have no vectors."""
        return self.width > 1 and sizes.columns % 2 == 1

    def in_flight(self, sizes: ScatterSizes) -> int:
        """Return the updates that a thread loads at once where there are many: 128 bytes or 32 loads."""
        return max(4, MANY_LOADS // self.width) if self.is_apart(sizes) else min(32, max(4, 128 // (self.width * dtype_bytes(sizes.dtype))))

    def fits(self, sizes: ScatterSizes, gpu: Gpu) -> bool:
        """Say whether kernels with these parameters can be built."""
        return (
            takes(sizes)
            and min(self) >= 1
            and max(self.threads, self.list_threads) <= gpu.max_threads_per_block
            and self.threads % WARP_LANES == 0
            and self.threads % self.lanes == 0
            and self.rows <= MAX_THREAD_ROWS
            and self.list_words * 4 <= gpu.smem_per_block_bytes
            and math.gcd(0 if self.is_apart(sizes) else sizes.columns, VECTOR_BYTES // dtype_bytes(sizes.dtype)) % self.width == 0
        )

    def blocks(self, sizes: ScatterSizes) -> int:
        return -(-sizes.rows // (self.threads // self.lanes * self.rows)) * -(-sizes.columns // (self.lanes * self.width))

    def parts(self, sizes: ScatterSizes) -> int:
        return -(-sizes.rows // self.part_rows)


def sum_bytes(sizes: ScatterSizes) -> int:
    """Return the bytes of an element of the sums."""
    return max(4, dtype_bytes(sizes.dtype))


def smem_sums(sizes: ScatterSizes, params: GpuScatterParams) -> int:
    """Return the shared memory of a thread block, in elements of the sums: its part of the result, and which updates it has found."""
    found = (2 * params.threads + WARP_LANES) * 4
    return params.tile_rows * params.lanes * params.width + -(-found // sum_bytes(sizes))


def takes(sizes: ScatterSizes) -> bool:
    """Say whether the kernel computes such a sum."""
    return sizes.dtype in GPU_DTYPES and max(sizes.rows, sizes.updates) * sizes.columns < MAX_OFFSET


def scatter_of(space: IterSpace) -> ScatterSizes | None:
    """Return the sizes of the rows added at indices that an iteration space may be, None where it is none.

    Its one reduction reads a vector of indices and a matrix of as many rows, along both of which it goes.
    """
    first, *rest = space.blocks
    if not first.is_reduction or len(rest) != 1 or rest[0].is_reduction or len(first.reads) != 2 or len(space.outputs) != 1:
        return None
    indices = next((read for read in first.reads if len(read.shape) == 1 and read.dtype in {"int32", "int64"}), None)
    updates = next((read for read in first.reads if len(read.shape) == 2), None)
    out = rest[0].writes[0]
    if indices is None or updates is None or len(out.shape) != 2 or updates.shape != (*indices.shape, out.shape[1]):
        return None
    if first.axes[-1].kind != "reduce" or first.axes[-1].extent != indices.shape[0]:
        return None
    return ScatterSizes(*out.shape, indices.shape[0], out.dtype, indices.dtype, len(space.inputs) == 3)
