"""Owns group norms on GPUs: sums by many thread blocks, then the normalisation; or both by one thread block for each set of groups.

Knows nothing of how its parameters are chosen, and recognises a group norm by its computation, never by its names.

Parameters:
  width    elements of one access: a divisor of 16 bytes' elements, and of the channels or, where pixels are last, of the pixels
  columns  threads beside one another; where channels are last, columns * width are the channels of whole groups, and divide all channels
  rows     rows of such threads, which take different pixels; 1 where pixels are last
  chunks   thread blocks that share the pixels of their groups; 1 makes one kernel, which reads again what its registers do not hold
  unroll   loads of a thread in flight together

Returns TIRx kernels, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.group_norm import GpuGroupNormParams, takes
from kerneldecl.compiler.group_norm import read_group_norm
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.group_norm_config import GroupNormKernel
from kerneldecl.templates.gpu.group_norm_kernel import build
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the norm as one function of one or two kernels, or None where these do not take it."""
    chosen = GpuGroupNormParams(**{name: params[name] for name in GpuGroupNormParams._fields})  # type: ignore[arg-type]
    spec = read_group_norm(mod)
    if spec is None or not takes(spec.sizes) or not chosen.fits(spec.sizes, arch.the_gpu):
        return None
    return build(GroupNormKernel(spec, chosen, supports_pdl(arch.the_gpu)), list(spec.arguments))
