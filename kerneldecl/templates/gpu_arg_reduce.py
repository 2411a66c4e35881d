"""Owns the places of the largest or smallest elements of rows on GPUs: each row is read once, by one thread block or by several.

Knows nothing of how its parameters are chosen, and recognises the function by its computation, never by its names.

Parameters:
  threads  threads of a block, whole warps
  width    elements of one access, a divisor of the columns
  unroll   accesses of a thread under way together, 1 to 8
  parts    thread blocks that share a row; with several, a second kernel chooses among what they have found
  rows     optional: rows of a thread block, of 32 threads each; else 1

Returns TIRx kernels, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.arg_reduce import ArgReduceParams
from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.compiler.arg_reduce import read_arg_reduce
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.arg_source import arg_source
from kerneldecl.templates.gpu.cuda_kernels import CudaFunction, CudaKernel, build
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the function as one of one or two kernels, or None where these do not take it."""
    chosen = ArgReduceParams(**{name: params[name] for name in ArgReduceParams._fields if name in params})  # type: ignore[arg-type]
    spec = read_arg_reduce(mod)
    if spec is None or not chosen.fits(spec.sizes, arch.the_gpu):
        return None
    rows, smem = spec.sizes.outer, ("uint64", WARP_LANES)
    if chosen.rows > 1:
        kernels = [CudaKernel("place_rows", ("X", "Y"), -(-rows // chosen.rows), chosen.threads * chosen.rows)]
    elif chosen.parts == 1:
        kernels = [CudaKernel("place_whole", ("X", "Y"), rows, chosen.threads, smem)]
    else:
        kernels = [
            CudaKernel("key_parts", ("X", "found"), rows * chosen.parts, chosen.threads, smem),
            CudaKernel("place_parts", ("X", "found", "Y"), rows, WARP_LANES),
        ]
    workspaces = {"found": (rows * chosen.parts, "uint64")} if chosen.parts > 1 else {}
    return build(CudaFunction(spec.arguments, workspaces, arg_source(spec, chosen), kernels, supports_pdl(arch.the_gpu)))
