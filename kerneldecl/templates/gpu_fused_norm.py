"""Owns norms of rows with a residual or a quantised output on GPUs: one kernel, in which threads keep their row in registers.

Knows nothing of how its parameters are chosen, and recognises a function by its computation, never by its names.

Parameters:
  width    elements of one access: a divisor of a row and of 16 bytes' elements
  threads  threads that share a row, whole warps; each keeps its part in registers, 64 elements at most
  rows     rows of a thread block

Returns a TIRx kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.fused_norm import FusedNormParams, takes
from kerneldecl.compiler.canonical import signature_of
from kerneldecl.compiler.fused_norm import read_fused_norm
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.fused_norm_kernel import FusedNormKernel, build
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the function as one kernel, or None where this one does not take it."""
    chosen = FusedNormParams(**{name: params[name] for name in FusedNormParams._fields})  # type: ignore[arg-type]
    spec = read_fused_norm(mod)
    if spec is None or not takes(spec.sizes) or not chosen.fits(spec.sizes, arch.the_gpu):
        return None
    return build(FusedNormKernel(spec, chosen, supports_pdl(arch.the_gpu)), signature_of(mod["main"]))
