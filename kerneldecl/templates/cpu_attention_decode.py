"""Owns attention of few queries against a KV cache on CPUs: contiguous or in pages, with lengths at run time.

Knows nothing of how its parameters are chosen, and recognises attention by its computation, never by its names.

Parameters:
  rows    rows of queries of a task: a divisor of those that see the same head of keys
  tile_m  rows of a register tile: a divisor of `rows`, 1 to 8
  tile_n  keys of a register tile of scores: 1 to 8

Returns a custom kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.cpu_params import CpuDecodeParams
from kerneldecl.compiler.attention_decode import read_attention_decode
from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.cpu.decode_kernel import build


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the attention as one custom kernel, or None where the function is none or rows are no whole vectors of two or more."""
    chosen = CpuDecodeParams(**{name: params[name] for name in CpuDecodeParams._fields})  # type: ignore[arg-type]
    spec = read_attention_decode(mod) if chosen.fits() else None
    if spec is None:
        return None
    lanes = math.gcd(arch.the_cpu.vector_bytes // dtype_bytes("float32"), spec.head_dim, spec.value_dim)
    return None if lanes < 2 else build(spec, chosen, lanes)
