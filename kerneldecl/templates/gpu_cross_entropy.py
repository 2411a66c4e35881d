"""Owns the cross entropy of rows on GPUs: one kernel that reads each row once, however long it is.

Knows nothing of how its parameters are chosen, and recognises a function by its computation, never by its names.

Parameters:
  width    elements of one access: a divisor of a row and of 16 bytes' elements
  threads  threads of a block, whole warps; a block has one row
  unroll   vectors that a thread loads at once; width * unroll is at most 64

Returns a TIRx kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.cross_entropy import CrossEntropyParams, takes
from kerneldecl.compiler.cross_entropy import read_cross_entropy
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.cross_entropy_kernel import CrossEntropyKernel, build
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the function as one kernel, or None where this one does not take it."""
    chosen = CrossEntropyParams(**{name: params[name] for name in CrossEntropyParams._fields})  # type: ignore[arg-type]
    spec = read_cross_entropy(mod)
    if spec is None or not takes(spec.sizes) or spec.out_dtype != "float32" or not chosen.fits(spec.sizes, arch.the_gpu):
        return None
    return build(CrossEntropyKernel(spec, chosen, supports_pdl(arch.the_gpu)))
