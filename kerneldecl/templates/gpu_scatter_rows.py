"""Owns rows added at indices on GPUs in two kernels: one lists the updates of each row, the other adds them to rows of the result.

Knows nothing of how its parameters are chosen, and recognises the sum by its computation, never by its names.

Parameters:
  threads    threads of a block that adds, whole warps
  lanes      threads beside one another along columns
  width      elements of one access, a divisor of the columns; where these are odd, elements of a thread, `lanes` apart
  rows       rows of a thread, whose loads are under way together
  part_rows  rows whose updates one block lists; it looks through all indices

Returns TIRx kernels, a PrimFunc without a trace. Additions to one element have one order, that of the updates.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.scatter import GpuScatterRowsParams
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.compiler.scatter import read_scatter
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.cuda_kernels import CudaFunction, CudaKernel, build
from kerneldecl.templates.gpu.scatter_rows_source import scatter_rows_source
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the sum as a function of two kernels, or None where they do not take it."""
    chosen = GpuScatterRowsParams(**{name: params[name] for name in GpuScatterRowsParams._fields})  # type: ignore[arg-type]
    spec = read_scatter(mod)
    if spec is None or not chosen.fits(spec.sizes, arch.the_gpu):
        return None
    sizes = spec.sizes
    indices, updates, *base, out = (name for name, *_ in spec.arguments)
    smem = ("int32", chosen.list_words)
    kernels = [
        CudaKernel("list_updates", (indices, "starts", "order"), chosen.parts(sizes), chosen.list_threads, smem),
        CudaKernel("add_to" if base else "add_up", (updates, "starts", "order", *base, out), chosen.blocks(sizes), chosen.threads),
    ]
    workspaces = {"starts": (sizes.rows + 1, "int32"), "order": (sizes.updates, "int32")}
    return build(CudaFunction(spec.arguments, workspaces, scatter_rows_source(spec, chosen), kernels, supports_pdl(arch.the_gpu)))
