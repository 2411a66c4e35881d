"""Owns fused attention on mma.sync: blocks of keys and values by cp.async, scores and powers in registers, an online softmax.

Knows nothing of how its parameters are chosen, and recognises attention by its computation, never by its names.

A CTA has one tile of rows of queries of one head, the longest first where a causal mask makes them differ. It goes through the blocks of
keys from the last that its rows see to the first, so that only the first ones it meets have keys to mask.

Parameters:
  warps           warps of a CTA, each with 16 * fragments rows of queries
  fragments       1 or 2 fragments of 16 rows of queries; two read each block of keys and values half as often
  block_n         keys of a block: a multiple of 16
  stages          1 or more blocks of keys, and as many of values, in shared memory; with 1 values arrive while scores are multiplied, and
                  keys during the rest. Float8 takes 1: it waits in registers, and becomes float16 on its way to shared memory
  q_in_registers  1 has threads hold their rows of queries in registers, 0 has them read these from shared memory for each block
  heads_together  heads of queries whose tiles are computed before those of other heads, so that their keys stay in L2
  ctas_per_sm     CTAs that share an SM
  fma_powers      0 to 8 of each eight powers are computed by CUDA cores, with a relative error of 1.02e-4, instead of by special-function
                  units, which are the limit where heads are small
  column_warps    1, or several warps that share their rows: each computes the scores of block_n / column_warps keys, a multiple of 8, and
                  value_dim / column_warps columns of results. They exchange maxima and powers through shared memory. Heads of more
                  than 256 have too many results for the registers of one warp
  split_k         1, or parts of the keys, each of which another CTA goes through: for few rows of queries. Their results go as float32 to
                  a workspace, and a second kernel combines them

A thread has fragments * (block_n + value_dim) / (2 * column_warps) registers of scores and results, block_n / (4 * column_warps) of powers,
and fragments * head_dim / 4 of queries with q_in_registers. Shared memory: block_m * max(head_dim, value_dim) + stages * block_n *
(head_dim + value_dim) elements, and block_m * block_n of powers with column_warps, where rows are up to 16 bytes longer to be read from
different banks.

Returns a custom kernel of TIRx, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule, tirx

from kerneldecl.analysis.attention import MAX_OFFSET
from kerneldecl.analysis.attention_tc import AttentionTcParams, Rows, takes
from kerneldecl.analysis.gpu_limits import FIRST_FLOAT8_CAPABILITY
from kerneldecl.analysis.tensor_cores import first_capability
from kerneldecl.compiler.attention import read_attention
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.attention_config import AttentionTcKernel
from kerneldecl.templates.gpu.attention_kernel import build
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the attention as one custom kernel, or None where mma.sync or these parameters do not take it."""
    gpu = arch.the_gpu
    attention = AttentionTcParams(**{name: params[name] for name in AttentionTcParams._fields if name in params})  # type: ignore[arg-type]
    if gpu.compute_capability < first_capability("mma.sync") or not gpu.async_copy:
        return None
    spec = read_attention(mod)
    if spec is None or spec.scale <= 0 or not takes(spec.sizes, gpu):
        return None
    if not attention.fits(Rows.of(spec.sizes, attention.column_warps), gpu, has_bias=spec.sizes.has_bias):
        return None
    if attention.workspace_elements(spec.sizes) >= MAX_OFFSET:
        return None
    arguments = {name: tirx.decl_buffer(shape, dtype, name) for name, shape, dtype in spec.arguments}
    return build(AttentionTcKernel(arguments, spec, attention, supports_pdl(gpu), gpu.compute_capability >= FIRST_FLOAT8_CAPABILITY))
