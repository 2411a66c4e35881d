"""Owns the places of the largest or smallest elements on GPUs along an axis that is not the last: threads have neighbouring columns.

Knows nothing of how its parameters are chosen, and recognises the function by its computation, never by its names.

Parameters:
  threads  threads of a block, whole warps
  lanes    threads side by side, a divisor of the threads; the others are below them and take the rows of their columns in turns
  width    columns of a thread, elements of one access: a divisor of the elements between neighbours along the axis
  unroll   rows of a thread whose loads are under way together, 1 to 16
  parts    thread blocks that share a column; with several, a second kernel chooses among what they have found

Returns TIRx kernels, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.arg_reduce import ArgColumnsParams
from kerneldecl.compiler.arg_reduce import read_arg_reduce
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.arg_columns_source import PARTS_THREADS, arg_columns_source
from kerneldecl.templates.gpu.cuda_kernels import CudaFunction, CudaKernel, build
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the function as one of one or two kernels, or None where these do not take it."""
    chosen = ArgColumnsParams(**{name: params[name] for name in ArgColumnsParams._fields})  # type: ignore[arg-type]
    spec = read_arg_reduce(mod)
    if spec is None or not chosen.fits(spec.sizes, arch.the_gpu):
        return None
    blocks, columns = chosen.strips(spec.sizes) * chosen.parts, spec.sizes.outer * spec.sizes.inner
    if chosen.parts == 1:
        kernels = [CudaKernel("look_for", ("X", "Y"), blocks, chosen.threads, chosen.smem)]
    else:
        kernels = [
            CudaKernel("look_for", ("X", "found"), blocks, chosen.threads, chosen.smem),
            CudaKernel("choose", ("found", "Y"), -(-columns * chosen.parts_sharing // PARTS_THREADS), PARTS_THREADS),
        ]
    workspaces = {"found": (columns * chosen.parts, "uint64")} if chosen.parts > 1 else {}
    text = arg_columns_source(spec, chosen)
    return build(CudaFunction(spec.arguments, workspaces, text, kernels, supports_pdl(arch.the_gpu)))
