"""Owns cumulative sums on GPUs along an axis that is not the last, in one pass: thread blocks walk down strips of columns.

Knows nothing of how its parameters are chosen, and recognises a cumulative sum by its computation, never by its names.

Parameters:
  threads  threads of a block, whole warps
  lanes    threads side by side, each with a vector of neighbouring columns: a power of two up to 32; the others are below them
  unroll   rows of a thread in a step, as many of which are loaded for the next one meanwhile

Returns a TIRx kernel, a PrimFunc without a trace. Sums have one order.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.scan import GpuScanColumnsParams
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.compiler.scan import read_scan
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.cuda_kernels import CudaFunction, CudaKernel, build
from kerneldecl.templates.gpu.scan_columns_source import scan_columns_source
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the sum as one kernel, or None where it does not take it."""
    chosen = GpuScanColumnsParams(**{name: params[name] for name in GpuScanColumnsParams._fields})  # type: ignore[arg-type]
    spec = read_scan(mod)
    if spec is None or not chosen.fits(spec.sizes, arch.the_gpu):
        return None
    sizes = spec.sizes
    smem = (spec.accum, chosen.smem_sums(sizes))
    return build(
        CudaFunction(
            arguments=(("X", spec.shape, spec.dtype), ("Y", spec.shape, spec.dtype)),
            workspaces={},
            text=scan_columns_source(spec, chosen),
            kernels=[CudaKernel("scan_columns", ("X", "Y"), chosen.blocks(sizes), chosen.threads, smem, chosen.ctas_per_sm)],
            pdl=supports_pdl(arch.the_gpu),
        )
    )
