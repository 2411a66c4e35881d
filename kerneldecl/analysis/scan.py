"""Owns cumulative sums as policies see them: sizes read from an iteration space, and the parameters of their kernels.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.model import Gpu, IterSpace, dtype_bytes

DTYPES = frozenset({"float16", "bfloat16", "float32", "float64", "int32", "int64"})
"""Of X and Y, which are alike."""
MAX_OFFSET = 2**31
"""Elements that 32-bit offsets address."""
MAX_PARTS = 1024
"""Parts of a row whose sums one thread block adds up."""

SUM_BYTES = 4
"""Bytes of a sum that is published together with the flag that says so."""
MAX_LOOKS = 16
"""Earlier groups' sums that a thread adds up at most."""
SMEM_SUMS = 128
"""Words of shared memory that are not elements."""
MAX_KEPT = 32
"""Vectors of a thread in shared memory at most."""
MAX_HELD_LOOKS = 4
"""Words at which a thread looks at once at most."""
GROUP_TILES = 64
"""Tiles of a row whose sum is published as one, too."""
MAX_ONCE_UNROLL = 8
SCAN_LANES = (1, 2, 4, 8, 16, 32)
"""Threads side by side that divide a warp."""
MAX_HELD_REGISTERS = 48
"""Registers of a thread that hold elements and sums at most where columns are scanned in one pass; it has 64."""
RESIDENT_THREADS = 1024
"""Threads of an SM that scan tiles in one pass, at least."""


class ScanSizes(NamedTuple):
    """Sizes of a cumulative sum along the middle one of three axes."""

    outer: int
    extent: int
    inner: int
    """Elements between neighbours along the axis; 1 where rows are scanned."""
    dtype: str

    @property
    def elements(self) -> int:
        return self.outer * self.extent * self.inner


