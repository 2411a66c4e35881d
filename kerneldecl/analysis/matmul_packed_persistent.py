"""Owns the parameters of persistent GEMMs of few rows with packed 4-bit weights on mma.sync, and what follows from them.

Knows nothing of TVM or of which parameters are fast. A step is what a warp copies at once: some elements along k of a tile of rows.
"""

from __future__ import annotations

from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import FIRST_CLUSTER_CAPABILITY, MAX_CLUSTER, WARP_LANES
from kerneldecl.analysis.matmul_packed import BARRIER_BYTES, PADDING_BYTES, PARTIAL_PADDING, PackedSizes
from kerneldecl.analysis.packed_weights import ROW_BYTES, TILE_K, TILE_ROWS
from kerneldecl.model import Candidate, Gpu

MAX_PERSISTENT_ROWS = 16
"""Rows of activations at most: each thread holds fragments of all of them."""
STEPS = (64, 128, 256)
TILES = (16, 32)
"""Rows of weights of a tile."""
MAX_PERSISTENT_STAGES = 24
MAX_HELD_REGISTERS = 144
"""Registers of a thread that hold activations and their sums at most, of tiles of 16 rows: those of 32 need more for weights. With 160 of
them nvcc 13.0 spills."""


class PersistentParams(NamedTuple):
    """The parameters of `gpu_matmul_packed_persistent`."""

    rows: int
    """Rows of weights of a tile."""
    step: int
    """Elements along k of a step."""
    warps: int
    """Warps of a thread block, each with a slice of k."""
    tiles: int
    """Tiles of a thread block at most, one after another."""
    stages: int
    """Steps of a warp in shared memory or on their way to it."""
    held: int
    """Tiles whose partial results lie in shared memory before warps add them up."""
    split_k: int = 1
    """Thread blocks of a cluster among which k is divided."""
    bulk: int = 0
    """Whether one lane copies a warp's weights in bulk; else each lane copies 16 bytes of each 512."""
    prefetch: int = 0
    """Steps of a warp whose weights come to L2 while the preceding kernel ends."""
    cover: int = 0
    """Whether the first weights come to L2 whose stages activations have at first."""
    interleave: int = 0
    """Whether a warp has every so many-th step as there are warps; else steps that follow each other."""

    def candidate(self) -> Candidate:
        given = {name: value for name, value in self._asdict().items() if name != "interleave" or value}
        return Candidate.of("gpu_matmul_packed_persistent", given)

    @property
    def threads(self) -> int:
        return self.warps * WARP_LANES

    def row_tiles(self, sizes: PackedSizes) -> int:
        """Tiles of all rows of weights; the last one shares rows with its neighbour where `rows` does not divide them."""
        return -(-sizes.n // self.rows)

    def blocks(self, sizes: PackedSizes) -> int:
        """Thread blocks, or clusters of them; each has every `blocks`th tile."""
        return -(-self.row_tiles(sizes) // self.tiles)

    def steps(self, sizes: PackedSizes) -> int:
        return sizes.k // self.step

    def slice_steps(self, sizes: PackedSizes) -> int:
        """Steps of a warp for each tile; the last warps of a cluster may have fewer, or none."""
        return -(-self.steps(sizes) // (self.warps * self.split_k))

    def is_even(self, sizes: PackedSizes) -> bool:
        """Say whether all warps have as many steps."""
        return self.steps(sizes) == self.slice_steps(sizes) * self.warps * self.split_k

    @property
    def stride(self) -> int:
        """Steps from one of a warp to its next."""
        return self.warps * self.split_k if self.interleave else 1

    def step_scales(self, sizes: PackedSizes) -> int:
        """Scales of a row in a step."""
        return max(1, self.step // sizes.group)

    def held_registers(self, sizes: PackedSizes) -> int:
        """Registers of a thread that hold its fragments of activations and, for int4, their sums over what shares a scale in a step."""
        sums = 0 if sizes.is_float4 else 2 * self.step_scales(sizes)
        return self.slice_steps(sizes) * (self.step // 8 + sums) * sizes.fragments

    def registers(self, sizes: PackedSizes) -> int:
        """Registers of a thread, about (nvcc 13.0)."""
        row_tiles = self.rows // TILE_ROWS
        accumulators = row_tiles * sizes.fragments * 4
        scales = 8 + row_tiles * 2 * -(-self.step_scales(sizes) // 4) if sizes.is_float4 else 0
        # One row of 8192 with tiles of 32 rows: nvcc spilled at 128 where lanes copy, and gave 120 to bulk copies.
        addresses = 8 * (row_tiles > 1 and not self.bulk)
        return 40 + self.held_registers(sizes) + 2 * accumulators + scales + 8 * (self.step > 2 * TILE_K) + addresses

    def stage_bytes(self, sizes: PackedSizes) -> int:
        """Bytes of a step: weights, scales, zero points."""
        return self.rows * (self.step // TILE_K * ROW_BYTES + self.step_scales(sizes) * sizes.factor_bytes)

    def ring_bytes(self, sizes: PackedSizes) -> int:
        """Bytes of a warp's stages."""
        return self.stages * self.stage_bytes(sizes)

    def activation_bytes(self, sizes: PackedSizes) -> int:
        """Bytes of a warp's activations, which come to its last stages before it has them in registers."""
        return sizes.m * (self.slice_steps(sizes) * self.step * 2 + PADDING_BYTES)

    def free_stages(self, sizes: PackedSizes) -> int:
        """Stages whose copies start before activations have left shared memory."""
        return min(self.stages - 1, (self.ring_bytes(sizes) - self.activation_bytes(sizes)) // self.stage_bytes(sizes))

    def first_stages(self, sizes: PackedSizes) -> int:
        """Stages whose copies start before those of the activations: half as many bytes."""
        return min(self.free_stages(sizes), self.activation_bytes(sizes) // (2 * self.stage_bytes(sizes)))

    @property
    def adds_at_end(self) -> bool:
        """Whether the partial results of all of a thread block's tiles wait for its end."""
        return self.held == self.tiles

    @property
    def parts(self) -> int:
        """Partial results of each result that are left to add up at the end."""
        return self.warps if self.adds_at_end else 1

    @property
    def summed_tiles(self) -> int:
        """Tiles that sums have room for: whole rounds of those that are held."""
        return -(-self.tiles // self.held) * self.held

    def tile_bytes(self, sizes: PackedSizes) -> int:
        """Bytes of a tile's results, or of those that one warp has of them."""
        return sizes.m * (self.rows + PARTIAL_PADDING) * 4

    def sum_bytes(self, sizes: PackedSizes) -> int:
        """Bytes of what is left at the end of a thread block's results."""
        return self.parts * self.summed_tiles * self.tile_bytes(sizes)

    def round_bytes(self, sizes: PackedSizes) -> int:
        """Bytes of the partial results that warps hold, twice: those of one round are added up while the next one's are computed."""
        return 0 if self.adds_at_end else 2 * self.warps * self.held * self.tile_bytes(sizes)

    def barrier_offset(self, sizes: PackedSizes) -> int:
        """Return where in shared memory the barriers of stages begin: behind all else."""
        return self.sum_bytes(sizes) + self.round_bytes(sizes) + self.warps * self.ring_bytes(sizes)

    def smem_bytes(self, sizes: PackedSizes) -> int:
        return self.barrier_offset(sizes) + self.bulk * self.warps * self.stages * BARRIER_BYTES

    def fits(self, sizes: PackedSizes, gpu: Gpu) -> bool:
        """Say whether the parameters are valid for these sizes on a GPU."""
        has_clusters = gpu.compute_capability >= FIRST_CLUSTER_CAPABILITY
        return (
            sizes.m <= MAX_PERSISTENT_ROWS
            and self.rows in TILES
            and self.rows <= sizes.n
            and self.step in STEPS
            and sizes.k % self.step == 0
            and 2 <= self.stages <= MAX_PERSISTENT_STAGES
            and 1 <= self.tiles <= self.row_tiles(sizes)
            and 1 <= self.held <= self.tiles
            and (self.bulk == 0 or (self.bulk == 1 and has_clusters))
            and self.interleave in (0, 1)
            and 0 <= self.prefetch < self.stages
            and (self.cover == 0 or (self.cover == 1 and self.free_stages(sizes) < self.stages - 1))
            and (self.split_k == 1 or (has_clusters and 1 < self.split_k <= MAX_CLUSTER))
            and self.warps * self.split_k <= self.steps(sizes)
            and self.held_registers(sizes) * (self.rows // TILE_ROWS) <= MAX_HELD_REGISTERS
            and self.free_stages(sizes) >= 1
            and self.threads <= gpu.max_threads_per_block
            and self.registers(sizes) <= gpu.max_registers_per_thread
            and self.threads * self.registers(sizes) <= gpu.registers_per_sm
            and self.smem_bytes(sizes) <= gpu.smem_per_block_optin_bytes
            and sizes.n * sizes.k < 2**31
        )
