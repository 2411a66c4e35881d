"""Owns GEMVs on GPUs of matrices whose rows are no whole vectors: rows are loaded as the aligned vectors of memory that they lie in.

Knows nothing of how its parameters are chosen, and recognises the function by its computation, never by its names.

Rows begin at different places in a vector, but every few (the period: 8 of an odd number of 16-bit elements) at the same one. Threads
take rows of one such place together: along a row, one window of x serves all of them; where rows run along y, so does one set of sums.

Parameters:
  threads  threads of a block, whole warps; where rows run along y, a multiple of the period in warps
  lanes    threads that share a row, a power of 2; 32 where rows run along y
  tile     rows of a thread, 1 to 8; 1 where rows run along y
  unroll   vectors of each row, or rows that run along y, which a thread loads together, 1 to 16
  parts    thread blocks that share columns where rows run along y: a second kernel adds their sums; else 1

Returns TIRx kernels, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.unaligned_gemv import ADDING_WARPS, GemvParams
from kerneldecl.compiler.gemv import read_gemv
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.cuda_kernels import CudaFunction, CudaKernel, build
from kerneldecl.templates.gpu.unaligned_gemv_source import padded_lane, unaligned_gemv_source
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the function as one or two kernels, or None where these do not take it."""
    chosen = GemvParams(**{name: params[name] for name in GemvParams._fields})  # type: ignore[arg-type]
    sizes = read_gemv(mod)
    if sizes is None or not chosen.fits(sizes, arch.the_gpu):
        return None
    blocks, warps = chosen.blocks(sizes), chosen.threads // WARP_LANES
    if not sizes.is_across:
        kernels = [CudaKernel("rows", ("W", "x", "y"), blocks, chosen.threads, ("float32", warps * chosen.tile))]
    else:
        smem = ("float32", warps * padded_lane(sizes) * WARP_LANES)
        to = "y" if chosen.parts == 1 else "sums"
        kernels = [CudaKernel("columns", ("W", "x", to), blocks, chosen.threads, smem)]
        if chosen.parts > 1:
            threads = ADDING_WARPS * WARP_LANES
            kernels.append(CudaKernel("add", ("sums", "y"), -(-sizes.n // WARP_LANES), threads, ("float32", threads)))
    matrix = (sizes.k, sizes.n) if sizes.is_across else (sizes.n, sizes.k)
    arguments = [("W", matrix, sizes.dtype), ("x", (sizes.k,), sizes.dtype), ("y", (sizes.n,), sizes.out_dtype)]
    workspaces = {"sums": (chosen.parts * sizes.n, "float32")} if chosen.parts > 1 else {}
    return build(CudaFunction(arguments, workspaces, unaligned_gemv_source(sizes, chosen), kernels, supports_pdl(arch.the_gpu)))
