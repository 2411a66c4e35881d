"""Owns the sizes of one GEMM kernel on wgmma: clusters, CTAs, registers and bytes, and which instructions fit them.

Knows nothing of the kernel's statements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import (
    EPILOGUE_BUFFER_BYTES,
    K_TILE_BYTES,
    RESERVED_SMEM_BYTES,
    RESIDENT_OTHER_REGISTERS,
    SM_REGISTERS,
    SM_SMEM_BYTES,
    SYSTEM_SMEM_BYTES,
    WARPGROUP_THREADS,
    epilogue_tile_bytes,
    split_k_share,
)
from kerneldecl.analysis.tensor_cores import K_BYTES, PTX_TYPES, accumulators
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.hopper.accumulators import AccumulatorLayout
from kerneldecl.templates.hopper.epilogue import Epilogue
from kerneldecl.templates.hopper.gather import FlatMemory
from kerneldecl.templates.hopper.k_tile_scales import KTileScales
from kerneldecl.templates.hopper.operands import Operand
from kerneldecl.templates.hopper.pack import Packing
from kerneldecl.templates.hopper.params import SETMAXNREG, SETMAXNREG_VIA_REGISTERS, GemmParams

L2_PREFETCH_BYTES = 32 * 1024
"""Bytes that the CTAs of an SM prefetch to L2 before the preceding kernel has ended. Of 17 GEMMs on an H200 none lost more than 0.5 % by
it, one of 1024 gained 2.5 %; with 128 KB most were slower than with nothing, since loads wait behind prefetches."""
TAIL_K_TILES = 3
"""K-tiles whose MMAs keep the tensor cores busy about as long as gelu takes on half of a tile."""
MAX_REGISTERS = 255
"""Registers that a thread may have (CUDA programming guide)."""
OTHER_REGISTERS = 40
"""Registers of a thread that hold neither accumulators nor auxiliary operands, about."""
FEW_REGISTERS = 96
"""Registers of accumulators and dequantised operands up to which consumers need no more than a thread has anyway, so that two CTAs share an
SM. With 128 of them (256 x 64 tiles) nvcc 13.0 spilled."""
LINE_BLOCKS = 4
"""Blocks of 8 columns that a warp stores together, one row after the other: a line of 128 bytes."""
SHORT_K_TILES = 4
"""K-tiles of a GEMM at most whose tiles take longer to store than to multiply."""
A_FRAGMENT = 4
"""Registers of a thread that hold its part of wgmma's operand A."""
CLUSTERS_LOST = 11
"""Clusters of more than two CTAs of which one finds no room: a cluster lies within one GPC, and those have 16 or 18 SMs (H200)."""
Gate = Callable[[Any, Any], Any]
"""(accumulator of the first half, of the second one) -> the result in the accumulators' dtype."""


class EpiloguePlan(NamedTuple):
    """How a consumer stores the results of its MMA tiles."""

    epilogue: Epilogue
    accum: AccumulatorLayout
    """How it holds what becomes results: accumulators, or those of both halves gated."""
    buffers: int
    """Chunks of results that a consumer has in shared memory; 0 where threads store directly."""
    aux_buffers: int
    """Chunks whose auxiliary operands threads hold; 2 is double buffering."""
    gate: Gate | None = None
    is_short: bool = False
    """Whether a tile has so few k-tiles that storing it takes longer."""

    @property
    def chunks(self) -> int:
        return self.epilogue.chunks(self.accum.count)

    @property
    def chunk_accumulators(self) -> int:
        return self.epilogue.chunk_accumulators

    @property
    def stores_by_tma(self) -> bool:
        return self.epilogue.map is not None and self.buffers > 0

    @property
    def line_groups(self) -> int:
        """Return how many groups of columns of an MMA tile are stored in lines although they do not go through shared memory.

        Those of 32 bits that cannot be stored in pairs: each thread's own would be half of every second sector, and L2 takes a part of a
        sector in no less time than a whole one. In pairs they make whole sectors, one for each row; there lines are stored where hardly
        anything but stores takes time, and no auxiliary operand is loaded as threads hold results.
        """
        is_own = self.epilogue.is_swapped or dtype_bytes(self.epilogue.dtype) != 4 or self.buffers > 0
        is_paired = self.epilogue.in_pairs and not (self.is_short and not self.epilogue.aux_dtypes)
        return 0 if is_own or is_paired else self.accum.per_mma_tile // (4 * LINE_BLOCKS)

    @property
    def streams(self) -> bool:
        """Say whether TMA loads a tile operand to the epilogue buffers, of which each chunk has one."""
        return self.epilogue.is_streaming

    @property
    def streamed_bytes(self) -> int:
        """Return the bytes of a consumer's part of a tile operand's tile."""
        return epilogue_tile_bytes(self.chunks * self.epilogue.chunk_elements)

    @property
    def staging_shape(self) -> tuple[int, int]:
        return self.buffers, self.epilogue.chunk_elements

    def aux_registers(self) -> list[Any]:
        """Return a thread's buffers for the auxiliary operands of chunks; none where it stores directly."""
        held = self.aux_buffers * self.chunk_accumulators
        return [T.alloc_local((held,), dtype) for dtype in self.epilogue.aux_dtypes] if self.buffers > 0 else []


