"""Owns grouped GEMM on CUDA cores as policy and template see it: which ones the kernel takes, and the parameters that fit a GPU.

Knows nothing of TVM or of which parameters are fast.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.analysis.matmul_grouped import MAX_ELEMENTS, MAX_GROUPS, GroupedSizes
from kerneldecl.model import Candidate, Gpu, dtype_bytes

TEMPLATE = "gpu_matmul_grouped_simt"
K_TILE = 16
"""Elements of k that a thread block has in shared memory at once, twice."""
VECTOR = 4
"""Neighbouring float32 that a thread loads from shared memory at once."""
PAD = 4
"""Elements of float32 between rows in shared memory: threads that store along k then meet in fewer banks."""
OTHER_REGISTERS = 44
"""Registers of a thread besides accumulators, operands and the part of the next k-tile that it copies, about."""
DTYPES = ("float32", "float16", "bfloat16")


class SimtGroupedParams(NamedTuple):
    """The parameters of `gpu_matmul_grouped_simt`."""

    block_m: int
    """Rows of a tile, all of one group."""
    block_n: int
    thread_m: int
    """Rows of a thread, in vectors of 4 that are as far apart as there are threads along m."""
    thread_n: int
    blocks: int
    """Thread blocks that share an SM."""

    @property
    def threads(self) -> int:
        return self.block_m // self.thread_m * (self.block_n // self.thread_n)

    @property
    def shares(self) -> tuple[int, int]:
        """Return the elements of a k-tile of A and of B that a thread copies."""
        return self.block_m * K_TILE // self.threads, self.block_n * K_TILE // self.threads

    def widths(self, sizes: GroupedSizes) -> tuple[int, int]:
        """Return how many of them it copies at once: those of 16 bytes, or as many as divide a row, and what there is to copy."""
        most = math.gcd(K_TILE, VECTOR_BYTES // dtype_bytes(sizes.dtype))
        of_a, of_b = self.shares
        return math.gcd(sizes.k, most, of_a), math.gcd(sizes.k if sizes.is_k_last else sizes.n, most, of_b)

    def smem_bytes(self, sizes: GroupedSizes) -> int:
        """Return the shared memory of a thread block: two k-tiles in float32, and where groups lie."""
        return 2 * 4 * K_TILE * (self.block_m + self.block_n + 2 * PAD) + 16 * sizes.segments

    def registers(self, sizes: GroupedSizes) -> int:
        """Return about how many registers a thread needs."""
        copied = sum(self.shares) * dtype_bytes(sizes.dtype) // 4
        return self.thread_m * self.thread_n + self.thread_m + self.thread_n + copied + OTHER_REGISTERS

    def fits(self, sizes: GroupedSizes, gpu: Gpu) -> bool:
        """Say whether a kernel with these parameters can be built."""
        if min(self) < 1 or self.thread_m % VECTOR or self.thread_n % VECTOR:
            return False
        smem = self.smem_bytes(sizes)
        return (
            self.block_m % self.thread_m == 0
            and self.block_n % self.thread_n == 0
            and self.threads % WARP_LANES == 0
            and 0 < self.threads <= gpu.max_threads_per_block
            and all(extent * K_TILE % self.threads == 0 for extent in (self.block_m, self.block_n))
            and self.registers(sizes) <= gpu.max_registers_per_thread
            and self.registers(sizes) * self.threads * self.blocks <= gpu.registers_per_sm
            and smem <= gpu.smem_per_block_optin_bytes
            and self.blocks * (smem + gpu.smem_reserved_per_block_bytes) <= gpu.smem_per_sm_bytes
            and self.blocks * self.threads <= gpu.max_threads_per_sm
        )

    def candidate(self) -> Candidate:
        return Candidate.of(TEMPLATE, self._asdict())


def simt_takes(sizes: GroupedSizes) -> bool:
    """Say whether the kernel on CUDA cores computes such a grouped GEMM: one without scales, of any sizes that 32-bit offsets address."""
    return (
        not sizes.is_scaled
        and {sizes.dtype, sizes.out_dtype} <= set(DTYPES)
        and sizes.groups <= MAX_GROUPS
        and max(sizes.places * max(sizes.k, sizes.n), sizes.groups * sizes.n * sizes.k) < MAX_ELEMENTS
    )
