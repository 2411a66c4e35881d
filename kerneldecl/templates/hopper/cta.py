"""Owns what all warps of a GEMM kernel's CTA know: its shared memory and barriers, which warp of which CTA this is, where its tiles are.

Knows nothing of the kernel's statements.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import WARPGROUP_THREADS
from kerneldecl.templates.hopper.consumer import CtaRank
from kerneldecl.templates.hopper.kernel_config import GemmKernel
from kerneldecl.templates.hopper.tile_scheduler import TileScheduler
from kerneldecl.templates.hopper.tma import TmaLoader


class Smem(NamedTuple):
    """Shared memory of a CTA, and its barriers."""

    a: Any
    b: Any
    scales: Any
    """Scales of A's rows, and zero points; None without."""
    zeros: Any
    staging: Any
    """Buffers of each consumer for chunks of results; None where threads store directly."""
    partials: Any
    """Buffer in which split-K receives accumulators; None without it."""
    full: Any
    empty: Any
    order: Any
    """Barrier of two consumers that multiply one after the other."""
    tile_operand: Any
    """Barriers of the consumers for tiles of a residual; None where TMA loads none."""
    received: Any = None
    """Barrier of the bytes that other CTAs send with split-K in a cluster; None elsewhere."""
    column_scales: Any = None
    """Scales of B's columns; None without."""


class Ids(NamedTuple):
    """Which warp of which CTA this is."""

    rank: Any
    """Rank of the CTA in its cluster."""
    block: Any
    warpgroup: Any
    warp: Any
    lane: Any


class Cta(NamedTuple):
    """What all warps of a CTA know, while the kernel's script is read."""

    kernel: GemmKernel
    maps: tuple[Any, Any, Any, Any, Any, Any, Any, Any]
    """Tensor maps of A, B, the result, the tile operand, scales, zero points or scales of B's columns, last rows of A and B; the last five
    where TMA loads such."""
    smem: Smem
    ids: Ids
    consumer: Any
    """Index of the consumer warpgroup."""

    @property
    def block(self) -> Any:
        return self.ids.block

    @property
    def lanes(self) -> tuple[Any, Any]:
        """Return the warp of the warpgroup, and the lane."""
        return self.ids.warp, self.ids.lane

    @property
    def rank(self) -> CtaRank:
        params, rank = self.kernel.params, self.ids.rank
        if self.kernel.sends_partials:
            return CtaRank(m=0, n=0, split=rank)
        m = 0 if params.cluster_m == 1 else rank % params.cluster_m
        n = 0 if params.cluster_n == 1 else rank // params.cluster_m
        return CtaRank(m=m, n=n, split=self._cluster % params.split_k if params.workspace else 0)

    @property
    def _cluster(self) -> Any:
        ctas = self.kernel.params.cluster_ctas
        return self.block if ctas == 1 else self.block // ctas

    @property
    def first(self) -> Any:
        """Return the first of the tiles that its cluster takes."""
        return self._cluster // self.kernel.params.split_k if self.kernel.params.workspace else self._cluster

    @property
    def first_of_all(self) -> Any:
        """Return the first of its tiles, counted among those of all CTAs."""
        ctas = self.kernel.params.cluster_ctas
        return self.first if ctas == 1 else self.first * ctas + self.ids.rank

    @property
    def thread(self) -> Any:
        return self.lanes[0] * 32 + self.lanes[1]

    def consumer_thread(self, consumer: Any) -> Any:
        """Return the thread's index among those of all consumers."""
        return consumer * WARPGROUP_THREADS + self.lanes[0] * 32 + self.lanes[1]

    def tile_origin(self, scheduler: TileScheduler) -> tuple[Any, Any]:
        """Return the first row and column of the CTA's tile."""
        params = self.kernel.params
        row = (scheduler.row * params.cluster_m + self.rank.m) * params.block_m
        return row, (scheduler.column * params.cluster_n + self.rank.n) * params.block_n

    def result_column(self, column: Any) -> Any:
        """Return the result's column for one of B's rows with which a tile begins."""
        return column if self.kernel.gate is None else column // self.kernel.accumulators_per_result

    def tile_start(self, scheduler: TileScheduler) -> tuple[Any, Any, Any]:
        """Return the first row and column of the tile, and the k-tile from which on this CTA loads it."""
        return (*self.tile_origin(scheduler), self.first_k_tile(scheduler))

    def first_k_tile(self, scheduler: TileScheduler) -> Any:
        return self.rank.split * self.kernel.k_tiles_per_cta if self.kernel.params.split_k > 1 else scheduler.first_k_tile()

    def factor_loaders(self) -> tuple[TmaLoader | None, TmaLoader | None, TmaLoader | None]:
        """Return how TMA loads scales and zero points of A's rows, and scales of B's columns; None where there are none."""
        scales, zeros, column_scales = self.kernel.scales, self.kernel.zeros, self.kernel.column_scales
        return (
            None if scales is None else TmaLoader(scales, self.maps[4], self.smem.scales, 0),
            None if zeros is None else TmaLoader(zeros, self.maps[5], self.smem.zeros, 0),
            None if column_scales is None else TmaLoader(column_scales, self.maps[5], self.smem.column_scales, 0),
        )

    def loaders(self) -> tuple[TmaLoader, TmaLoader]:
        """Return how TMA loads A and B: CTAs along n share A, those along m share B."""
        params, (rank_m, rank_n, _) = self.kernel.params, self.rank
        a_mask = T.cast(T.shift_left(params.a_multicast_mask, rank_m), "uint16") if params.cluster_n > 1 else None
        b_mask = T.cast(T.shift_left(params.b_multicast_mask, rank_n * params.cluster_m), "uint16") if params.cluster_m > 1 else None
        return (
            TmaLoader(self.kernel.a, self.maps[0], self.smem.a, rank_n, a_mask, self.maps[6]),
            TmaLoader(self.kernel.b, self.maps[1], self.smem.b, rank_m, b_mask, self.maps[7]),
        )

    def loaded_bytes(self, row: Any, column: Any) -> Any:
        """Return the bytes that TMA loads to a stage of a tile that begins at a row of A and one of B."""
        a, b = self.loaders()
        factors = () if self.kernel.via_registers else self.factor_loaders()
        fixed = sum(factor.operand.stage_bytes for factor in factors if factor is not None)
        loaded = [loader.loaded_bytes(place) for loader, place in ((a, row), (b, column)) if not loader.operand.via_registers]
        return sum(loaded, fixed)
