"""Owns grouped GEMM as policies see it: its sizes read from an iteration space, and the parameters of its kernels.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES
from kerneldecl.analysis.hopper_limits import (
    EPILOGUE_BUFFER_BYTES,
    MAX_ACCUM_REGISTERS,
    MAX_CTA_SMEM_BYTES,
    RESERVED_SMEM_BYTES,
    fitting_epilogue_buffers,
)
from kerneldecl.analysis.params import WgmmaParams
from kerneldecl.analysis.tensor_cores import K_BYTES, shape_of
from kerneldecl.model import Access, Candidate, Gpu, IterSpace, dtype_bytes

MAX_ELEMENTS = 2**31
"""Elements of A, of C, or of B that 32-bit offsets address."""
MAX_GROUPS = 1024
"""Groups whose places a CTA finds in shared memory, about 24 KiB of it."""
TMA_ROW_BYTES = 16
USED_OF_MASKED = 2
"""Places of a group for each row that is used, about."""
SCALE_COLUMNS = 128
"""Columns of B, and elements of k, that share a scale of float8."""


class GroupedSizes(NamedTuple):
    """Sizes of a grouped GEMM."""

    rows: int
    """Rows of all groups; places for each group where `is_masked`."""
    groups: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    is_k_last: bool
    """Whether k is contiguous in B."""
    is_masked: bool
    is_scaled: bool
    """Whether operands have scales."""

    @property
    def places(self) -> int:
        """Return the rows of A and C."""
        return self.rows * (self.groups if self.is_masked else 1)

    @property
    def segments(self) -> int:
        """Return how many runs of rows there are: those of groups, and those of none, behind the last or behind each."""
        return 2 * self.groups if self.is_masked else self.groups + 1

    @property
    def bytes_moved(self) -> int:
        """Return the bytes of A, B and C."""
        return (self.places + self.groups * self.n) * self.k * dtype_bytes(self.dtype) + self.places * self.n * dtype_bytes(self.out_dtype)


def grouped_of(space: IterSpace) -> GroupedSizes | None:
    """Return the sizes of the grouped GEMM that an iteration space is, None where it is none."""
    blocks = space.blocks
    reductions = [block for block in blocks if block.is_reduction]
    if not reductions or len(blocks) > len(reductions) + 1 or blocks[-1].is_reduction != (len(blocks) == len(reductions)):
        return None
    product = reductions[-1]
    *spatial, (k_axis) = product.axes
    if len(product.reads) not in (3, 5) or k_axis.kind != "reduce" or len(spatial) not in (2, 3):
        return None
    is_masked, is_scaled = len(spatial) == 3, len(product.reads) == 5
    number, a, *others = product.reads
    b = others[1] if is_scaled else others[0]
    sizes = number if is_masked else reductions[0].reads[0]
    has_numbers = len(reductions) == (1 if is_masked else 2)
    if not has_numbers or len(sizes.shape) != 1 or sizes.dtype != "int32" or len(b.shape) != 3 or len(a.shape) != len(spatial):
        return None
    (groups,), n, k = sizes.shape, spatial[-1].extent, k_axis.extent
    is_k_last = _indexes(b, 2, len(spatial))
    if number.dtype != "int32" or b.shape != ((groups, n, k) if is_k_last else (groups, k, n)):
        return None
    return GroupedSizes(
        rows=spatial[-2].extent,
        groups=groups,
        n=n,
        k=k,
        dtype=a.dtype,
        out_dtype=blocks[-1].writes[0].dtype,
        is_k_last=is_k_last,
        is_masked=is_masked,
        is_scaled=is_scaled,
    )


def expected_tiles(sizes: GroupedSizes, block_m: int) -> float:
    """Return how many tiles of so many rows groups have together, as expected: the last one of each is half full."""
    rows = sizes.places / (USED_OF_MASKED if sizes.is_masked else 1)
    groups = min(sizes.groups, rows)
    return rows / block_m + groups / 2 if rows / groups > block_m / 2 else groups


def _indexes(access: Access, dim: int, axis: int) -> bool:
    """Say whether an axis alone indexes a dimension."""
    return access.index[dim] == ((axis, 1),)


class WgmmaGroupedParams(NamedTuple):
    """The parameters of `wgmma_matmul_grouped`."""

    block_m: int
    """Rows of a tile, all of one group: 64 or 128 for each consumer."""
    block_n: int
    consumers: int
    stages: int
    cluster_n: int
    """CTAs with neighbouring columns that share rows of A by multicast: 1, 2 or 4."""
    raster_group: int
    """Rows of tiles of a group that are computed before the next column of tiles."""
    kernel_schedule: str = "cooperative"
    """As in `WgmmaParams`. Candidates without it do not name it."""

    @property
    def gemm(self) -> WgmmaParams:
        """Return the parameters of the GEMM of one tile."""
        return WgmmaParams(**self._asdict(), pdl=1)

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * 128

    def table_bytes(self, sizes: GroupedSizes) -> int:
        """Return the shared memory of the places of groups: three numbers for each run of rows."""
        return 12 * sizes.segments

    def smem_bytes(self, sizes: GroupedSizes) -> int:
        """Return the shared memory of a CTA, with one epilogue buffer for each consumer."""
        stage = (self.block_m + -(-self.block_n // 64) * 64) * 128
        return self.stages * stage + self.consumers * EPILOGUE_BUFFER_BYTES + self.table_bytes(sizes) + RESERVED_SMEM_BYTES

    def candidate(self) -> Candidate:
        left_out = {"kernel_schedule"} if self.kernel_schedule == "cooperative" else set()
        return Candidate.of("wgmma_matmul_grouped", {name: value for name, value in self._asdict().items() if name not in left_out})

    def fits(self, sizes: GroupedSizes) -> bool:
        """Say whether a kernel with these parameters has room, besides what any GEMM kernel on wgmma needs."""
        return (
            self.smem_bytes(sizes) <= MAX_CTA_SMEM_BYTES
            and self.block_n % 64 == 0
            and self.cluster_n <= -(-sizes.n // self.block_n)
            and (not sizes.is_scaled or self._scales_fit())
        )

    def _scales_fit(self) -> bool:
        """Say whether a tile has one scale of B for each k-tile, and registers hold a k-tile's partial accumulators beside them.

        Consumers that scale do not take turns.
        """
        most = MAX_ACCUM_REGISTERS.get(self.consumers, 0)
        return self.kernel_schedule == "cooperative" and SCALE_COLUMNS % self.block_n == 0 and 2 * self.gemm.thread_accumulators <= most


def grouped_epilogue_buffers(chunks: int, consumers: int, free_bytes: int) -> int:
    """Return how many epilogue buffers each consumer has: as those of a GEMM, or one for each of three chunks."""
    if chunks == 3 and 3 * consumers * EPILOGUE_BUFFER_BYTES <= free_bytes:
        return 3
    return fitting_epilogue_buffers(chunks, consumers, free_bytes)


def wgmma_takes(sizes: GroupedSizes) -> bool:
    """Say whether the kernel on wgmma computes such a grouped GEMM: TMA takes rows of whole 16 bytes."""
    item, out_item = dtype_bytes(sizes.dtype), dtype_bytes(sizes.out_dtype)
    return (
        sizes.dtype in (("float8_e4m3fn",) if sizes.is_scaled else ("float16", "bfloat16"))
        and sizes.out_dtype in ("float16", "bfloat16")
        and sizes.k * item % TMA_ROW_BYTES == 0
        and sizes.n * out_item % TMA_ROW_BYTES == 0
        and sizes.groups <= MAX_GROUPS
        and max(sizes.places * max(sizes.k, sizes.n), sizes.places * sizes.n) < MAX_ELEMENTS
    )


class CpuGroupedParams(NamedTuple):
    """The parameters of `cpu_matmul_grouped`."""

    tile_m: int
    """Rows of a register tile, all of one group."""
    vectors: int
    """Vectors of columns of a register tile."""

    def candidate(self) -> Candidate:
        return Candidate.of("cpu_matmul_grouped", self._asdict())

    def fits(self) -> bool:
        """Say whether a kernel with these parameters can be built."""
        return 1 <= self.tile_m <= MOST_ROWS and 1 <= self.vectors <= MOST_VECTORS


MOST_ROWS, MOST_VECTORS = 16, 8
"""Rows and vectors of a register tile that the kernel on CPUs unrolls at most."""


class MmaGroupedParams(NamedTuple):
    """The parameters of `gpu_matmul_grouped`."""

    block_m: int
    """Rows of a tile, all of one group."""
    block_n: int
    warps_m: int
    warps_n: int
    stages: int
    """K-tiles of both operands in shared memory at once."""
    blocks: int
    """Thread blocks that share an SM."""

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def warp_tile(self) -> tuple[int, int]:
        return self.block_m // self.warps_m, self.block_n // self.warps_n

    @property
    def accumulators(self) -> int:
        """Return a thread's accumulators."""
        return self.warp_tile[0] * self.warp_tile[1] // 32

    def stage_elements(self, sizes: GroupedSizes) -> tuple[int, int]:
        """Return the elements of 16 bits of a k-tile of A and of B in shared memory, whose rows are padded by 16 bytes."""
        b = self.block_n * (MMA_K_TILE + MMA_PAD) if sizes.is_k_last else MMA_K_TILE * (self.block_n + MMA_PAD)
        return self.block_m * (MMA_K_TILE + MMA_PAD), b

    def smem_bytes(self, sizes: GroupedSizes) -> int:
        """Return the shared memory of a thread block: k-tiles, and where groups lie."""
        return 2 * self.stages * sum(self.stage_elements(sizes)) + 16 * sizes.segments

    def registers(self, sizes: GroupedSizes) -> int:
        """Return about how many registers a thread needs; with scales, sums of a k-tile and scales of its rows besides."""
        scaled = self.accumulators + self.warp_tile[0] // 8 if sizes.is_scaled else 0
        return self.accumulators + self.warp_tile[0] // 16 * 4 + 4 + MMA_OTHER_REGISTERS + scaled

    def fits(self, sizes: GroupedSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built."""
        smem, vectors = self.smem_bytes(sizes), MMA_K_TILE // MMA_PAD
        return (
            min(self.warps_m, self.warps_n, self.blocks) >= 1
            and self.block_m % (16 * self.warps_m) == 0
            and self.block_n % (16 * self.warps_n) == 0
            and self.block_m * vectors % self.threads == 0
            and self.block_n * vectors % self.threads == 0
            and (not sizes.is_scaled or SCALE_COLUMNS % self.warp_tile[1] == 0)
            and 2 <= self.stages <= 8
            and self.threads <= gpu.max_threads_per_block
            and self.registers(sizes) <= gpu.max_registers_per_thread
            and self.registers(sizes) * self.threads * self.blocks <= gpu.registers_per_sm
            and smem <= gpu.smem_per_block_optin_bytes
            and self.blocks * (smem + gpu.smem_reserved_per_block_bytes) <= gpu.smem_per_sm_bytes
        )

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_matmul_grouped", self._asdict())


MMA_K_TILE = 32
"""Elements of k, of 16 bits, that `gpu_matmul_grouped` copies at once; of 8 bits twice as many."""
MMA_PAD = 8
"""Elements of 16 bits between rows in shared memory, a vector of 16 bytes: ldmatrix then reads eight rows from different banks."""
MMA_OTHER_REGISTERS = 48
"""Registers of a thread besides accumulators and fragments, about."""


def mma_k_tile(sizes: GroupedSizes) -> int:
    """Return the elements of k that `gpu_matmul_grouped` copies at once."""
    return 2 * MMA_K_TILE // dtype_bytes(sizes.dtype)


def mma_takes(sizes: GroupedSizes, gpu: Gpu) -> bool:
    """Say whether the kernel on mma.sync computes such a grouped GEMM on a GPU: rows of whole 16 bytes, offsets of 32 bits.

    float8 needs its instruction, and both operands with k last.
    """
    inner, vector = sizes.k if sizes.is_k_last else sizes.n, VECTOR_BYTES // dtype_bytes(sizes.dtype)
    is_known = sizes.dtype == "float8_e4m3fn" and sizes.is_k_last if sizes.is_scaled else sizes.dtype in ("float16", "bfloat16")
    shape = shape_of("mma.sync", sizes.dtype, gpu.compute_capability)
    return (
        is_known
        and shape is not None
        and shape.tile[2] * dtype_bytes(sizes.dtype) == K_BYTES
        and sizes.k % vector == 0
        and inner % vector == 0
        and sizes.n % 2 == 0
        and sizes.groups <= MAX_GROUPS
        and max(sizes.places * max(sizes.k, sizes.n), sizes.groups * sizes.n * sizes.k) < MAX_ELEMENTS
    )
