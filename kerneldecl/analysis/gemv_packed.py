"""Owns the parameters of matrix-vector multiplications (GEMVs) with packed 4-bit weights on mma.sync, and what follows from them.

Knows nothing of TVM or of which parameters are fast. Tiles, steps and sums are those of the persistent GEMM; activations stay in shared
memory, and each warp has every so many-th step as there are warps.
"""

from __future__ import annotations

from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import FIRST_CLUSTER_CAPABILITY, VECTOR_BYTES
from kerneldecl.analysis.matmul_packed import BARRIER_BYTES, COLUMNS, PADDING_BYTES, PackedSizes
from kerneldecl.analysis.matmul_packed_persistent import MAX_PERSISTENT_STAGES, STEPS, PersistentParams
from kerneldecl.analysis.packed_weights import TILE_K, TILE_ROWS
from kerneldecl.model import Candidate, Gpu

TEMPLATE = "gpu_gemv_packed"
MAX_GEMV_ROWS = COLUMNS
"""Rows of activations at most: those of one fragment."""
GEMV_TILES = (16, 32, 64)
"""Rows of weights of a tile: those of up to four fragments, one for each lane of a quad."""


class GemvPackedParams(NamedTuple):
    """The parameters of `gpu_gemv_packed`."""

    rows: int
    """Rows of weights of a tile."""
    step: int
    """Elements along k of a step."""
    warps: int
    """Warps of a thread block, among which k is divided."""
    tiles: int
    """Tiles of a thread block at most, one after another."""
    stages: int
    """Steps of a warp in shared memory or on their way to it."""
    blocks: int = 1
    """Thread blocks for which an SM has registers and shared memory."""
    bulk: int = 0
    """Whether one lane copies a warp's weights in bulk; else each lane copies 16 bytes of each 512."""
    prefetch: int = 0
    """Steps of a warp whose weights come to L2 while the preceding kernel ends."""
    alone: int = 0
    """Whether an SM has shared memory for `blocks` thread blocks and no more, so that none of the next kernel comes beside them."""

    def candidate(self) -> Candidate:
        return Candidate.of(TEMPLATE, {name: value for name, value in self._asdict().items() if value or name != "alone"})

    @property
    def walk(self) -> PersistentParams:
        """The persistent GEMM with the same tiles and steps."""
        shared = (self.rows, self.step, self.warps, self.tiles, self.stages)
        return PersistentParams(*shared, held=self.tiles, bulk=self.bulk, prefetch=self.prefetch, interleave=1)

    def pitch(self, sizes: PackedSizes) -> int:
        """Bytes from a warp's row of activations in shared memory to the next."""
        return self.walk.slice_steps(sizes) * self.step * 2 + PADDING_BYTES

    def activation_bytes(self, sizes: PackedSizes) -> int:
        """Bytes of the activations of all warps."""
        return self.warps * sizes.m * self.pitch(sizes)

    def ring_offset(self, sizes: PackedSizes) -> int:
        """Return where in shared memory stages begin: behind sums and activations."""
        return self.walk.sum_bytes(sizes) + self.activation_bytes(sizes)

    def barrier_offset(self, sizes: PackedSizes) -> int:
        """Return where in shared memory the barriers of stages begin: behind all else."""
        return self.ring_offset(sizes) + self.warps * self.walk.ring_bytes(sizes)

    def smem_bytes(self, sizes: PackedSizes, gpu: Gpu) -> int:
        """Bytes that a thread block asks for: those that it needs, or more of them where it wants no other one beside it."""
        needed = self.barrier_offset(sizes) + self.bulk * self.warps * self.stages * BARRIER_BYTES
        crowding = gpu.smem_per_sm_bytes // (self.blocks + 1) // VECTOR_BYTES * VECTOR_BYTES
        return max(needed, crowding) if self.alone else needed

    def registers(self, sizes: PackedSizes) -> int:
        """Registers that a thread needs, about (nvcc 13.0); it gets up to 24 more where there are some."""
        fragments = self.rows // TILE_ROWS * (self.step // TILE_K)
        # Lanes that copy keep addresses.
        kinds = (sizes.m > 1) + sizes.has_zeros + (not self.bulk)
        return 40 + 6 * fragments + 8 * kinds + 4 * (self.walk.step_scales(sizes) - 1)

    def fits(self, sizes: PackedSizes, gpu: Gpu) -> bool:
        """Say whether the parameters are valid for these sizes on a GPU."""
        walk = self.walk
        return (
            sizes.m <= MAX_GEMV_ROWS
            and not sizes.is_float4
            and self.rows in GEMV_TILES
            and self.rows <= sizes.n
            and self.step in STEPS
            and sizes.k % self.step == 0
            and 2 <= self.stages <= MAX_PERSISTENT_STAGES
            and 1 <= self.tiles <= walk.row_tiles(sizes)
            and self.alone in (0, 1)
            and (self.bulk == 0 or (self.bulk == 1 and gpu.compute_capability >= FIRST_CLUSTER_CAPABILITY))
            and 0 <= self.prefetch <= self.tiles * walk.slice_steps(sizes)
            and 1 <= self.warps <= walk.steps(sizes)
            and walk.threads <= gpu.max_threads_per_block
            and self.blocks >= 1
            and self.blocks * walk.threads <= gpu.max_threads_per_sm
            and self.blocks * walk.threads * self.registers(sizes) <= gpu.registers_per_sm
            and self.smem_bytes(sizes, gpu) <= gpu.smem_per_block_optin_bytes
            and self.blocks * (self.smem_bytes(sizes, gpu) + gpu.smem_reserved_per_block_bytes) <= gpu.smem_per_sm_bytes
            and sizes.n * sizes.k < 2**31
        )
