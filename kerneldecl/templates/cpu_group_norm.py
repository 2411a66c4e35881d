"""Owns group norms on CPUs: sums by tasks, then the normalisation by the same tasks.

Knows nothing of how its parameters are chosen, and recognises a group norm by its computation, never by its names.

Parameters:
  vectors   vectors of elements that a task adds up side by side
  block     pixels of a task where channels are last; elsewhere a task has a channel
  parallel  True runs tasks on all cores

Returns a custom kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.cpu_params import CpuGroupNormParams
from kerneldecl.analysis.group_norm import takes
from kerneldecl.compiler.group_norm import read_group_norm
from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.cpu.group_norm_kernel import build


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the norm as one custom kernel, or None where the function is none."""
    chosen = CpuGroupNormParams(**{name: params[name] for name in CpuGroupNormParams._fields})  # type: ignore[arg-type]
    spec = read_group_norm(mod)
    if spec is None or not takes(spec.sizes) or min(chosen.vectors, chosen.block) < 1:
        return None
    return build(spec, chosen, arch.the_cpu.vector_bytes // dtype_bytes("float32"))
