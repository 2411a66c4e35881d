"""Owns pooling with channels first on GPUs: a thread computes a few neighbouring results of a row, and some below them, of one plane.

Knows nothing of how its parameters are chosen, and recognises pooling by its computation, never by its names.

Parameters:
  threads  threads of a block, whole warps
  strip    results of a row that a thread computes; the last ones of a plane need not be whole
  column   results of a column that a thread computes, likewise
  ahead    rows of its input that a thread loads before it uses the first: then one for each row that it has used
  staged   whether a block first copies what it reads to shared memory, by 16 bytes wherever its rows begin

Threads go over a row's strips, then a plane's columns, then planes, as one line, so that a block has several planes where these are small.

Returns a TIRx kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.pool_planes import PlanesParams
from kerneldecl.compiler.canonical import signature_of
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.cuda_kernels import CudaFunction, CudaKernel, build
from kerneldecl.templates.gpu.pool_planes_source import planes_source
from kerneldecl.templates.gpu.read_pool import PoolSpec, read_pool
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the pooling as one kernel, or None where it does not take it."""
    chosen = PlanesParams(**{name: params[name] for name in PlanesParams._fields})  # type: ignore[arg-type]
    spec = read_pool(mod)
    if spec is None or not chosen.fits(spec.sizes, arch.the_gpu) or not _touch(spec):
        return None
    sizes, pdl = spec.sizes, supports_pdl(arch.the_gpu)
    arguments = [(name, shape, dtype) for name, (shape, dtype) in zip("XY", signature_of(mod["main"]), strict=True)]
    smem = (arguments[0][2], chosen.staged_elements(sizes) if chosen.staged else 0)
    # With a number of blocks an SM, ptxas puts loads first. Without, it saves registers, and few loads are under way.
    kernel = CudaKernel("pool_all", ("X", "Y"), chosen.blocks(sizes), chosen.threads, smem, ctas_per_sm=1, waits=pdl)
    return build(CudaFunction(arguments, {}, planes_source(spec, chosen, arch.the_gpu), [kernel], pdl))


def _touch(spec: PoolSpec) -> bool:
    """Say whether all first windows have an element of the image, and none begins within it."""
    sizes = spec.sizes
    reach = ((sizes.window_rows - 1) * sizes.step_rows, (sizes.window_columns - 1) * sizes.step_columns)
    return all(0 <= before <= most for before, most in zip(spec.before, reach, strict=True))
