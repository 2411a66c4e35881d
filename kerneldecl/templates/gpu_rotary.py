"""Owns rotary position embedding on GPUs: a thread turns the same two vectors of several heads, and loads their cosines and sines once.

Knows nothing of how its parameters are chosen, and recognises the embedding by its computation, never by its names.

Parameters:
  threads  threads of a block, whole warps
  width    elements of one access; a thread has two of them, of both halves, or a pair where it is 1, so that each element is read once
  heads    heads of a thread, of one sequence or several: 1 to 8, a divisor of all

Returns a TIRx kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.rotary import RotaryParams
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.compiler.rotary import read_rotary
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.cuda_kernels import CudaFunction, CudaKernel, build
from kerneldecl.templates.gpu.rotary_source import rotary_source
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the embedding as one kernel, or None where it does not take it."""
    chosen = RotaryParams(**{name: params[name] for name in RotaryParams._fields})  # type: ignore[arg-type]
    spec = read_rotary(mod)
    if spec is None or not chosen.fits(spec.sizes, arch.the_gpu):
        return None
    kernel = CudaKernel("turn_all", tuple(name for name, *_ in spec.arguments), chosen.blocks(spec.sizes), chosen.threads)
    return build(CudaFunction(spec.arguments, {}, rotary_source(spec, chosen), [kernel], supports_pdl(arch.the_gpu)))