@dataclass(frozen=True)
class GemmKernel:
    """One kernel. A, m and rows are those of wgmma, whichever operand of the problem that is: `swap_ab` exchanges them."""

    func_params: tuple[Any, ...]
    dtype: str
    """Data type of the operands."""
    accum_dtype: str
    a: Operand
    b: Operand
    epilogue: Epilogue
    params: GemmParams
    grid: tuple[int, int, int]
    """Batch, tiles along m, tiles along n."""
    k_tiles: int
    sm_count: int
    packings: tuple[Packing, ...] = ()
    """Copies of operands that a kernel of their own makes before."""
    scales: Operand | None = None
    """Scales of A's rows in a k-tile, with which consumers dequantise A or scale products; None without."""
    zeros: Operand | None = None
    """Zero points of A's rows; None where all are the same."""
    float4_scales: str = ""
    """Dtype as which the scales are passed where A is float4_e2m1fn; empty where it is int4."""
    column_scales: Operand | None = None
    """Scales of B's columns in a k-tile; None without, and where consumers' threads load them."""
    k_tile_scales: KTileScales | None = None
    """By what the products of each k-tile are multiplied before they are added; None where wgmma adds them as they are."""
    early_k_tiles: int = 0
    """K-tiles of B that each CTA prefetches to L2 as it starts; 0 prefetches both operands' once barriers are there, up to a limit."""
    k_parts: int = 1
    """Parts of a k-tile, each of K_TILE_BYTES of a row of B: one, or two where consumers dequantise A."""
    gate: Gate | None = None
    """What is made of two accumulators; None where each becomes a result. B's rows are then those of both halves, 8 and 8 in turns."""

    @property
    def is_pdl_secondary(self) -> bool:
        """Say whether the kernel may start before the preceding one has ended (PDL), and so waits for it itself."""
        return bool(self.params.pdl or self.packings)

    @property
    def prefetched_k_tiles(self) -> int:
        """Return how many k-tiles of its tile a CTA prefetches to L2 before the preceding kernel has ended.

        Where CTAs have one tile each, which begins and ends while DRAM has little to do, and TMA loads both operands as they are.
        """
        if not self.params.pdl or self.params.stream_k > 0 or self.packings or self.via_registers or self.clusters < self.cluster_tiles:
            return 0
        if self.early_k_tiles > 0:
            return min(self.k_tiles_per_cta, self.early_k_tiles)
        cta_bytes = self.a.stage_bytes // self.params.cluster_n + self.b.stage_bytes // self.params.cluster_m
        return min(self.k_tiles_per_cta, self.params.stages, L2_PREFETCH_BYTES // (self.ctas_per_sm * cta_bytes))

    @property
    def accum(self) -> AccumulatorLayout:
        return AccumulatorLayout(self.accum_dtype, self.params.block_n, self.params.mma_tiles)

    @property
    def accumulators_per_result(self) -> int:
        return 2 if self.gate else 1

    @property
    def results(self) -> AccumulatorLayout:
        """Return how a thread holds the results of its accumulators."""
        return replace(self.accum, block_n=self.params.block_n // self.accumulators_per_result)

    @property
    def stage_bytes(self) -> int:
        operands = (self.a, self.b, self.scales, self.zeros, self.column_scales)
        return sum(operand.stage_bytes for operand in operands if operand is not None)

    @property
    def is_quantised(self) -> bool:
        """Say whether consumers dequantise A to registers, a k-tile ahead of the one that is multiplied."""
        return self.a.in_registers and not (self.scales is None and self.k_tile_scales is None)

    @property
    def products(self) -> AccumulatorLayout:
        """Return how a thread holds what wgmma writes: accumulators, or sets of a k-tile's products that are to be scaled."""
        scales = self.k_tile_scales
        return AccumulatorLayout(accumulators("wgmma", self.dtype)[0], self.params.block_n, scales.sets) if scales else self.accum

    @property
    def cluster_grid(self) -> tuple[int, int]:
        """Return how many clusters' tiles there are along m and n."""
        return -(-self.grid[1] // self.params.cluster_m), -(-self.grid[2] // self.params.cluster_n)

    @property
    def cluster_tiles(self) -> int:
        return self.grid[0] * self.cluster_grid[0] * self.cluster_grid[1]

    @property
    def clusters(self) -> int:
        """Return how many clusters are launched: one for each tile with split-K, or for each part of one; else as many as run at once."""
        if self.params.split_k > 1:
            return self.cluster_tiles * (self.params.split_k if self.params.workspace else 1)
        at_once = self.ctas_per_sm * self.sm_count // self.params.cluster_ctas
        if self.params.stream_k == 0 and self.cluster_tiles <= at_once:
            return self.cluster_tiles
        return max(1, at_once - (at_once // CLUSTERS_LOST if self.params.cluster_ctas > 2 else 0))

    @property
    def data_parallel_tiles(self) -> int:
        """Return how many tiles each have one cluster: all of them, or those of the waves before stream-K's."""
        if self.params.stream_k == 0:
            return self.cluster_tiles
        return max(0, self.cluster_tiles // self.clusters - (self.params.stream_k - 1)) * self.clusters

    @property
    def has_stream_k_tiles(self) -> bool:
        """Say whether there are waves for stream-K: a last one that is not full, and the one before it where two are asked for."""
        full_waves, rest = divmod(self.cluster_tiles, self.clusters)
        return rest > 0 and full_waves >= self.params.stream_k - 1

    @property
    def stream_k_iterations(self) -> int:
        """Return the k-tiles of all stream-K tiles."""
        return (self.cluster_tiles - self.data_parallel_tiles) * self.k_tiles

    @property
    def cluster_iterations(self) -> int:
        """Return the k-tiles that each cluster has of those; the last one may have fewer, and some none."""
        return -(-self.stream_k_iterations // self.clusters)

    @property
    def ctas_per_sm(self) -> int:
        """Return how many CTAs an SM has at once, as far as shared memory and registers tell; one more only waits."""
        if self.params.consumers > 1:
            return 1
        smem_bytes = self.params.stages * self.stage_bytes + self._epilogue_bytes + RESERVED_SMEM_BYTES
        held = self.accum.registers + (self.products.registers if self.k_tile_scales else 0)
        registers = self.params.threads * (RESIDENT_OTHER_REGISTERS + held)
        return max(1, min(SM_SMEM_BYTES // (smem_bytes + SYSTEM_SMEM_BYTES), SM_REGISTERS // registers))

    @property
    def via_registers(self) -> bool:
        """Say whether threads load an operand through registers."""
        return self.a.via_registers or self.b.via_registers

    @property
    def maxnreg(self) -> tuple[int, int]:
        """Return the registers of a producer thread and of a consumer thread; 0 leaves them as they are."""
        if self.is_quantised and not self.k_tile_scales and self.accum.registers + self.a_fragments <= FEW_REGISTERS:
            return 0, 0
        return (SETMAXNREG_VIA_REGISTERS if self.via_registers else SETMAXNREG)[self.params.consumers]

    @property
    def tma_bytes(self) -> int:
        """Return the bytes of a stage that TMA loads."""
        return sum(operand.stage_bytes for operand in (self.a, self.b) if not operand.via_registers)

    @property
    def full_arrivals(self) -> int:
        """Return how many threads arrive at a stage's barrier when they have filled it."""
        return (WARPGROUP_THREADS if self.via_registers else 0) + int(self.tma_bytes > 0)

    def flat_memory(self) -> list[Any]:
        """Return the memory of each operand that is loaded through registers as one row; within the kernel alone."""
        return [FlatMemory(operand) if operand.via_registers else None for operand in (self.a, self.b)]

    @property
    def a_fragments(self) -> int:
        """Return the registers of a thread that hold A's k-tile, where wgmma takes it from them: two of them where A is dequantised."""
        return (1 + self.is_quantised) * self.params.mma_tiles * K_TILE_BYTES // K_BYTES * A_FRAGMENT

    @property
    def mma_n(self) -> int:
        return self.params.block_n // self.params.n_instructions(self.dtype)

    @property
    def mma(self) -> str:
        kind, accum = PTX_TYPES[self.dtype], PTX_TYPES[self.products.dtype]
        return f"wgmma.mma_async.sync.aligned.m64n{self.mma_n}k{K_BYTES // self.b.item_bytes}.{accum}.{kind}.{kind}"

    @property
    def mma_flags(self) -> tuple[int, ...]:
        """Return wgmma's immediates: no negation, and for 16 bits whether operands are transposed."""
        if self.dtype == "int8":
            return ()
        if not self.dtype.endswith("16"):
            return (1, 1)
        orders = [int(not operand.is_k_last) for operand in (self.a, self.b) if not operand.in_registers]
        return (1, 1, *orders)

    @property
    def k_tiles_per_cta(self) -> int:
        """Return the k-tiles of each CTA with split-K; the last one's may lie beyond k, where there are zeros."""
        return -(-self.k_tiles // self.params.split_k)

    @property
    def registers_per_store(self) -> int:
        """Return how many registers of accumulators split-K stores at once to another CTA: 16 bytes where they make whole ones."""
        return math.gcd(4, self.split_k_share, self.accum.registers)

    @property
    def split_k_share(self) -> int:
        """Return how many of a thread's registers of accumulators each CTA reduces with split-K; the last CTAs may have fewer."""
        return split_k_share(self.accum.registers, self.params.split_k)

    def has_register(self, register: Any) -> Any:
        """Say whether a register that lies in some CTA's share is one of a thread's accumulators."""
        return True if self.split_k_share * self.params.split_k == self.accum.registers else register < self.accum.registers

    def share_store(self, instruction: str) -> str:
        """Return the instruction by which split-K stores accumulators to shared memory, another CTA's or its own."""
        vector = f".v{self.registers_per_store}" if self.registers_per_store > 1 else ""
        return f"{instruction}{vector}.{self.accum.ptx_type}"

    @property
    def split_k_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of the shared memory to which the CTAs of a cluster send accumulators: sender, store, thread, register."""
        stores = self.split_k_share // self.registers_per_store
        return self.params.split_k, stores, self.params.consumers_per_tile * WARPGROUP_THREADS, self.registers_per_store

    @property
    def reduces_in_stages(self) -> bool:
        """Say whether the CTAs of a cluster send accumulators to where each other's stages were, once all of them have multiplied."""
        return self.params.reduces_in_stages(self.accum_dtype, self.stage_bytes)

    @property
    def sends_partials(self) -> bool:
        """Say whether the CTAs of a cluster share k, so that they send each other accumulators."""
        return self.params.split_k > 1 and not self.params.workspace

    @property
    def streams_tile_operand(self) -> bool:
        """Say whether TMA loads a residual's tiles while k-tiles are multiplied: where a whole tile has room in shared memory."""
        return self.epilogue.tile_operand is not None and self.params.holds_whole_tiles(self.stage_bytes, self.accum_dtype)

    @property
    def _epilogue_bytes(self) -> int:
        """Return the shared memory of the epilogue buffers of one consumer."""
        if self.streams_tile_operand:
            return epilogue_tile_bytes(self.results.count * WARPGROUP_THREADS)
        return self.epilogue_buffers * EPILOGUE_BUFFER_BYTES

    @property
    def epilogue_buffers(self) -> int:
        """Return how many chunks of results each consumer has in shared memory."""
        if not self.epilogue.via_smem or self.params.split_k > 1:
            return 0
        if self.streams_tile_operand:
            return self.epilogue.chunks(self.results.count)
        return self.params.epilogue_buffers(self.epilogue.chunks(self.results.count), self.stage_bytes, self.accum_dtype)

    @property
    def epilogue_plan(self) -> EpiloguePlan:
        """Return how consumers store results: auxiliary operands are double-buffered where registers allow, so that nobody waits."""
        epilogue = self.epilogue.streaming() if self.streams_tile_operand else self.epilogue
        held = epilogue.aux_registers(epilogue.chunk_accumulators)
        most = SETMAXNREG[self.params.consumers][1] or MAX_REGISTERS
        is_double = held and self.accum.registers + 2 * held + OTHER_REGISTERS <= most and self.epilogue_buffers > 0
        is_short = self.k_tiles <= SHORT_K_TILES
        return EpiloguePlan(epilogue, self.results, self.epilogue_buffers, 2 if is_double else 1, gate=self.gate, is_short=is_short)

    @property
    def can_store(self) -> bool:
        """Say whether results that go through shared memory have room there, if only that of split-K."""
        return self.epilogue_buffers > 0 or not self.epilogue.via_smem or self.params.split_k > 1

    @property
    def tail_k_tiles(self) -> int:
        """Return how many last k-tiles are multiplied for one MMA tile after the other.

        The first one's epilogue then overlaps the second one's MMAs, which pays where the epilogue takes long. Halves of an MMA tile's
        columns do not do: nvcc keeps accumulators of each shape of wgmma in registers of their own, which takes twice as many.
        """
        params = self.params
        is_divided = params.is_pingpong or params.split_k > 1 or params.stream_k > 0
        is_short = self.k_tiles < 2 * params.stages
        if (
            params.mma_tiles < 2
            or is_divided
            or self.a.in_registers
            or self.k_tile_scales is not None
            or not self.epilogue_buffers
            or is_short
            or not (self.epilogue.has_calls or self.gate)
        ):
            return 0
        return min(TAIL_K_TILES, params.stages - 1)
