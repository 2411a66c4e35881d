"""Owns fused attention on CPUs: blocks of queries by blocks of keys, an online softmax, vectors of queries.

Knows nothing of how its parameters are chosen, and recognises attention by its computation, never by its names.

A task takes a block of queries of one head, whose numbers it keeps in columns. It goes through the blocks of keys that they see: scores in
register tiles of keys by vectors of queries, powers relative to the highest score until then, values weighted by them in register tiles of
their elements by vectors of queries.

Parameters:
  block_m   queries of a task: whole vectors
  block_n   keys whose scores are computed before their values are weighted; a multiple of tile_n
  tile_n    keys of a register tile of scores
  tile_e    elements of values of a register tile of results
  pack      True copies keys and values to float32, head by head and row behind row, before all tasks

Returns a custom kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.cpu_params import CpuAttentionParams
from kerneldecl.compiler.attention import read_attention
from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.cpu.attention_kernel import build


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the attention as one custom kernel, or None where the function is none or a vector has no two float32."""
    attention = CpuAttentionParams(**{name: params[name] for name in CpuAttentionParams._fields})  # type: ignore[arg-type]
    lanes = arch.the_cpu.vector_bytes // dtype_bytes("float32")
    if lanes < 2 or lanes & (lanes - 1) or not attention.fits(lanes):
        return None
    spec = read_attention(mod)
    return None if spec is None else build(spec, attention, lanes)
