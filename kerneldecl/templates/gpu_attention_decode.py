"""Owns attention of few queries against a KV cache on GPUs: split keys, mma.sync, and a ring of cp.async for each warp.

Knows nothing of how its parameters are chosen, and recognises attention by its computation, never by its names.

A thread block has the rows of queries that see the same head of keys (all heads of a group, all queries), and a part of a sequence's
keys. Each group of its warps streams blocks of keys and values through shared memory and has results of its own, which the block adds up;
warps of a group have rows of their own. Where several blocks share a sequence's keys, those of a cluster combine their results, and what is
left of that a second kernel. Each sum has one order. The cache is contiguous or in pages; lengths are read at run time and shared out
evenly. Takes attentions without lengths, too, where they have few queries.

Parameters:
  rows     rows of queries of a warp: 8, 16, 32 or 64
  block_n  keys that a warp multiplies together: a multiple of 16
  warps_m  warps of a group, which share blocks of keys; a divisor of warps
  warps    warps of a thread block, 1 to 32
  stages   2 or more blocks of keys and values that a group has in shared memory, or on their way to it
  split_k  thread blocks that share a sequence's keys
  blocks   thread blocks that share an SM
  cluster  1 to 8, a divisor of split_k: thread blocks that combine their results in shared memory; the second kernel is for more than these

Shared memory: warps / warps_m * stages * block_n rows of keys and of values, each 16 bytes longer than a whole number of 32. A lane has
row_tiles * (head_dim / 8 + value_dim / 4) registers of queries and results, dimensions rounded up to 16; row_tiles is rows / 8.

Returns TIRx kernels, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.attention_decode import DecodeParams, takes
from kerneldecl.analysis.tensor_cores import first_capability
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.attention_decode_config import DecodeKernel
from kerneldecl.templates.gpu.attention_decode_kernel import build
from kerneldecl.templates.shared.cache_attention import read_computation
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the attention as one function of one or two kernels, or None where these do not take it."""
    gpu = arch.the_gpu
    if gpu.compute_capability < first_capability("mma.sync") or not gpu.async_copy:
        return None
    chosen = DecodeParams(**{name: params[name] for name in DecodeParams._fields})  # type: ignore[arg-type]
    computation = read_computation(mod)
    if computation is None or computation.spec.scale <= 0 or not takes(computation.sizes) or not chosen.fits(computation.sizes, gpu):
        return None
    return build(DecodeKernel(computation, chosen, gpu.sm_count, supports_pdl(gpu)))
