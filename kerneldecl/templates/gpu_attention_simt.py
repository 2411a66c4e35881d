"""Owns fused attention on CUDA cores: float32 without tensor cores' shorter mantissas, and heads of any dimension.

Knows nothing of how its parameters are chosen, and recognises attention by its computation, never by its names.

A thread block has one tile of rows of queries of one head, the longest first where a causal mask makes them differ. It goes through the
blocks of keys that its rows see; scores, powers and results are in float32, whatever the arguments are.

Parameters:
  warps_m         warps along rows of queries, each with 4 * thread_m rows
  warps_n         warps that share rows, each with keys of its own; what they find is merged at the end. Many where tiles are few
  thread_m        rows of a thread
  thread_n        keys of a thread: a block of keys has warps_n * 8 * thread_n
  heads_together  heads of queries whose tiles are computed before those of other heads, so that their keys stay in L2

A thread has thread_m * thread_n registers of scores and thread_m * value_dim / 8 of results. Shared memory holds queries, keys, values and
powers in float32, or at the end what warps merge. float32 is copied by cp.async where the GPU has it, else through registers.

Returns a TIRx kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.attention_simt import AttentionSimtParams, takes
from kerneldecl.compiler.attention import read_attention
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.attention_simt_source import FUNCTION, attention_source
from kerneldecl.templates.gpu.cuda_kernels import CudaFunction, CudaKernel, build
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the attention as one custom kernel, or None where it or these parameters are not taken."""
    gpu = arch.the_gpu
    chosen = AttentionSimtParams(**{name: params[name] for name in AttentionSimtParams._fields})  # type: ignore[arg-type]
    spec = read_attention(mod)
    if spec is None or spec.scale <= 0 or not takes(spec.sizes) or not chosen.fits(spec.sizes, gpu):
        return None
    tiles = -(-spec.queries // chosen.block_m) * spec.batch * spec.heads
    smem = ("float32", chosen.smem_floats(spec.head_dim, spec.value_dim))
    names = tuple(name for name, _, _ in spec.arguments)
    kernel = CudaKernel(FUNCTION, names, tiles, chosen.threads, smem, ctas_per_sm=1)
    text = attention_source(spec, chosen, is_async=gpu.async_copy)
    return build(CudaFunction(arguments=spec.arguments, workspaces={}, text=text, kernels=[kernel], pdl=supports_pdl(gpu)))
