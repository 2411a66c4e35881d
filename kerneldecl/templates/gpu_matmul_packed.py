"""Owns the GEMM kernel of few rows with packed 4-bit weights on mma.sync: each warp streams weights through shared memory.

Knows nothing of how its parameters are chosen, and recognises the computation by its structure: the weights are those of rule
`matmul_quantized` with layout `packed`, of float16 or bfloat16: int4 with one scale for each group of 32 or more weights along k or for a
whole row, or blocks of float4_e2m1fn (MXFP4, NVFP4). Activations have 1 to 64 rows.

The operands are exchanged: the GEMM's n are rows of fragments, its m columns.

Parameters:
  rows     rows of weights of a warp: 16, 32 or 64
  warps_n  warps of a thread block along n, which share activations
  warps_k  warps that share rows, each with every `warps_k`th step of 128 elements along k (64, where k has no whole steps of 128)
  stages   2 or more steps that a warp has in shared memory or on their way to it
  split_k  1 to 8 thread blocks of a cluster among which k is divided
  stream   1 has activations come with each step of a warp, where warps_n is 1; 2 has those of all warps along k come with each round of
           steps, for which the warps meet; 0 has a thread block copy all of its own before the first; 3 has it copy each step's of its own
           once, with the weights: warps along n wait at a barrier of the step, and never meet; 4 is 3 where thread blocks begin with
           different steps, so that they do not all ask for the same activations at once; 3 and 4 with `bulk` alone
  bulk     1 has one lane copy a warp's weights in bulk, from compute capability 9.0 on; 0 has each lane copy 16 bytes of each tile
  prefetch steps of a warp whose weights are prefetched to L2 before the preceding kernel has ended

Shared memory: m * (2 * k / split_k + 16) bytes of activations, and warps_n * warps_k * stages * rows * (64 + scales) bytes of weights,
where scales are the bytes of a row's scales and zero points in a step; where activations come with each step, m * 272 bytes with each of
these instead, and with `stream` 3 and 4 besides 8 bytes for each step. Or the partial results of warps, where these take more. With
`split_k` besides m * rows * warps_n * 4 bytes, for what the thread blocks of a cluster send each other.

Where a thread has up to 32 accumulators, sums of a group are multiplied by its scale, in float32; else weights are, and rounded to 16 bits.
Where rows are no whole blocks, some thread blocks begin before the end of their neighbours', and both compute what they share.

A kernel is for one number of rows, which its CUDA text names. Returns a custom kernel of TIRx, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.matmul_packed import PackedParams
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.packed_gemm_kernel import PackedKernel, build, problem_of
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the GEMM with its epilogue as one kernel, or None where it is another computation or these parameters do not take it."""
    chosen = PackedParams(**{name: params[name] for name in PackedParams._fields if name in params})  # type: ignore[arg-type]
    gpu = arch.the_gpu
    found = problem_of(mod, chosen, gpu)
    if found is None:
        return None
    problem, sizes = found
    return build(PackedKernel(problem, sizes, chosen, supports_pdl(gpu)))
