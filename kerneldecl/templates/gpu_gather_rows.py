"""Owns slices looked up by indices on GPUs, such as an embedding's rows: some threads share a piece of a slice, with all vectors under way.

Knows nothing of how its parameters are chosen, and recognises the lookup by its computation, never by its names.

Parameters:
  threads  threads of a block, whole warps
  lanes    threads that share a piece of a slice, a power of two that divides them
  unroll   vectors of a thread: 1 to 16; those of all lanes are a piece
  ahead    1 where slices are prefetched while the preceding kernel ends, on GPUs with programmatic dependent launch; else 0

Returns a TIRx kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.gather import GatherRowsParams
from kerneldecl.compiler.gather import read_gather
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.cuda_kernels import CudaFunction, CudaKernel, build
from kerneldecl.templates.gpu.gather_rows_source import gather_rows_source
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the lookup as one kernel, or None where it does not take it."""
    chosen = GatherRowsParams(**{name: params[name] for name in GatherRowsParams._fields})  # type: ignore[arg-type]
    spec = read_gather(mod)
    if spec is None or not chosen.fits(spec.sizes, arch.the_gpu):
        return None
    names = tuple(name for name, *_ in spec.arguments)
    kernel = CudaKernel("gather_rows", names, chosen.blocks(spec.sizes), chosen.threads, waits=bool(chosen.ahead))
    return build(CudaFunction(spec.arguments, {}, gather_rows_source(spec, chosen), [kernel], supports_pdl(arch.the_gpu)))
