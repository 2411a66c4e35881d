"""Owns the parameters of a GEMM kernel on wgmma as read, what follows from them alone, and which do not fit.

Knows nothing of TVM, memory layouts or how parameters are chosen.
"""

from __future__ import annotations

from collections.abc import Mapping

from kerneldecl.analysis.hopper_limits import (
    MAX_ACCUM_REGISTERS,
    MAX_BLOCK_N,
    MAX_CTA_SMEM_BYTES,
    MAX_MULTICAST_CLUSTER,
    MAX_SPLIT_K,
    MAX_STAGES,
    MAX_WORKSPACE_SPLIT_K,
    MIN_STAGES,
    MMA_TILE_ROWS,
    RESERVED_SMEM_BYTES,
    WARPGROUP_THREADS,
    epilogue_tile_bytes,
    fitting_epilogue_buffers,
    split_k_share,
)
from kerneldecl.analysis.params import CONV_ALONE, WgmmaParams
from kerneldecl.analysis.tensor_cores import accumulators_per_register, wgmma_instructions
from kerneldecl.model import Value

SETMAXNREG = {1: (0, 0), 2: (40, 232), 3: (32, 160), 4: (24, 112)}
"""Registers of a producer thread and of a consumer thread (setmaxnreg, multiples of 8) by the number of consumer warpgroups: 64 K are for
the whole SM; 0 leaves them as they are."""
SETMAXNREG_VIA_REGISTERS = {1: (0, 0), 2: (104, 200), 3: (80, 144), 4: (64, 104)}
"""The same, where producer threads load operands through registers."""


