"""Owns GEMM of few rows with packed 4-bit weights on mma.sync: its sizes, the parameters of its kernels, and what follows from both.

Knows nothing of TVM or of which parameters are fast. A step is the elements along k that a warp copies and multiplies at once.
"""

from __future__ import annotations

from typing import NamedTuple

from kerneldecl.analysis.contraction import contraction_of
from kerneldecl.analysis.gpu_limits import FIRST_CLUSTER_CAPABILITY, MAX_CLUSTER, VECTOR_BYTES, WARP_LANES
from kerneldecl.analysis.packed_weights import FLOAT4_GROUPS, ROW_BYTES, TILE_K, TILE_ROWS, groups_of, packed_shape
from kerneldecl.model import Candidate, Gpu, IterSpace, dtype_bytes

MAX_ROWS = 64
"""Rows of activations at most: a warp multiplies each fragment of weights by all of them."""
COLUMNS = 8
"""Columns of mma.m16n8k16, which are rows of activations."""
FIRST_CAPABILITY = (8, 0)
"""Compute capability of the first GPUs with cp.async and mma.m16n8k16 of both dtypes."""
MAX_STAGES = 12
STREAMS = (0, 1, 2, 3)
BY_STEPS, BY_ROUNDS, KEPT = 1, 2, 3
"""Values of `stream`."""
BARRIER_BYTES = 8
WARP_ROWS = (16, 32, 64)
"""Rows of weights of a warp."""
MAX_SUMS = 32
"""Sums of a group that a thread keeps beside its accumulators at most; with more, weights are scaled instead."""
MAX_ACCUMULATORS = 64
PADDING_BYTES = 16
"""Bytes between rows of activations in shared memory, so that ldmatrix reads eight of them from different banks."""
PARTIAL_PADDING = 4
"""Floats between columns of partial results, so that a warp stores them to different banks."""


