"""Owns the GEMM kernel of 8-bit values with scales along k on wgmma: the products of each k-tile are scaled, then added in float32.

Knows nothing of how its parameters are chosen, and recognises the computation by its structure: A has a scale for each 128 elements of a
row, [k / 128, m], or one for a whole row, [m]; B, [n, k], one for each 128 x 128 block, or for each column and a group of k, a multiple of
128 elements, [k / group, n], or for a whole column, [n]. So has rule `matmul_quantized` with `activation_scales` group or token and
`scales` block, group or column, but for token with column, which do not vary along k. Values are float8, whose products are added in
float32, or int8, whose products of a k-tile are exact in int32.

Parameters, as of `wgmma_matmul`:
  block_m       rows of a tile: 64 or 128 for each consumer
  block_n       columns of a tile: a multiple of 8, of int8 8, 24 or one of 16. Where B has blocks, each tile's columns lie in at most two:
                up to 128, or 136, 144, 160, 192
  consumers     1 to 3 consumer warpgroups of 128 threads
  stages        3 to 12 k-tiles of both operands in shared memory at once; a k-tile has 128 elements along k
  partials      sets of partial accumulators of 64 rows and a k-tile, before they are scaled: 1, or 2 with 64 rows for each consumer
  cluster_m     1, 2 or 4: CTAs of a cluster along m, which share tiles of B by TMA multicast
  cluster_n     1, 2 or 4: CTAs of a cluster along n, which share tiles of A; the two make at most 4
  raster_group  rows of tiles that are scheduled before the next column
  split_k       1 to 8 CTAs of a cluster among which k is split
  workspace     1 has up to 64 CTAs of different clusters share k
  pdl           1 launches with PDL
  prefetch      0 (the default) to 12 k-tiles of B, with PDL, that a CTA prefetches to L2 as it starts; with 0 as `wgmma_matmul` does
  l2_fetch      128 (the default) or 256 bytes of B that L2 fetches at once: those of two k-tiles
  kernel_schedule  "cooperative" (the default) or "staggered": the second of two consumers begins each tile some k-tiles later, so that
                one stores results while the other multiplies; without split-K

Accumulators, whole and partial, take block_n / 2 registers of a thread for 64 rows and each set: at most 192, or 128 with three consumers.

Shared memory: stages * ((block_m + block_n) * 128 + 4 * block_m) bytes, and 4 * block_n more, in whole 128, where columns have scales of
their own; epilogue buffers and reductions as in `wgmma_matmul`. With two sets of registers k-tiles are scaled while the consumer's next one
is multiplied, the rest while other consumers multiply.

Returns a custom kernel of TIRx, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tvm import IRModule

from kerneldecl.analysis.block_scales import BLOCK, MAX_COLUMN_BLOCKS, MAX_SCALED_REGISTERS, column_blocks, scaled_registers
from kerneldecl.analysis.hopper_limits import MAX_STAGES
from kerneldecl.model import Arch, Value
from kerneldecl.templates.hopper.epilogue import gemm_epilogue
from kerneldecl.templates.hopper.gemm_kernel import build
from kerneldecl.templates.hopper.k_tile_scales import KTileScales, scale_tiles
from kerneldecl.templates.hopper.kernel_config import GemmKernel
from kerneldecl.templates.hopper.operands import PROMOTIONS, operand_of
from kerneldecl.templates.hopper.params import GemmParams
from kerneldecl.templates.hopper.read_block_scaled import BlockScaledGemm, read_block_scaled
from kerneldecl.templates.shared.fast_parse import fast_parsing
from kerneldecl.templates.wgmma_matmul import has_wgmma

FIXED: dict[str, Value] = {"swap_ab": 0, "stream_k": 0, "pack": 0}
"""Parameters of `wgmma_matmul` that this template has one value of."""
DEFAULTS: dict[str, Value] = {"kernel_schedule": "cooperative", "prefetch": 0, "l2_fetch": 128}
"""Parameters that not every candidate names."""
MAX_PARTIALS = {1: 2, 2: 1}
"""Sets of partial accumulators at most, by the MMA tiles of a consumer."""


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the GEMM with its epilogue as one custom kernel, or None where wgmma or these parameters do not take it."""
    problem = read_block_scaled(mod) if has_wgmma(arch) else None
    if problem is None:
        return None
    given = {**DEFAULTS, **params, **FIXED}
    kernel = kernel_of(problem, GemmParams.of(given), Streaming.of(given), int(str(params["partials"])), arch)
    return None if kernel is None else build(kernel)


class Streaming(NamedTuple):
    """How weights come from DRAM."""

    prefetch: int
    """K-tiles that a CTA prefetches to L2 as it starts."""
    l2_fetch: int
    """Bytes that L2 fetches at once."""

    @classmethod
    def of(cls, params: Mapping[str, Value]) -> Streaming:
        return cls(prefetch=int(str(params["prefetch"])), l2_fetch=int(str(params["l2_fetch"])))

    @property
    def is_known(self) -> bool:
        return 0 <= self.prefetch <= MAX_STAGES and self.l2_fetch in PROMOTIONS


def kernel_of(problem: BlockScaledGemm, params: GemmParams, streaming: Streaming, partials: int, arch: Arch) -> GemmKernel | None:
    """Return the kernel of these parameters, None where the operands or the parameters do not allow it."""
    gemm = problem.gemm
    _, m, n, k = gemm.extents
    a, b = operand_of(gemm.a, params.block_m, params.cluster_n), operand_of(gemm.b, params.block_n, params.cluster_m)
    if a is None or b is None or a.via_registers or b.via_registers:
        return None
    if not streaming.is_known or (streaming.prefetch and not params.pdl) or not _fits_registers(params, partials):
        return None
    scales = KTileScales(problem.a_scales, problem.b_scales, problem.b_group, partials)
    if scales.has_blocks and column_blocks(params.block_n) > MAX_COLUMN_BLOCKS:
        return None
    row_scales = scale_tiles(scales.rows, params.block_m, BLOCK) if scales.has_row_groups else None
    column_scales = scale_tiles(scales.columns, params.block_n, scales.group) if scales.has_column_groups else None
    stage_bytes = sum(operand.stage_bytes for operand in (a, b, row_scales, column_scales) if operand)
    if not params.fits(gemm.a.dtype, "float32", k // BLOCK, stage_bytes):
        return None
    kernel = GemmKernel(
        func_params=gemm.func_params,
        dtype=gemm.a.dtype,
        accum_dtype="float32",
        a=a,
        b=b.promoted(streaming.l2_fetch),
        epilogue=gemm_epilogue(gemm, (params.block_m, params.block_n), is_swapped=False),
        params=params,
        grid=(1, -(-m // params.block_m), -(-n // params.block_n)),
        k_tiles=k // BLOCK,
        sm_count=arch.the_gpu.sm_count,
        scales=row_scales,
        column_scales=column_scales,
        k_tile_scales=scales,
        early_k_tiles=streaming.prefetch,
    )
    return kernel if kernel.can_store else None


def _fits_registers(params: GemmParams, partials: int) -> bool:
    """Say whether threads have registers for sets of partial accumulators."""
    if params.is_pingpong or params.consumers not in MAX_SCALED_REGISTERS or not 1 <= partials <= MAX_PARTIALS.get(params.mma_tiles, 0):
        return False
    return scaled_registers(params.accumulators, params.mma_tiles, partials) <= MAX_SCALED_REGISTERS[params.consumers]
