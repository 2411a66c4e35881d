"""Owns pooling with channels last on GPUs: a thread computes pixels of a column, perhaps of several, by a vector of channels.

Knows nothing of how its parameters are chosen, and recognises pooling by its computation, never by its names.

Parameters:
  threads  threads of a block, whole warps
  width    channels of a thread, which one access loads: 4 bytes at least
  column   output pixels of a column that a thread computes; the last ones of an image need not be whole
  strip    output pixels of a row that a thread computes, likewise
  ahead    rows of its input that a thread loads before it uses the first: then one for each row that it has used

A thread loads each vector of its windows once. Threads go over channels, then a row's strips, then an image's columns, so that blocks that
read the same rows are neighbours, and run at about the same time.

Returns a TIRx kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.pool import PoolParams
from kerneldecl.compiler.canonical import signature_of
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.cuda_kernels import CudaFunction, CudaKernel, build
from kerneldecl.templates.gpu.pool_source import pool_source
from kerneldecl.templates.gpu.read_pool import read_pool
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the pooling as one kernel, or None where it does not take it."""
    chosen = PoolParams(**{name: params[name] for name in PoolParams._fields})  # type: ignore[arg-type]
    spec = read_pool(mod)
    if spec is None or not chosen.fits(spec.sizes, arch.the_gpu):
        return None
    pdl = supports_pdl(arch.the_gpu)
    arguments = [(name, shape, dtype) for name, (shape, dtype) in zip("XY", signature_of(mod["main"]), strict=True)]
    # With a number of blocks an SM, ptxas puts loads first. Without, it saves registers, and six loads at most are under way.
    kernel = CudaKernel("pool_all", ("X", "Y"), chosen.blocks(spec.sizes), chosen.threads, ctas_per_sm=1, waits=pdl)
    return build(CudaFunction(arguments, {}, pool_source(spec, chosen, arch.the_gpu), [kernel], pdl))
