"""Owns the largest or smallest elements of rows as policies see them: sizes read from an iteration space, and kernels' parameters.

Knows nothing of TVM or of which parameters are fast. Sorting rows is the case of as many results as elements.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.model import Gpu, IterSpace, dtype_bytes

GPU_DTYPES = frozenset({"float16", "bfloat16", "float32", "int8", "uint8", "int16", "int32"})
"""Of elements whose order a word of 32 bits holds."""
ENTRY_BYTES = 8
"""Bytes of an element that is sorted: 32 bits of its order, 32 of its place."""
MAX_ENTRIES = 1 << 14
"""Elements that a thread block sorts at most: 128 KiB of shared memory."""
MAX_ITEMS = 32
"""Elements that a thread keeps in registers at most."""
MAX_OFFSET = 2**31


class TopSizes(NamedTuple):
    """Sizes of the first elements of rows in their order."""

    rows: int
    extent: int
    """Elements of a row."""
    results: int
    """Of a row."""
    dtype: str

    @property
    def entry_count(self) -> int:
        """Return the power of two of entries that hold a row's results."""
        return 1 << max(5, (self.results - 1).bit_length())


class GpuTopParams(NamedTuple):
    """The parameters of `gpu_topk`."""

    threads: int
    entries: int
    """Elements that are sorted at most, a power of two: where a row has more, those are chosen first that may be among the results."""
    kept: int
    """1 keeps a row in shared memory, so that it is read from DRAM once; 0 reads it from L2 again."""

    def width(self, sizes: TopSizes) -> int:
        """Return the elements of one access."""
        return math.gcd(sizes.extent, VECTOR_BYTES // dtype_bytes(sizes.dtype))

    def smem_bytes(self, sizes: TopSizes) -> int:
        """Return the shared memory of a thread block."""
        row = -(-sizes.extent * dtype_bytes(sizes.dtype) // VECTOR_BYTES) * VECTOR_BYTES
        return self.entries * ENTRY_BYTES + 256 + (row if self.kept else 0)

    def fits(self, sizes: TopSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built, and sorts as many elements as there are results."""
        return (
            takes(sizes)
            and self.threads % WARP_LANES == 0
            and 0 < self.threads <= gpu.max_threads_per_block
            and self.entries & (self.entries - 1) == 0
            and sizes.entry_count <= self.entries <= MAX_ENTRIES
            and self.kept in {0, 1}
            and self.smem_bytes(sizes) <= gpu.smem_per_block_optin_bytes
        )


class GpuSortParams(NamedTuple):
    """The parameters of `gpu_sort`."""

    threads: int
    items: int
    """Elements of a thread."""

    @property
    def entries(self) -> int:
        return self.threads * self.items

    @property
    def smem_entries(self) -> int:
        """Return the entries for which a thread block has shared memory: rows of a thread's entries begin in different banks."""
        return self.threads * (self.items + 1)

    def entry_bytes(self, sizes: TopSizes) -> int:
        """Return the bytes of an element that is sorted: half for its order, half for its place."""
        return 4 if dtype_bytes(sizes.dtype) <= 2 else ENTRY_BYTES

    def fits(self, sizes: TopSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built, and has room for a row."""
        return (
            takes(sizes)
            and all(each > 0 and each & (each - 1) == 0 for each in self)
            and WARP_LANES <= self.threads <= gpu.max_threads_per_block
            and self.items <= MAX_ITEMS
            and sizes.extent <= self.entries <= MAX_ENTRIES
            and self.smem_entries * self.entry_bytes(sizes) <= gpu.smem_per_block_optin_bytes
        )


def takes(sizes: TopSizes) -> bool:
    """Say whether the kernels compute such results."""
    return sizes.dtype in GPU_DTYPES and sizes.results <= MAX_ENTRIES and sizes.rows * sizes.extent < MAX_OFFSET


def top_of(space: IterSpace) -> TopSizes | None:
    """Return the sizes of the sorted rows that an iteration space may have, None where it has none; the template reads it in full.

    Its blocks are those of `compiler.row_sort`: places of all elements, then the first values and their indices.
    """
    kinds = [block.is_reduction for block in space.blocks]
    if kinds != [True, True, True] or len(space.inputs) != 1 or len(space.outputs) != 2:
        return None
    places, values, indices = space.blocks
    x = next((read for read in places.reads if read.operand == space.inputs[0]), None)
    if x is None or places.writes[0].shape != x.shape or values.writes[0].shape != indices.writes[0].shape:
        return None
    count = values.writes[0].shape[-1]
    if values.writes[0].shape[:-1] != x.shape[:-1] or count > x.shape[-1]:
        return None
    return TopSizes(math.prod(x.shape[:-1]), x.shape[-1], count, x.dtype)
