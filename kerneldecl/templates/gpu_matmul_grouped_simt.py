"""Owns grouped GEMM on CUDA cores: persistent thread blocks that find their tiles by the sizes of groups at run time, sums in float32.

Knows nothing of how its parameters are chosen, and recognises a grouped GEMM by its computation, never by its names.

Parameters:
  block_m   rows of a tile, all of one group
  block_n   columns of a tile
  thread_m  rows of a thread: a multiple of 4
  thread_n  columns of a thread: a multiple of 4
  blocks    thread blocks that share an SM

Operands are float32, float16 or bfloat16, of any sizes; threads load the next k-tile of 16 elements into registers while they multiply one,
which shared memory holds in float32.

Shared memory: 128 * (block_m + block_n + 8) bytes, and 16 bytes for each group, 32 with places for each group.

Returns a custom kernel of TIRx, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.matmul_grouped_simt import SimtGroupedParams, simt_takes
from kerneldecl.compiler.matmul_grouped import read_matmul_grouped
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.grouped_gemm_simt_kernel import SimtGroupedKernel, build
from kerneldecl.templates.shared.fast_parse import fast_parsing
from kerneldecl.templates.wgmma_matmul_grouped import sizes_of


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the grouped GEMM as one kernel, or None where CUDA cores or these parameters do not take it."""
    chosen, gpu = SimtGroupedParams(**{name: params[name] for name in SimtGroupedParams._fields}), arch.the_gpu  # type: ignore[arg-type]
    spec = read_matmul_grouped(mod)
    if spec is None or not simt_takes(sizes := sizes_of(spec)) or not chosen.fits(sizes, gpu):
        return None
    return build(SimtGroupedKernel(spec, sizes, chosen, gpu.sm_count))
