"""Owns the sizes of the kernel of a GEMV with 4-bit weights: what follows from the template's parameters, and whether they fit a GPU.

Knows nothing of TIRx, of which computations the kernel is for, or of how parameters are chosen.

A tile is `rows` rows of weights, and a k-tile I4_STEP weights of each of them. A warp computes every `tile_stride`th tile; where `warps_k`
warps share a tile, each takes every `warps_k`th of its k-tiles and leaves a partial result for each row in shared memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kerneldecl.analysis.gpu_limits import MIN_ASYNC_COPY_BYTES, VECTOR_BYTES, WARP_LANES
from kerneldecl.analysis.params import I4_GROUPS, I4_ROWS, I4_STEP, I4_STEP_BYTES, GemvI4Params
from kerneldecl.compiler.passes.l2_prefetch import PREFETCH_BYTES
from kerneldecl.model import Gpu

X_VECTORS = 4
"""Vectors of 8 elements of x that a thread loads before it stores the first."""
QUADS = 8
"""Groups of four lanes in a warp; each has initial accumulators of its own."""


@dataclass(frozen=True)
class Kernel:
    """The sizes of the GEMV, the template's parameters, and what follows from them."""

    n: int
    k: int
    group: int
    """Weights that share a scale."""
    params: GemvI4Params
    sm_count: int
    pdl: bool
    """Whether the kernel overlaps the end of the preceding one."""

    @property
    def k_tiles(self) -> int:
        return -(-self.k // I4_STEP)

    @property
    def tiles(self) -> int:
        return -(-self.n // self.params.rows)

    @property
    def warp_groups(self) -> int:
        """Groups of `warps_k` warps in a block; each group computes tiles of its own."""
        return self.params.warps // self.params.warps_k

    @property
    def warp_k_tiles(self) -> int:
        """K-tiles of one tile that a warp multiplies; the last one may lie beyond the end of k."""
        return -(-self.k_tiles // self.params.warps_k)

    @property
    def keeps_x_in_registers(self) -> bool:
        """Whether a warp needs only one k-tile of x, and so keeps it in registers instead of shared memory."""
        return self.warp_k_tiles == 1

    @property
    def smem_k_tiles(self) -> int:
        """K-tiles of x in shared memory."""
        return 1 if self.keeps_x_in_registers else self.k_tiles

    @property
    def grid(self) -> int:
        return min(self.params.blocks * self.sm_count, -(-self.tiles // self.warp_groups))

    @property
    def tile_stride(self) -> int:
        return self.grid * self.warp_groups

    @property
    def block_rows(self) -> int:
        """Rows whose partial results a block reduces at its end; 0 where each warp computes whole rows."""
        params = self.params
        return -(-self.tiles // self.tile_stride) * self.warp_groups * params.rows if params.warps_k > 1 else 0

    @property
    def vectors(self) -> int:
        """Vectors of 8 elements of x, with the zeros that fill its last k-tile."""
        return self.k_tiles * I4_STEP // 8

    @property
    def x_passes(self) -> int:
        """Passes in which a block loads x: one is X_VECTORS vectors for each thread."""
        return -(-self.vectors // (X_VECTORS * self.params.warps * WARP_LANES))

    @property
    def prefetched_rows(self) -> int:
        """Rows of a warp's first k-tile that are prefetched to L2."""
        return min(self.params.rows, PREFETCH_BYTES // (self.params.blocks * self.params.warps * I4_STEP_BYTES))

    @property
    def scales(self) -> int:
        """Scales of one row in a k-tile."""
        return I4_STEP // self.group

    @property
    def scales_per_copy(self) -> int:
        """Scales that a lane copies with one cp.async: rows of scales are contiguous, so they start at multiples of their length."""
        return math.gcd(self.scales, self.k // self.group, VECTOR_BYTES // 2)

    @property
    def smem_bytes(self) -> int:
        params = self.params
        ring = params.warps * params.stages * params.rows * (I4_STEP_BYTES + 2 * self.scales)
        return ring + (2 * I4_STEP + 4 * QUADS) * self.smem_k_tiles + 4 * max(4, self.block_rows * params.warps_k)

    def fits(self, gpu: Gpu) -> bool:
        """Say whether the parameters are valid for these sizes on a GPU."""
        params = self.params
        return (
            params.rows in I4_ROWS
            and self.group in I4_GROUPS
            and params.warps % params.warps_k == 0
            and params.warps_k <= self.k_tiles
            and self.k % self.group == 0
            and 2 * self.scales_per_copy >= MIN_ASYNC_COPY_BYTES
            and params.rows * self.scales // self.scales_per_copy <= WARP_LANES
            and params.stages >= 2
            and params.warps * WARP_LANES <= gpu.max_threads_per_block
            and self.smem_bytes <= gpu.smem_per_block_optin_bytes
            and params.blocks * (self.smem_bytes + gpu.smem_reserved_per_block_bytes) <= gpu.smem_per_sm_bytes
            and self.n * self.k // 2 < 2**31
        )
