"""Owns cumulative sums of long rows on GPUs in one pass: thread blocks scan tiles, and wait for the sums of all tiles before.

Knows nothing of how its parameters are chosen, and recognises a cumulative sum by its computation, never by its names.

Parameters:
  threads  threads of a block, whole warps
  unroll   vectors of a thread: 1 to 8; all threads' are a tile

Returns TIRx kernels, a PrimFunc without a trace. Sums have one order.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.scan import GpuScanOnceParams
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.compiler.scan import read_scan
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.cuda_kernels import CudaFunction, CudaKernel, build
from kerneldecl.templates.gpu.scan_once_source import CLEAR_THREADS, SMEM_SUMS, scan_once_source
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the sum as one function of two kernels, the first of which clears words, or None where these do not take it."""
    chosen = GpuScanOnceParams(**{name: params[name] for name in GpuScanOnceParams._fields})  # type: ignore[arg-type]
    spec = read_scan(mod)
    if spec is None or not chosen.fits(spec.sizes, arch.the_gpu):
        return None
    tiles, words = spec.sizes.outer * chosen.tiles(spec.sizes), chosen.words(spec.sizes)
    return build(
        CudaFunction(
            arguments=(("X", spec.shape, spec.dtype), ("Y", spec.shape, spec.dtype)),
            workspaces={"found": (words, "uint64")},
            text=scan_once_source(spec, chosen),
            kernels=[
                CudaKernel("clear", ("found",), -(-words // CLEAR_THREADS), CLEAR_THREADS),
                CudaKernel("scan_once", ("X", "Y", "found"), tiles, chosen.threads, (spec.accum, SMEM_SUMS), chosen.ctas_per_sm),
            ],
            pdl=supports_pdl(arch.the_gpu),
        )
    )
