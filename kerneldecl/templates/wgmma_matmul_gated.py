"""Owns the gated GEMM on wgmma: both products in one tile, of which the epilogue makes one result each.

Knows nothing of how its parameters are chosen, and recognises a gated GEMM by its computation, never by its names.

TMA loads 8 rows of one half of B and 8 of the other in turns, so that a thread has both accumulators of a result.

Parameters: those of `wgmma_matmul` for a GEMM of 2 n columns, without swap_ab, split_k, workspace and pack
  block_m           rows of a tile
  block_n           columns of a tile, of both products together: a multiple of 16
  consumers         consumer warpgroups
  stages            k-tiles in shared memory at once
  cluster_m         CTAs of a cluster along m, which share tiles of B
  cluster_n         CTAs of a cluster along n, which share tiles of A
  raster_group      rows of tiles in a rasterization group
  kernel_schedule   "cooperative", "staggered" or "pingpong"
  pdl               1 launches with PDL
  stream_k          last waves of tiles that are divided by k-tiles over all SMs

Returns a custom kernel of TIRx, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tvm import IRModule, tirx

from kerneldecl.analysis import contraction as gemms
from kerneldecl.analysis import tensor_cores
from kerneldecl.analysis.hopper_limits import K_TILE_BYTES, MAX_TMA_BOX, SWIZZLE_ROWS, TMA_ALIGN_BYTES
from kerneldecl.compiler.canonical import signature_of
from kerneldecl.compiler.gated_gemm import GATES, GatedGemmSpec, read_gated_gemm
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.hopper.epilogue import gemm_epilogue
from kerneldecl.templates.hopper.gemm_kernel import build
from kerneldecl.templates.hopper.kernel_config import GemmKernel
from kerneldecl.templates.hopper.operands import SWIZZLES, Operand, TensorMap, TmaBoxes, io_dtype, operand_of
from kerneldecl.templates.hopper.params import GemmParams
from kerneldecl.templates.hopper.read_gemm import GemmProblem, Matrix
from kerneldecl.templates.hopper.tails import with_tail
from kerneldecl.templates.shared.fast_math import with_fast_activations
from kerneldecl.templates.shared.fast_parse import fast_parsing
from kerneldecl.templates.wgmma_matmul import has_wgmma

HALVES = 2


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the gated GEMM as one custom kernel, or None where wgmma or these parameters do not take it."""
    spec = read_gated_gemm(mod) if has_wgmma(arch) else None
    if spec is None or spec.accum_dtype not in tensor_cores.accumulators("wgmma", spec.dtype) or dtype_bytes(spec.dtype) != 2:
        return None
    kernel = _kernel_of(mod, spec, GemmParams.of(params), arch)
    return None if kernel is None else build(kernel)


def _kernel_of(mod: IRModule, spec: GatedGemmSpec, params: GemmParams, arch: Arch) -> GemmKernel | None:
    """Return the kernel of these parameters, None where the operands or the parameters do not allow it."""
    contraction = gemms.contraction_of(iter_space(mod))
    is_other = params.swap_ab or params.split_k > 1 or params.workspace or params.block_n % (HALVES * SWIZZLE_ROWS)
    if isinstance(contraction, str) or is_other:
        return None
    buffers = [tirx.decl_buffer(shape, dtype, name) for name, (shape, dtype) in zip("ABC", signature_of(mod["main"]), strict=True)]
    rows = Matrix(buffers[0], spec.dtype, (spec.m, spec.k), (spec.k, 1))
    a = with_tail(operand_of(rows, params.block_m, params.cluster_n, is_a=True), rows, params.block_m)
    b = _both_halves(buffers[1], spec, params)
    k_tiles = -(-spec.k * dtype_bytes(spec.dtype) // K_TILE_BYTES)
    if a is None or a.via_registers or b is None or not params.fits(spec.dtype, spec.accum_dtype, k_tiles, a.stage_bytes + b.stage_bytes):
        return None
    kernel = GemmKernel(
        func_params=tuple(buffers),
        dtype=spec.dtype,
        accum_dtype=spec.accum_dtype,
        a=a,
        b=b,
        epilogue=gemm_epilogue(_results(spec, contraction, buffers), (params.block_m, params.block_n // HALVES), is_swapped=False),
        params=params,
        grid=(1, -(-spec.m // params.block_m), -(-HALVES * spec.n // params.block_n)),
        k_tiles=k_tiles,
        sm_count=arch.the_gpu.sm_count,
        gate=lambda first, second: with_fast_activations(GATES[spec.gate](first), spec.out_dtype) * second,
    )
    if params.stream_k > 0 and not kernel.has_stream_k_tiles:
        return None
    return kernel if kernel.can_store else None


def _results(spec: GatedGemmSpec, contraction: gemms.Contraction, buffers: list[Any]) -> GemmProblem:
    """Return the GEMM of which each column has a result: what epilogues know of it."""
    a, b, out = buffers
    batch, m, _, k = contraction.extents
    return GemmProblem(
        contraction=replace(contraction, extents=(batch, m, spec.n, k)),
        func_params=tuple(buffers),
        a=Matrix(a, spec.dtype, (spec.m, spec.k), (spec.k, 1)),
        b=Matrix(b, spec.dtype, (spec.n, spec.k), (spec.k, 1)),
        out=Matrix(out, spec.out_dtype, (spec.m, spec.n), (spec.n, 1)),
        index_out=lambda _batch, row, column: [row, column],
        value=lambda total, *_: total.astype(spec.out_dtype),
        aux=lambda *_: [],
    )


def _both_halves(buffer: Any, spec: GatedGemmSpec, params: GemmParams) -> Operand | None:
    """Return B with 8 rows of each half in turns, None where TMA does not load them so."""
    item, unit = dtype_bytes(spec.dtype), HALVES * SWIZZLE_ROWS
    groups, rest = divmod(params.block_n // unit, params.cluster_m)
    pitch = spec.k * item
    if rest or not groups or pitch % TMA_ALIGN_BYTES or spec.n % SWIZZLE_ROWS or groups * unit > MAX_TMA_BOX:
        return None
    block_k = K_TILE_BYTES // item
    tensor_map = TensorMap(
        buffer=buffer,
        dtype=io_dtype(spec.dtype),
        dims=(spec.k, SWIZZLE_ROWS, HALVES, spec.n // SWIZZLE_ROWS),
        strides_bytes=(pitch, spec.n * pitch, SWIZZLE_ROWS * pitch),
        box=(block_k, SWIZZLE_ROWS, HALVES, groups),
        swizzle=SWIZZLES[K_TILE_BYTES],
    )

    def coords(_batch: Any, row: Any, k_tile: Any, number: Any) -> tuple[Any, ...]:
        return (k_tile * block_k, 0, 0, row // unit + number * groups)

    boxes = TmaBoxes(tensor_map, 1, lambda number: number * (groups * unit), coords)
    return Operand(io_dtype(spec.dtype), params.block_n, is_k_last=True, tma=boxes)