class GemmParams(WgmmaParams):
    """The parameters of wgmma_matmul or wgmma_conv2d, as read."""

    __slots__ = ()

    @classmethod
    def of(cls, params: Mapping[str, Value]) -> GemmParams:
        """Return a candidate's parameters; raise KeyError where one is missing that both templates have."""
        absent = {"stream_k", "workspace"} - {*params}
        names = (name for name in cls._fields if name not in {"pack", *CONV_ALONE, *absent})
        return cls(**{name: params[name] for name in names})  # type: ignore[arg-type]

    @property
    def stagger_k_tiles(self) -> int:
        """Return the k-tiles by which the second of staggered consumers begins a tile later; half of the stages are loaded ahead then."""
        return max(1, self.stages // 2 - 1)

    @property
    def cluster_ctas(self) -> int:
        return self.cluster_m * self.cluster_n * (1 if self.workspace else self.split_k)

    @property
    def a_multicast_mask(self) -> int:
        """Return the CTAs of a cluster's first row as bits: they share a tile of A. Ranks go along m first."""
        return sum(1 << self.cluster_m * n for n in range(self.cluster_n))

    @property
    def b_multicast_mask(self) -> int:
        """Return the CTAs of a cluster's first column as bits: they share a tile of B."""
        return (1 << self.cluster_m) - 1

    @property
    def consumers_per_tile(self) -> int:
        return 1 if self.is_pingpong else self.consumers

    @property
    def mma_tiles(self) -> int:
        """Return how many 64-row MMA tiles a consumer's part of a tile has."""
        return self.block_m // (MMA_TILE_ROWS * self.consumers_per_tile)

    @property
    def accumulators(self) -> int:
        """Return how many accumulators a thread holds."""
        return self.mma_tiles * self.block_n // 2

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP_THREADS

    @property
    def allows_stream_k(self) -> bool:
        """Say whether CTAs can take parts of tiles: consumers share each k-tile, an SM has one CTA, and flags are cleared before."""
        return self.kernel_schedule == "cooperative" and self.split_k == 1 and self.consumers > 1 and self.pdl == 1

    def split_k_smem_bytes(self, accum_dtype: str) -> int:
        """Return the shared memory through which split-K reduces accumulators."""
        share = split_k_share(self.accumulators // accumulators_per_register(accum_dtype), self.split_k)
        return self.consumers_per_tile * WARPGROUP_THREADS * self.split_k * share * 4 if self.split_k > 1 and not self.workspace else 0

    def n_instructions(self, dtype: str) -> int:
        """Return how many wgmmas side by side multiply a tile's columns."""
        return wgmma_instructions(dtype, self.block_n)

    def fits(self, dtype: str, accum_dtype: str, k_tiles: int, stage_bytes: int) -> bool:
        """Say whether a kernel with these parameters can be built, for so many k-tiles, each of so many bytes of both operands."""
        return (
            self._are_in_range()
            and self._tile_fits(dtype, accum_dtype)
            and self._schedule_fits(k_tiles)
            and self._split_fits(accum_dtype, k_tiles)
            and self._smem_fits(accum_dtype, stage_bytes)
        )

    def reduces_in_stages(self, accum_dtype: str, stage_bytes: int) -> bool:
        """Say whether split-K reduces accumulators where stages were, since there is no room beside them."""
        reduced = self.split_k_smem_bytes(accum_dtype)
        return reduced > 0 and self.stages * stage_bytes + reduced + RESERVED_SMEM_BYTES > MAX_CTA_SMEM_BYTES

    def _smem_fits(self, accum_dtype: str, stage_bytes: int) -> bool:
        stages, reduced = self.stages * stage_bytes, self.split_k_smem_bytes(accum_dtype)
        used = max(stages, reduced) if self.reduces_in_stages(accum_dtype, stage_bytes) else stages + reduced
        return used + RESERVED_SMEM_BYTES <= MAX_CTA_SMEM_BYTES

    def _are_in_range(self) -> bool:
        return (
            self.consumers in SETMAXNREG
            and MIN_STAGES <= self.stages <= MAX_STAGES
            and self.cluster_m in (1, 2, 4)
            and self.cluster_n in (1, 2, 4)
            and self.cluster_m * self.cluster_n <= MAX_MULTICAST_CLUSTER
            and 1 <= self.split_k <= (MAX_WORKSPACE_SPLIT_K if self.workspace else MAX_SPLIT_K)
            and self.kernel_schedule in ("cooperative", "staggered", "pingpong")
            and {self.swap_ab, self.pdl, self.workspace} <= {0, 1}
            and self.stream_k in (0, 1, 2)
            and self.workspace <= self.split_k - 1
            and self.raster_group >= 1
        )

    def _tile_fits(self, dtype: str, accum_dtype: str) -> bool:
        """Say whether wgmma multiplies a tile of this shape, and threads have registers for its accumulators."""
        return (
            self.block_n <= MAX_BLOCK_N
            and self.n_instructions(dtype) > 0
            and self.block_m % (MMA_TILE_ROWS * self.consumers_per_tile) == 0
            and self.mma_tiles in (1, 2)
            and self.accumulators // accumulators_per_register(accum_dtype) <= MAX_ACCUM_REGISTERS[self.consumers]
        )

    def _schedule_fits(self, k_tiles: int) -> bool:
        if self.kernel_schedule != "cooperative" and (self.consumers != 2 or self.split_k > 1):
            return False
        # Within a tile the first of staggered consumers signals the second when to begin, and is never two tiles ahead.
        return not self.is_staggered or k_tiles >= self.stages

    def _split_fits(self, accum_dtype: str, k_tiles: int) -> bool:
        """Say whether stream-K or split-K, where asked for, can divide the work."""
        per_register = accumulators_per_register(accum_dtype)
        if self.stream_k > 0 and (not self.allows_stream_k or per_register > 1):
            return False
        # Parts that meet in global memory may share operands with those of other tiles, in clusters that have one part each.
        is_one = self.workspace == 1 or self.cluster_m * self.cluster_n == 1
        return self.split_k == 1 or (is_one and k_tiles >= self.split_k)

    def epilogue_buffers(self, chunks: int, stage_bytes: int, accum_dtype: str) -> int:
        """Return how many epilogue buffers each consumer has beside the stages; its chunks of results take turns in them."""
        return fitting_epilogue_buffers(chunks, self.consumers, self._free_smem_bytes(stage_bytes, accum_dtype))

    def holds_whole_tiles(self, stage_bytes: int, accum_dtype: str) -> bool:
        """Say whether all results of 16 bits of each consumer have room beside the stages, so that a residual's tile has, too."""
        if self.split_k > 1 or self.stream_k > 0:
            return False
        tile_bytes = epilogue_tile_bytes(self.accumulators * WARPGROUP_THREADS)
        return self.consumers * tile_bytes <= self._free_smem_bytes(stage_bytes, accum_dtype)

    def _free_smem_bytes(self, stage_bytes: int, accum_dtype: str) -> int:
        return MAX_CTA_SMEM_BYTES - RESERVED_SMEM_BYTES - self.split_k_smem_bytes(accum_dtype) - self.stages * stage_bytes
