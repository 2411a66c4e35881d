"""Owns the persistent GEMM kernel of few rows with packed 4-bit weights on mma.sync: warps keep activations and walk over rows of weights.

Knows nothing of how its parameters are chosen, and recognises the computation by its structure: the weights are those of rule
`matmul_quantized` with layout `packed`, of float16 or bfloat16: int4 with one scale for each group of 32 or more weights along k or for a
whole row, or blocks of float4_e2m1fn (MXFP4, NVFP4). Activations have 1 to 16 rows.

The operands are exchanged: the GEMM's n are rows of fragments, its m columns.

Parameters:
  rows     rows of weights of a tile: 16 or 32
  step     elements along k that a warp copies and multiplies at once: 64, 128 or 256, which divide k
  warps    warps of a thread block, each with a slice of k that is the same for all tiles
  tiles    tiles of a thread block at most: it has each one that comes as many tiles behind another as there are thread blocks
  stages   2 to 24 steps that a warp has in shared memory or on their way to it, those of the next tile behind those of this one
  held     tiles whose partial results lie in shared memory before warps add them up: `tiles` has them do so once, at the end
  split_k  1 to 8 thread blocks of a cluster among which k is divided
  bulk     1 has one lane copy a warp's weights in bulk, from compute capability 9.0 on; 0 has each lane copy 16 bytes of each 512
  prefetch steps of a warp whose weights are prefetched to L2 before the preceding kernel has ended
  cover    1 prefetches the first weights to L2 whose stages activations have at first
  interleave  1 gives a warp every so many-th step as there are warps, so that all of them read weights that follow each other; 0, and left
           out, steps that follow each other

Registers: a thread holds k / (split_k * warps) / 8 of activations for each eight rows, and of int4 2 sums of these for each group, or
each step where that is shorter: 144 at most, 72 where tiles have 32 rows.

Shared memory: warps * stages * rows * (step / 2 + scales) bytes of weights, where scales are the bytes of a row's scales and zero
points in a step; and m * (rows + 4) * 4 bytes for each tile, either warps times or, where `held` is less than `tiles`, once, and besides
2 * warps * held times. A warp's activations must leave one of its stages free.

Sums of a group are multiplied by its scale, in float32. Where rows are no whole tiles, the last one shares some with its neighbour, and
both compute these.

A kernel is for one number of rows, which its CUDA text names. Returns a custom kernel of TIRx, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.matmul_packed_persistent import PersistentParams
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.packed_gemm_kernel import problem_of
from kerneldecl.templates.gpu.packed_gemm_persistent_kernel import PersistentKernel, build
from kerneldecl.templates.gpu.packed_gemm_persistent_source import multiply_source
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the GEMM with its epilogue as one kernel, or None where it is another computation or these parameters do not take it."""
    chosen = PersistentParams(**{name: params[name] for name in PersistentParams._fields if name in params})  # type: ignore[arg-type]
    gpu = arch.the_gpu
    found = problem_of(mod, chosen, gpu)
    if found is None:
        return None
    problem, sizes = found
    functions = multiply_source(sizes, chosen, problem.gemm.a.dtype)
    return build(PersistentKernel(problem, sizes, chosen, supports_pdl(gpu), functions, chosen.smem_bytes(sizes)))
