"""Owns rows added at indices on GPUs: a thread block owns some rows and columns of the result, and looks through all indices.

Knows nothing of how its parameters are chosen, and recognises the sum by its computation, never by its names.

Parameters:
  tile_rows  rows of the result that a thread block owns
  lanes      threads beside one another along columns
  width      elements of one access, a divisor of the columns
  warps      warps of a block

Returns a TIRx kernel, a PrimFunc without a trace. Additions to one element have one order.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.scatter import GpuScatterParams, smem_sums
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.compiler.scatter import read_scatter
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.cuda_kernels import CudaFunction, CudaKernel, build
from kerneldecl.templates.gpu.scatter_source import scatter_source
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the sum as one kernel, or None where it does not take it."""
    chosen = GpuScatterParams(**{name: params[name] for name in GpuScatterParams._fields})  # type: ignore[arg-type]
    spec = read_scatter(mod)
    if spec is None or not chosen.fits(spec.sizes, arch.the_gpu):
        return None
    buffers = tuple(name for name, *_ in spec.arguments)
    function = "add_to" if spec.sizes.has_base else "add_up"
    kernel = CudaKernel(function, buffers, chosen.blocks(spec.sizes), chosen.threads, (spec.accum, smem_sums(spec.sizes, chosen)))
    return build(CudaFunction(spec.arguments, {}, scatter_source(spec, chosen), [kernel], supports_pdl(arch.the_gpu)))
