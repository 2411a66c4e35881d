"""Owns the GEMM kernel with packed 4-bit weights on wgmma: consumers dequantise weights to registers, which are wgmma's operand A.

Knows nothing of how its parameters are chosen, and recognises the computation by its structure: the weights are those of rule
`matmul_quantized` with layout `packed`, of float16 or bfloat16: int4 with one scale for each group of 32 or more weights along k or for a
whole row, or blocks of float4_e2m1fn (MXFP4, NVFP4).

The operands are exchanged: the GEMM's n are rows of tiles, its m columns.

Parameters, as of `wgmma_matmul`:
  block_m       rows of a tile: 64 or 128 for each consumer
  block_n       columns of a tile: a multiple of 8 up to 256
  consumers     1 to 4 consumer warpgroups of 128 threads
  block_k       elements of a k-tile along k: 64 or 128
  stages        2 to 12 k-tiles of both operands in shared memory at once
  cluster_m     1, 2 or 4: CTAs of a cluster along n of the GEMM, which share activations by TMA multicast; 1 with split-K of a cluster
  raster_group  rows of tiles that are scheduled before the next column
  split_k       1 to 8 CTAs of a cluster among which k is split
  workspace     1 has up to 64 CTAs, of different clusters, share k
  pdl           1 launches with PDL

Shared memory: stages * (block_m * (block_k / 2 + 2 * max(1, block_k / group)) + block_n * block_k * 2) bytes, zero points of one byte
beside each scale, epilogue buffers and reductions as in `wgmma_matmul`. A consumer dequantises 64 elements along k to one of two sets of 16
registers for each 64 rows while tensor cores multiply from the other.

Returns a custom kernel of TIRx, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.packed_weights import TILE_K
from kerneldecl.model import Arch, Value
from kerneldecl.templates.hopper.epilogue import gemm_epilogue
from kerneldecl.templates.hopper.gemm_kernel import build
from kerneldecl.templates.hopper.kernel_config import GemmKernel
from kerneldecl.templates.hopper.packed_operand import activations_operand, factors_of, packed_operand
from kerneldecl.templates.hopper.params import GemmParams
from kerneldecl.templates.hopper.read_quantized import QuantizedGemm, read_quantized
from kerneldecl.templates.shared.fast_parse import fast_parsing
from kerneldecl.templates.wgmma_matmul import has_wgmma

FIXED: dict[str, Value] = {"cluster_n": 1, "kernel_schedule": "cooperative", "swap_ab": 1, "stream_k": 0, "pack": 0}
"""Parameters of `wgmma_matmul` that this template has one value of."""


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the GEMM with its epilogue as one custom kernel, or None where wgmma or these parameters do not take it."""
    problem = read_quantized(mod) if has_wgmma(arch) else None
    if problem is None:
        return None
    kernel = kernel_of(problem, GemmParams.of({**FIXED, **params}), int(str(params["block_k"])), arch)
    return None if kernel is None else build(kernel)


def kernel_of(problem: QuantizedGemm, params: GemmParams, block_k: int, arch: Arch) -> GemmKernel | None:
    """Return the kernel of these parameters, None where the activations or the parameters do not allow it."""
    gemm = problem.gemm
    _, m, n, k = gemm.extents
    parts, k_tiles = block_k // TILE_K, k // block_k
    b = activations_operand(gemm.a, params.block_n, params.cluster_m, parts)
    if block_k not in (TILE_K, 2 * TILE_K) or k % block_k or b is None:
        return None
    a = packed_operand(problem.weights, params.block_m, parts)
    scales, zeros = factors_of(problem.weights, params.block_m, parts)
    stage_bytes = sum(operand.aligned_bytes for operand in (a, b, scales, zeros) if operand is not None)
    accum_dtype = gemm.contraction.accum_dtype
    if not params.fits(gemm.a.dtype, accum_dtype, k_tiles, stage_bytes):
        return None
    kernel = GemmKernel(
        func_params=problem.func_params,
        dtype=gemm.a.dtype,
        accum_dtype=accum_dtype,
        a=a,
        b=b,
        epilogue=gemm_epilogue(gemm, (params.block_m, params.block_n), is_swapped=True),
        params=params,
        grid=(1, -(-n // params.block_m), -(-m // params.block_n)),
        k_tiles=k_tiles,
        sm_count=arch.the_gpu.sm_count,
        scales=scales,
        zeros=zeros,
        float4_scales=str(problem.weights.scales.dtype) if problem.weights.is_float4 else "",
        k_parts=parts,
    )
    return kernel if kernel.can_store else None
