"""Owns grouped GEMM on mma.sync: persistent thread blocks that find their tiles by the sizes of groups at run time, cp.async, ldmatrix.

Knows nothing of how its parameters are chosen, and recognises a grouped GEMM by its computation, never by its names.

Parameters:
  block_m  rows of a tile, all of one group: a multiple of 16 for each warp along m
  block_n  columns of a tile: a multiple of 16 for each warp along n
  warps_m  warps along m
  warps_n  warps along n
  stages   2 to 8 k-tiles of 32 elements of both operands, 64 of float8, in shared memory at once
  blocks   thread blocks that share an SM

float8 needs an instruction of its own, from compute capability 8.9 on. Sums of a k-tile, which lies within one scale of each row of A and
of 128 columns of B, are scaled in float32.

Shared memory: stages * (block_m + block_n) * 80 bytes, and 16 bytes for each group, 32 with places for each group.

Returns a custom kernel of TIRx, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.matmul_grouped import MmaGroupedParams, mma_takes
from kerneldecl.compiler.matmul_grouped import read_matmul_grouped
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.grouped_gemm_kernel import MmaGroupedKernel, build
from kerneldecl.templates.shared.fast_parse import fast_parsing
from kerneldecl.templates.wgmma_matmul_grouped import sizes_of


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the grouped GEMM as one kernel, or None where mma.sync or these parameters do not take it."""
    chosen, gpu = MmaGroupedParams(**{name: params[name] for name in MmaGroupedParams._fields}), arch.the_gpu  # type: ignore[arg-type]
    spec = read_matmul_grouped(mod) if gpu.async_copy else None
    if spec is None or not mma_takes(sizes := sizes_of(spec), gpu) or not chosen.fits(sizes, gpu):
        return None
    return build(MmaGroupedKernel(spec, sizes, chosen, gpu.sm_count))