class PackedSizes(NamedTuple):
    """Sizes of a GEMM with packed weights."""

    m: int
    n: int
    k: int
    group: int
    """Weights along k that share a scale."""
    scale_dtype: str
    has_zeros: bool

    @property
    def is_float4(self) -> bool:
        return self.scale_dtype in FLOAT4_GROUPS

    @property
    def scale_bytes(self) -> int:
        return 1 if self.is_float4 else 2

    @property
    def factor_bytes(self) -> int:
        """Bytes of a scale and of its zero point, if it has one."""
        return self.scale_bytes + self.has_zeros

    @property
    def fragments(self) -> int:
        """Fragments of eight rows of activations."""
        return -(-self.m // COLUMNS)

    @property
    def step(self) -> int:
        """Elements along k of a step."""
        return TILE_K if self.k % (2 * TILE_K) else 2 * TILE_K

    @property
    def steps(self) -> int:
        return self.k // self.step

    @property
    def step_scales(self) -> int:
        """Scales of a row in a step."""
        return max(1, self.step // self.group)


def packed_of(space: IterSpace) -> PackedSizes | None:
    """Return the sizes of what looks like a GEMM with packed weights, None where it does not; templates read it in full."""
    gemm = contraction_of(space)
    if isinstance(gemm, str) or gemm.a.dtype not in {"float16", "bfloat16"} or gemm.accum_dtype != "float32":
        return None
    batch, m, n, k = gemm.extents
    first = space.blocks[0]
    values = [access for access in first.reads if access.dtype == "uint8" and len(access.shape) == 4]
    has_dense_rows = gemm.a.is_k_last and gemm.a.vector() * dtype_bytes(gemm.a.dtype) == VECTOR_BYTES
    if batch != 1 or first.is_reduction or [access.shape for access in values] != [packed_shape(n, k)] or not has_dense_rows:
        return None
    factors = [access for access in first.reads if access not in values]
    if any(access.shape[-1] != n for access in factors):
        return None
    groups = {access.shape[0] if len(access.shape) == 2 else 1 for access in factors}
    group = k // min(groups, default=1)
    # Of two factors one is zero points, which are bytes beside scales of 16 bits.
    scale_dtype = max((access.dtype for access in factors), key=dtype_bytes, default="")
    if len(groups) != 1 or group not in groups_of(scale_dtype, k):
        return None
    return PackedSizes(m, n, k, group, scale_dtype, len(factors) == 2)


class PackedParams(NamedTuple):
    """The parameters of `gpu_matmul_packed`."""

    rows: int
    """Rows of weights of a warp."""
    warps_n: int
    """Warps of a thread block along n, which share activations."""
    warps_k: int
    """Warps that share rows of weights, each with steps of its own."""
    stages: int
    """Steps of a warp in shared memory or on their way to it."""
    split_k: int = 1
    """Thread blocks of a cluster among which k is divided."""
    stream: int = 0
    """How activations come: all at once (0), each warp's with each step (1), those of all warps along k with each round of steps (2), or
    each step's once, for all rows of weights (3)."""

    bulk: int = 0
    """Whether one lane copies a warp's weights in bulk; else each lane copies 16 bytes of each tile."""
    prefetch: int = 0
    """Steps of a warp whose weights come to L2 while the preceding kernel ends."""

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_matmul_packed", self._asdict())

    @property
    def block_rows(self) -> int:
        """Rows of weights of a thread block."""
        return self.rows * self.warps_n

    @property
    def threads(self) -> int:
        return self.warps_n * self.warps_k * WARP_LANES

    def row_blocks(self, sizes: PackedSizes) -> int:
        return -(-sizes.n // self.block_rows)

    def block_steps(self, sizes: PackedSizes) -> int:
        """Steps of a thread block; the last one of a cluster may have fewer."""
        return -(-sizes.steps // self.split_k)

    def accumulators(self, sizes: PackedSizes) -> int:
        """Accumulators of a thread."""
        return self.rows // TILE_ROWS * sizes.fragments * 4

    def scales_sums(self, sizes: PackedSizes) -> bool:
        """Say whether sums of a group are multiplied by its scale, in float32, rather than its weights."""
        return self.accumulators(sizes) <= MAX_SUMS

    def registers(self, sizes: PackedSizes) -> int:
        """Registers of a thread, about (nvcc 13.0)."""
        accumulators = self.accumulators(sizes)
        return 64 + accumulators + (accumulators if self.scales_sums(sizes) else 16 * self.rows // TILE_ROWS)

    def stage_bytes(self, sizes: PackedSizes) -> int:
        """Bytes of a warp's step: weights, scales, zero points, and activations that come with it."""
        weights = self.rows * (sizes.step // TILE_K * ROW_BYTES + sizes.step_scales * sizes.factor_bytes)
        return weights + (self.stream == BY_STEPS) * sizes.m * (sizes.step * 2 + PADDING_BYTES)

    def activation_bytes(self, sizes: PackedSizes) -> int:
        """Bytes of a thread block's activations that lie apart from its warps' weights."""
        if self.stream == BY_ROUNDS:
            return self.stages * self.round_bytes(sizes)
        return 0 if self.stream == BY_STEPS else sizes.m * (self.block_steps(sizes) * sizes.step * 2 + PADDING_BYTES)

    def round_bytes(self, sizes: PackedSizes) -> int:
        """Bytes of the activations of a step of each warp along k, where they come in rounds."""
        return self.warps_k * sizes.m * (sizes.step * 2 + PADDING_BYTES) if self.stream == BY_ROUNDS else 0

    def loaded_bytes(self, sizes: PackedSizes) -> int:
        """Bytes that a thread block copies to shared memory."""
        rounds = -(-self.block_steps(sizes) // self.warps_k)
        activations = rounds * self.round_bytes(sizes) if self.stream == BY_ROUNDS else self.activation_bytes(sizes)
        return self.warps_n * self.warps_k * rounds * self.stage_bytes(sizes) + activations

    def partial_bytes(self, sizes: PackedSizes) -> int:
        """Bytes of partial results, which lie where activations and weights were."""
        return self.warps_k * sizes.m * (self.block_rows + PARTIAL_PADDING) * 4

    def barrier_offset(self, sizes: PackedSizes) -> int:
        """Return where in shared memory the barriers of stages begin: behind all else."""
        ring = self.warps_n * self.warps_k * self.stages * self.stage_bytes(sizes)
        return max(self.activation_bytes(sizes) + ring, self.partial_bytes(sizes))

    @property
    def keeps_steps(self) -> bool:
        """Say whether each step of activations comes once and stays in shared memory."""
        return self.stream == KEPT

    def activation_barrier_offset(self, sizes: PackedSizes) -> int:
        """Return where the barriers of steps of activations begin, where these have some: behind those of stages."""
        return self.barrier_offset(sizes) + self.bulk * self.warps_n * self.warps_k * self.stages * BARRIER_BYTES

    def received_barrier_offset(self, sizes: PackedSizes) -> int:
        """Return where the barrier is of what a thread block receives from others of its cluster, and behind it what comes."""
        end = self.activation_barrier_offset(sizes) + self.keeps_steps * self.block_steps(sizes) * BARRIER_BYTES
        return -(-end // VECTOR_BYTES) * VECTOR_BYTES

    def received_offset(self, sizes: PackedSizes) -> int:
        """Return where a thread block receives, from each of its cluster in turn, that one's part of its share of results."""
        return self.received_barrier_offset(sizes) + VECTOR_BYTES

    def results(self, sizes: PackedSizes) -> int:
        """Results of a thread block's, or a cluster's, rows of weights."""
        return sizes.m * self.block_rows

    def share(self, sizes: PackedSizes) -> int:
        """Results of each thread block of a cluster, which adds them up and stores them; the last ones may have fewer."""
        return -(-self.results(sizes) // (4 * self.split_k)) * 4

    def smem_bytes(self, sizes: PackedSizes) -> int:
        if self.split_k > 1:
            return self.received_offset(sizes) + self.split_k * self.share(sizes) * 4
        return self.activation_barrier_offset(sizes) + self.keeps_steps * self.block_steps(sizes) * BARRIER_BYTES

    def fits(self, sizes: PackedSizes, gpu: Gpu) -> bool:
        """Say whether the parameters are valid for these sizes on a GPU."""
        has_clusters = gpu.compute_capability >= FIRST_CLUSTER_CAPABILITY
        return (
            self.rows in WARP_ROWS
            and sizes.m <= MAX_ROWS
            and self.block_rows <= sizes.n
            and (self.bulk == 0 or (self.bulk == 1 and has_clusters))
            and 0 <= self.prefetch < self.stages
            and self.accumulators(sizes) <= MAX_ACCUMULATORS
            and 2 <= self.stages <= MAX_STAGES
            and self.stream in STREAMS
            and (self.stream != BY_STEPS or self.warps_n == 1)
            and (not self.keeps_steps or (self.bulk == 1 and self.block_steps(sizes) <= self.threads))
            and (self.split_k == 1 or (has_clusters and self.split_k <= min(MAX_CLUSTER, sizes.steps)))
            and self.warps_k <= self.block_steps(sizes)
            and (self.split_k - 1) * self.block_steps(sizes) < sizes.steps
            and self.threads <= gpu.max_threads_per_block
            and self.threads * self.registers(sizes) <= gpu.registers_per_sm
            and self.smem_bytes(sizes) <= gpu.smem_per_block_optin_bytes
            and sizes.n * sizes.k < 2**31
            and self.rows * sizes.scale_bytes % VECTOR_BYTES == 0
        )