class GpuScanParams(NamedTuple):
    """The parameters of `gpu_scan`."""

    threads: int
    parts: int
    """Thread blocks that share a row; with one, there is one kernel instead of two."""
    unroll: int
    """Vectors of a thread in flight together along rows; elements where `inner` is not 1."""

    def width(self, sizes: ScanSizes) -> int:
        """Return the neighbouring elements of one access: along the row, or of neighbouring rows."""
        return math.gcd(sizes.extent if sizes.inner == 1 else sizes.inner, VECTOR_BYTES // dtype_bytes(sizes.dtype))

    def step(self, sizes: ScanSizes) -> int:
        """Return the elements along the axis that a thread block takes at once."""
        return self.threads * self.width(sizes) * self.unroll if sizes.inner == 1 else self.unroll

    def part(self, sizes: ScanSizes) -> int:
        """Return the elements of a part along the axis, whole steps."""
        step = self.step(sizes)
        return -(-sizes.extent // (step * self.parts)) * step

    def blocks(self, sizes: ScanSizes) -> int:
        """Return the thread blocks of one part of everything."""
        if sizes.inner == 1:
            return sizes.outer
        return sizes.outer * -(-sizes.inner // (self.width(sizes) * self.threads))


class GpuScanOnceParams(NamedTuple):
    """The parameters of `gpu_scan_once`."""

    threads: int
    unroll: int
    """Vectors of a thread."""

    @property
    def ctas_per_sm(self) -> int:
        """Return the thread blocks for which an SM has registers, 64 a thread: while some wait for tiles before, others load and store."""
        return max(1, RESIDENT_THREADS // self.threads)

    def tile(self, sizes: ScanSizes) -> int:
        """Return the elements of a tile."""
        return self.threads * math.gcd(sizes.extent, VECTOR_BYTES // dtype_bytes(sizes.dtype)) * self.unroll

    def tiles(self, sizes: ScanSizes) -> int:
        """Return the tiles of a row."""
        return -(-sizes.extent // self.tile(sizes))

    def groups(self, sizes: ScanSizes) -> int:
        """Return the groups of tiles of a row."""
        return -(-self.tiles(sizes) // GROUP_TILES)

    def words(self, sizes: ScanSizes) -> int:
        """Return the words that thread blocks exchange: a sum of each tile and of each group, and how many tiles are taken."""
        return sizes.outer * (self.tiles(sizes) + self.groups(sizes)) + 1

    def fits(self, sizes: ScanSizes, gpu: Gpu) -> bool:
        """Say whether kernels with these parameters can be built: a sum and a flag are one word, and a thread looks at few of them."""
        return (
            takes(sizes)
            and sizes.inner == 1
            and dtype_bytes(sizes.dtype) <= SUM_BYTES
            and self.threads % WARP_LANES == 0
            and 0 < self.threads <= gpu.max_threads_per_block
            and 1 <= self.unroll <= MAX_ONCE_UNROLL
            and self.tiles(sizes) > 1
            and self.groups(sizes) <= MAX_LOOKS * self.threads
        )


class GpuScanTilesParams(NamedTuple):
    """The parameters of `gpu_scan_tiles`."""

    threads: int
    held: int
    """Vectors of a thread in registers."""
    kept: int
    """Vectors of a thread in shared memory."""
    group: int
    """Tiles of a row whose sum is published as one, too."""
    lag: int
    """Groups before a tile's own whose tiles it adds up one by one."""
    ahead: int
    """Tiles by which sums are ahead of the scan, which reads each tile again from L2; with 0, it is read once."""
    stream: int
    """1 where results, and elements that are read for the last time into registers, are the first to leave L2, else 0."""

    @property
    def unroll(self) -> int:
        """Return the vectors of a thread in a tile."""
        return self.held + self.kept

    def width(self, sizes: ScanSizes) -> int:
        """Return the elements of a vector."""
        return math.gcd(sizes.extent, VECTOR_BYTES // dtype_bytes(sizes.dtype))

    def tile(self, sizes: ScanSizes) -> int:
        """Return the elements of a tile."""
        return self.threads * self.width(sizes) * self.unroll

    def tiles(self, sizes: ScanSizes) -> int:
        """Return the tiles of a row."""
        return -(-sizes.extent // self.tile(sizes))

    def groups(self, sizes: ScanSizes) -> int:
        """Return the groups of tiles of a row."""
        return -(-self.tiles(sizes) // self.group)

    def words(self, sizes: ScanSizes) -> int:
        """Return the words that thread blocks exchange: a sum of each tile and of each group, and how many tiles are taken."""
        return sizes.outer * (self.tiles(sizes) + self.groups(sizes)) + 1

    def blocks(self, sizes: ScanSizes) -> int:
        """Return the thread blocks: each adds up one tile, where sums are ahead, and scans one."""
        return sizes.outer * self.tiles(sizes) + self.ahead

    def looks(self, sizes: ScanSizes) -> int:
        """Return the words at which a thread looks at most."""
        far = max(0, self.groups(sizes) - 1 - self.lag)
        return -(-(far + min((self.lag + 1) * self.group, self.tiles(sizes)) - 1) // self.threads)

    def smem_sums(self, sizes: ScanSizes) -> int:
        """Return the words of 4 bytes of shared memory: sums of warps, which tile it is, and the vectors that are kept."""
        return SMEM_SUMS + self.kept * self.threads * self.width(sizes) * dtype_bytes(sizes.dtype) // SUM_BYTES

    def ctas_per_sm(self, sizes: ScanSizes, gpu: Gpu) -> int:
        """Return the thread blocks for which an SM has registers, 64 a thread, and shared memory."""
        by_smem = gpu.smem_per_sm_bytes // (self.smem_sums(sizes) * SUM_BYTES + gpu.smem_reserved_per_block_bytes)
        return max(1, min(RESIDENT_THREADS // self.threads, by_smem))

    def fits(self, sizes: ScanSizes, gpu: Gpu) -> bool:
        """Say whether kernels with these parameters can be built: a sum and a flag are one word, threads have room for what they hold."""
        return (
            takes(sizes)
            and sizes.inner == 1
            and dtype_bytes(sizes.dtype) <= SUM_BYTES
            and self.threads % WARP_LANES == 0
            and 0 < self.threads <= gpu.max_threads_per_block
            and 1 <= self.held <= MAX_ONCE_UNROLL
            and 0 <= self.kept <= MAX_KEPT
            and (not self.kept or (gpu.async_copy and self.width(sizes) * dtype_bytes(sizes.dtype) >= SUM_BYTES))
            and self.smem_sums(sizes) * SUM_BYTES <= gpu.smem_per_block_optin_bytes
            and self.tiles(sizes) > 1
            and self.group >= 1
            and self.lag >= 1
            and 0 <= self.ahead <= sizes.outer * self.tiles(sizes)
            and self.stream in {0, 1}
            and self.looks(sizes) <= MAX_HELD_LOOKS
        )


class GpuScanColumnsParams(NamedTuple):
    """The parameters of `gpu_scan_columns`."""

    threads: int
    lanes: int
    """Threads side by side."""
    unroll: int
    """Rows of a thread in a step."""

    @property
    def ctas_per_sm(self) -> int:
        """Return the thread blocks for which an SM has registers, 64 a thread: while some scan, others load and store."""
        return max(1, RESIDENT_THREADS // self.threads)

    def width(self, sizes: ScanSizes) -> int:
        """Return the neighbouring columns of a thread."""
        return math.gcd(sizes.inner, VECTOR_BYTES // dtype_bytes(sizes.dtype))

    @property
    def step(self) -> int:
        """Return the rows that a thread block takes at once."""
        return self.threads // self.lanes * self.unroll

    def slices(self, sizes: ScanSizes) -> int:
        """Return the strips side by side."""
        return -(-sizes.inner // (self.width(sizes) * self.lanes))

    def blocks(self, sizes: ScanSizes) -> int:
        return sizes.outer * self.slices(sizes)

    def smem_sums(self, sizes: ScanSizes) -> int:
        """Return the sums that a thread block keeps in shared memory: those of its warps and of all, twice in turns."""
        return 2 * (self.threads // WARP_LANES + 1) * (self.lanes * self.width(sizes) + 1)

    def held_registers(self, sizes: ScanSizes) -> int:
        """Return a thread's registers of elements, those of the next step too, and of sums."""
        width, element = self.width(sizes), dtype_bytes(sizes.dtype)
        return 2 * self.unroll * -(-width * element // 4) + 2 * width * max(element, 4) // 4

    def fits(self, sizes: ScanSizes, gpu: Gpu) -> bool:
        """Say whether the kernel can be built, and threads have room for what they hold."""
        return (
            takes(sizes)
            and sizes.inner > 1
            and self.threads % WARP_LANES == 0
            and 0 < self.threads <= gpu.max_threads_per_block
            and self.lanes in SCAN_LANES
            and 1 <= self.unroll <= MAX_ONCE_UNROLL
            and self.smem_sums(sizes) * max(dtype_bytes(sizes.dtype), SUM_BYTES) <= gpu.smem_per_block_bytes
            and self.held_registers(sizes) <= MAX_HELD_REGISTERS
        )


def takes(sizes: ScanSizes) -> bool:
    """Say whether the kernels compute such a sum."""
    return sizes.dtype in DTYPES and sizes.elements < MAX_OFFSET


def scan_of(space: IterSpace) -> ScanSizes | None:
    """Return the sizes of the cumulative sum that an iteration space may be, None where it is none; the template reads it in full.

    Its one reduction is along an axis that the result has, too, and reads one operand of the result's shape.
    """
    first, *rest = space.blocks
    if not first.is_reduction or len(rest) > 1 or len(first.reads) != 1 or first.flops_per_point != 1:
        return None
    read, out = first.reads[0], space.blocks[-1].writes[0]
    last = len(first.axes) - 1
    along = [dim for dim, index in enumerate(read.index) if index is not None and dict(index).get(last)]
    if read.shape != out.shape or len(first.axes) != len(read.shape) + 1 or len(along) > 1 or read.dtype != out.dtype:
        return None
    axis = along[0] if along else next((dim for dim, extent in enumerate(read.shape) if extent == 1), -1)
    if axis < 0 or first.axes[last].extent != read.shape[axis]:
        return None
    return ScanSizes(math.prod(read.shape[:axis]), read.shape[axis], math.prod(read.shape[axis + 1 :]), read.dtype)
