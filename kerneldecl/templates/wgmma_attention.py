"""Owns fused attention on wgmma: blocks of keys and values by TMA, scores and powers in registers, an online softmax.

Knows nothing of how its parameters are chosen, and recognises attention by its computation, never by its names.

A persistent CTA takes tiles of rows of queries of one head, the longest first where a causal mask makes them differ. It goes through the
blocks of keys from the last that its rows see to the first, so that only the first ones it meets have keys to mask.

Parameters:
  consumers       1 to 4 consumer warpgroups of 64 rows of queries each; one more warpgroup is the producer
  block_n         keys of a block: a multiple of 16 up to 256, of 32 for float8
  stages          2 or more blocks of keys, and as many of values, in shared memory
  q_stages        1 or 2 tiles of queries in shared memory; with 2 the next tile's are loaded while one is computed
  overlap         what is multiplied during a block's softmax: 0 nothing, 1 the results of the block before, 2 the next block's scores as
                  well, which takes registers for two blocks' scores, and pingpong = 0
  pingpong        1 or 2 have consumers start their products in turns, so that one's softmax overlaps with another's products: the next
                  one's turn comes when one has started its products (1) or has its scores (2)
  heads_together  heads of queries whose tiles are computed before those of other heads, so that their keys stay in L2
  ctas_per_sm     CTAs that share an SM: 1, or 2 or 3 of one consumer
  cluster         1, or 2 CTAs that share keys and values by TMA multicast: those of neighbouring heads of one group, else of neighbouring
                  rows, which takes an attention without a causal mask or a window; then ctas_per_sm is 1; not for float8
  fma_powers      0 to 8 of each eight powers are computed by CUDA cores, with a relative error of 1.02e-4, instead of by special-function
                  units, which are the limit where heads are small
  pdl             1 launches with PDL: the kernel starts as soon as the preceding one leaves room and waits for its end before loading

A thread has block_n / 2 scores, block_n / 4 registers of powers (float8: block_n / 8) and value_dim / 2 results, in at most 223, 208, 128
or 80 registers with 1, 2, 3 or 4 consumers, and 200 or 104 where 2 or 3 CTAs share an SM. Shared memory: (q_stages * 64 * consumers *
head_dim + stages * block_n * (head_dim + value_dim)) * 2 bytes, dimensions rounded up to 64, and 1 KiB; a place of queries has room for
results. Of float8 elements 128 take the place of 64, values lie transposed there, and a kernel before transposes them to a workspace.

Returns a custom kernel of TIRx, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule, tirx

from kerneldecl.analysis.attention import WgmmaAttentionParams, takes
from kerneldecl.compiler.attention import read_attention
from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.hopper.attention_config import AttentionKernel
from kerneldecl.templates.hopper.attention_kernel import build
from kerneldecl.templates.shared.fast_parse import fast_parsing
from kerneldecl.templates.wgmma_matmul import has_wgmma


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the attention as one custom kernel, or None where wgmma or these parameters do not take it."""
    attention = WgmmaAttentionParams(**{name: params[name] for name in WgmmaAttentionParams._fields})  # type: ignore[arg-type]
    spec = read_attention(mod) if has_wgmma(arch) else None
    if spec is None or not takes(spec.sizes) or spec.scale <= 0:
        return None
    if not attention.fits(spec.head_dim, spec.value_dim, spec.sizes.bias_registers, dtype_bytes(spec.dtype)):
        return None
    arguments = {name: tirx.decl_buffer(shape, dtype, name) for name, shape, dtype in spec.arguments}
    kernel = AttentionKernel(arguments, spec, attention, arch.the_gpu.sm_count)
    return build(kernel) if kernel.shares_heads or spec.band.is_full else None
