"""Owns attention of few queries against a KV cache on CUDA cores: float32, and 16 bits on GPUs whose tensor cores mma.sync does not reach.

Knows nothing of how its parameters are chosen, and recognises attention by its computation, never by its names.

A thread block has the rows of queries that see the same head of keys (all heads of a group, all queries, or some of them), and a part of a
sequence's keys. Lanes share a row of keys in vectors of 16 bytes: shuffles add up their parts of scores, and the same lanes have the same
columns of results. Each warp takes keys of its own and loads the next ones while it multiplies; the thread block adds up what warps have
found, a second kernel what thread blocks have. Each sum has one order. The cache is contiguous or in pages; lengths are read at run
time. Takes attentions without lengths, too, where they have few queries.

Parameters:
  rows     rows of queries of a thread block, 1 to 16; each thread has all of them
  lanes    lanes that share a row of keys or values: 4, 8, 16 or 32; a warp has 32 / lanes keys side by side
  unroll   keys that a thread loads and multiplies together: 1, 2, 4 or 8
  warps    warps of a thread block
  split_k  thread blocks that share a sequence's keys
  blocks   thread blocks that share an SM

A thread has rows * (head_dim + value_dim) / lanes registers of queries and results, and parts of unroll keys and values on their way.
Shared memory holds warps * rows rows of results in float32.

Returns TIRx kernels, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.attention_decode_simt import DecodeSimtParams, takes
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.attention_decode_simt_kernel import DecodeSimtKernel, build
from kerneldecl.templates.shared.cache_attention import read_computation
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the attention as one function of one or two kernels, or None where these do not take it."""
    gpu = arch.the_gpu
    chosen = DecodeSimtParams(**{name: params[name] for name in DecodeSimtParams._fields})  # type: ignore[arg-type]
    computation = read_computation(mod)
    if computation is None or computation.spec.scale <= 0 or not takes(computation.sizes) or not chosen.fits(computation.sizes, gpu):
        return None
    return build(DecodeSimtKernel(computation, chosen, gpu.sm_count, supports_pdl(gpu)))
