"""Owns sorted rows on GPUs whose elements have room in a thread block's registers: sort, and topk of short rows.

Knows nothing of how its parameters are chosen, and recognises sorted rows by their computation, never by their names.

Parameters:
  threads  threads of a block, a power of two, whole warps
  items    elements of a thread, a power of two; a block has room for all of a row

Returns a TIRx kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.row_sort import GpuSortParams
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.compiler.row_sort import read_top
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.cuda_kernels import CudaFunction, CudaKernel, build
from kerneldecl.templates.gpu.sort_source import sort_source
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the sorted rows as one kernel, or None where it does not take them."""
    chosen = GpuSortParams(**{name: params[name] for name in GpuSortParams._fields})  # type: ignore[arg-type]
    spec = read_top(mod)
    if spec is None or not chosen.fits(spec.sizes, arch.the_gpu):
        return None
    shared = {4: "uint32", 8: "uint64"}[chosen.entry_bytes(spec.sizes)], chosen.smem_entries
    kernel = CudaKernel("sort", ("X", "values", "indices"), spec.sizes.rows, chosen.threads, shared)
    return build(CudaFunction(spec.arguments, {}, sort_source(spec, chosen), [kernel], supports_pdl(arch.the_gpu)))
