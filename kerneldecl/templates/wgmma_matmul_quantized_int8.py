"""Owns the GEMM kernel of packed int4 weights and int8 activations on wgmma: consumers unpack weights to bytes in registers, operand A.

Knows nothing of how its parameters are chosen, and recognises the computation by its structure: weights are those of rule
`matmul_quantized` with layout `packed`, without zero points, with one scale for each group of 128 or a multiple along k, or for a whole
row; activations are int8 with a scale for each token, or for each 128 elements of one. Products of a k-tile are exact in int32.

The operands are exchanged: the GEMM's n are rows of tiles, its m columns.

Parameters, as of `wgmma_matmul`:
  block_m       rows of a tile: 64 or 128 for each consumer
  block_n       columns of a tile: 8, 24 or a multiple of 16 up to 224
  consumers     1 to 3 consumer warpgroups of 128 threads
  stages        2 to 12 k-tiles of both operands in shared memory at once; a k-tile has 128 elements along k
  partials      sets of products of 64 rows and a k-tile, before they are scaled: 1, or 2 with 64 rows for each consumer
  cluster_m     1, 2 or 4: CTAs of a cluster along n of the GEMM, which share activations by TMA multicast
  raster_group  rows of tiles that are scheduled before the next column
  split_k       1 to 8 CTAs of a cluster among which k is split
  workspace     1 has up to 64 CTAs of different clusters share k
  pdl           1 launches with PDL

Accumulators and products take block_n / 2 registers of a thread for 64 rows and each set, unpacked weights 16 for 64 rows and each set: at
most 192, or 128 with three consumers.

Shared memory: stages * (block_m * (64 + 4) + block_n * 128) bytes, and 4 * block_n more, in whole 128, where activations have groups;
epilogue buffers and reductions as in `wgmma_matmul`.

Returns a custom kernel of TIRx, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.block_scales import BLOCK, MAX_SCALED_REGISTERS, scaled_registers, unpacked_registers
from kerneldecl.analysis.packed_weights import TILE_K
from kerneldecl.compiler.intrinsics import int4_bytes
from kerneldecl.model import Arch, Value
from kerneldecl.templates.hopper.epilogue import gemm_epilogue
from kerneldecl.templates.hopper.gemm_kernel import build
from kerneldecl.templates.hopper.k_tile_scales import KTileScales, scale_tiles
from kerneldecl.templates.hopper.kernel_config import GemmKernel
from kerneldecl.templates.hopper.operands import operand_of
from kerneldecl.templates.hopper.packed_operand import packed_operand
from kerneldecl.templates.hopper.params import GemmParams
from kerneldecl.templates.hopper.read_packed_int8 import PackedInt8Gemm, read_packed_int8
from kerneldecl.templates.shared.fast_parse import fast_parsing
from kerneldecl.templates.wgmma_matmul import has_wgmma

FIXED: dict[str, Value] = {"cluster_n": 1, "kernel_schedule": "cooperative", "swap_ab": 1, "stream_k": 0, "pack": 0}
"""Parameters of `wgmma_matmul` that this template has one value of."""
MAX_PARTIALS = {1: 2, 2: 1}
"""Sets of products at most, by the MMA tiles of a consumer."""


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the GEMM with its epilogue as one custom kernel, or None where wgmma or these parameters do not take it."""
    problem = read_packed_int8(mod) if has_wgmma(arch) else None
    if problem is None:
        return None
    kernel = kernel_of(problem, GemmParams.of({**FIXED, **params}), int(str(params["partials"])), arch)
    return None if kernel is None else build(kernel)


def kernel_of(problem: PackedInt8Gemm, params: GemmParams, partials: int, arch: Arch) -> GemmKernel | None:
    """Return the kernel of these parameters, None where the activations or the parameters do not allow it."""
    gemm, weights = problem.gemm, problem.weights
    _, m, n, k = gemm.extents
    a, b = packed_operand(weights, params.block_m, BLOCK // TILE_K), operand_of(gemm.a, params.block_n, params.cluster_m)
    if b is None or b.via_registers or not 1 <= partials <= MAX_PARTIALS.get(params.mma_tiles, 0):
        return None
    held = scaled_registers(params.accumulators, params.mma_tiles, partials) + unpacked_registers(params.mma_tiles, partials)
    if held > MAX_SCALED_REGISTERS.get(params.consumers, 0):
        return None
    has_groups = len(problem.a_scales.shape) > 1
    row_scales = scale_tiles(weights.scales, params.block_m, weights.group) if len(weights.scales.shape) > 1 else None
    column_scales = scale_tiles(problem.a_scales, params.block_n, BLOCK) if has_groups else None
    stage_bytes = sum(operand.stage_bytes for operand in (a, b, row_scales, column_scales) if operand)
    if not params.fits("int8", "float32", k // BLOCK, stage_bytes):
        return None
    kernel = GemmKernel(
        func_params=gemm.func_params,
        dtype="int8",
        accum_dtype="float32",
        a=a,
        b=b,
        epilogue=gemm_epilogue(gemm, (params.block_m, params.block_n), is_swapped=True),
        params=params,
        grid=(1, -(-n // params.block_m), -(-m // params.block_n)),
        k_tiles=k // BLOCK,
        sm_count=arch.the_gpu.sm_count,
        scales=row_scales,
        column_scales=column_scales,
        k_tile_scales=KTileScales(weights.scales, problem.a_scales, BLOCK if has_groups else 0, partials, int4_bytes.UNITS),
    )
    return kernel if kernel.can_store else None
