"""Owns attention of few queries against a KV cache on wgmma: rows of many heads in one tile, keys in shared memory used as values as well.

Knows nothing of how its parameters are chosen, and recognises attention by its computation, never by its names.

A CTA has 64 rows of queries that see the same head of keys (all heads of a group, all queries), and a part of a sequence's keys. One thread
loads blocks of 64 keys by TMA. Two consumer warpgroups take the scores of every other block each, and have the results of half of the
columns each, so that these fit registers; powers go to the other consumer through shared memory. Where keys are latent the values are not
loaded again: they are the transposed operand of wgmma. The cache is contiguous or in pages of a multiple of 8 keys; lengths are read at
run time and shared out evenly. Takes attentions without lengths, too, where they have few queries.

Parameters:
  stages   an even number of blocks of keys and values in shared memory: 2 or more
  split_k  CTAs that share a sequence's keys; over 1, a second kernel combines their results
  cluster  1, or 2 CTAs with different rows that load the same keys by TMA multicast, half of them each
  turns    1 has the second consumer start its scores when the first one has started its own: softmax overlaps with the other's scores

Shared memory: 8 KiB for each 64 columns of queries (or results, if these have more) and of each of the stages, and 2 KiB. A consumer
thread has value_dim / 4 registers of results, 32 of scores and 16 of powers.

Returns TIRx kernels, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.wgmma_decode import WgmmaDecodeParams, takes
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.hopper.decode_config import WgmmaDecodeKernel
from kerneldecl.templates.hopper.decode_kernel import build
from kerneldecl.templates.shared.cache_attention import read_computation
from kerneldecl.templates.shared.fast_parse import fast_parsing
from kerneldecl.templates.wgmma_matmul import has_wgmma


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the attention as one function of one or two kernels, or None where wgmma or these parameters do not take it."""
    chosen = WgmmaDecodeParams(**{name: params[name] for name in WgmmaDecodeParams._fields})  # type: ignore[arg-type]
    computation = read_computation(mod) if has_wgmma(arch) else None
    if computation is None or computation.spec.scale <= 0 or not takes(computation.sizes) or not chosen.fits(computation.sizes):
        return None
    return build(WgmmaDecodeKernel(computation, chosen, arch.the_gpu.sm_count, supports_pdl(arch.the_gpu)))
