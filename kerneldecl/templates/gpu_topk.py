"""Owns the first elements of rows in their order on GPUs, topk and sort: a thread block for each row chooses few elements and sorts them.

Knows nothing of how its parameters are chosen, and recognises sorted rows by their computation, never by their names.

Parameters:
  threads  threads of a block, whole warps
  entries  elements that are sorted at most, a power of two that holds the results; all of a row where it has no more
  kept     1 keeps the row in shared memory, so that it is read from DRAM once; 0 reads it again, from L2

Returns a TIRx kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.row_sort import GpuTopParams
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.compiler.row_sort import read_top
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.cuda_kernels import CudaFunction, CudaKernel, build
from kerneldecl.templates.gpu.top_source import top_source
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the sorted rows as one kernel, or None where it does not take them."""
    chosen = GpuTopParams(**{name: params[name] for name in GpuTopParams._fields})  # type: ignore[arg-type]
    spec = read_top(mod)
    if spec is None or not chosen.fits(spec.sizes, arch.the_gpu):
        return None
    kernel = CudaKernel("top", ("X", "values", "indices"), spec.sizes.rows, chosen.threads, ("uint8", chosen.smem_bytes(spec.sizes)))
    return build(CudaFunction(spec.arguments, {}, top_source(spec, chosen), [kernel], supports_pdl(arch.the_gpu)))
