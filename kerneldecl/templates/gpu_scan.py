"""Owns cumulative sums on GPUs: rows by thread blocks, or columns by threads; long ones in parts, whose sums come first.

Knows nothing of how its parameters are chosen, and recognises a cumulative sum by its computation, never by its names.

Parameters:
  threads  threads of a block, whole warps
  parts    thread blocks that share a row or a column; with one, there is one kernel that reads each element once
  unroll   vectors of a thread in flight together along rows; elements of a column where another axis is scanned

Returns TIRx kernels, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.long_scan import fits
from kerneldecl.analysis.scan import GpuScanParams
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.compiler.scan import read_scan
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.cuda_kernels import CudaFunction, CudaKernel, build
from kerneldecl.templates.gpu.scan_source import scan_source, smem_sums
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the sum as one function of one or two kernels, or None where these do not take it."""
    chosen = GpuScanParams(**{name: params[name] for name in GpuScanParams._fields})  # type: ignore[arg-type]
    spec = read_scan(mod)
    if spec is None or not fits(chosen, spec.sizes, arch.the_gpu):
        return None
    sizes = spec.sizes
    grid, smem = chosen.blocks(sizes) * chosen.parts, (spec.accum, smem_sums(sizes))
    if chosen.parts == 1:
        kernels = [CudaKernel("scan_whole", ("X", "Y"), grid, chosen.threads, smem)]
    else:
        kernels = [
            CudaKernel("sum_rows", ("X", "sums"), grid, chosen.threads, smem),
            CudaKernel("scan_rows", ("X", "sums", "Y"), grid, chosen.threads, smem),
        ]
    return build(
        CudaFunction(
            arguments=(("X", spec.shape, spec.dtype), ("Y", spec.shape, spec.dtype)),
            workspaces={"sums": (sizes.outer * chosen.parts * sizes.inner, spec.accum)} if chosen.parts > 1 else {},
            text=scan_source(spec, chosen),
            kernels=kernels,
            pdl=supports_pdl(arch.the_gpu),
        )
    )
