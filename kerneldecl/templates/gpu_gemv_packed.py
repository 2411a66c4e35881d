"""Owns the kernel of a GEMV with packed 4-bit weights on mma.sync: warps stream weights that follow each other, all k at once.

Knows nothing of how its parameters are chosen, and recognises the computation by its structure: the weights are those of rule
`matmul_quantized` with layout `packed`: int4 of float16 or bfloat16, with one scale for each group of 32 or more weights along k or for a
whole row. Activations have 1 to 8 rows. Blocks of float4_e2m1fn are for `gpu_matmul_packed_persistent`.

The operands are exchanged: the GEMM's n are rows of fragments, its m columns.

Parameters:
  rows     rows of weights of a tile: 16, 32 or 64, which follow each other in memory for each 64 elements along k
  step     elements along k that a warp copies and multiplies at once: 64, 128 or 256, which divide k
  warps    warps of a thread block, each with every `warps`th step of each tile
  tiles    tiles of a thread block at most: it has each one that comes as many tiles behind another as there are thread blocks
  blocks   thread blocks for which an SM has registers and shared memory
  stages   2 to 24 steps that a warp has in shared memory or on their way to it, those of the next tile behind those of this one
  bulk     1 has one lane copy a warp's weights in bulk, from compute capability 9.0 on; 0 has each lane copy 16 bytes of each 512
  prefetch steps of a warp whose weights are prefetched to L2 before the preceding kernel has ended
  alone    1 has a thread block ask for so much shared memory that an SM holds `blocks` of them and no more: with PDL the next kernel's come
           as soon as there is room, and where the grid does not fill all SMs evenly, some SMs then get two of one kernel and others none

Shared memory: warps * stages * rows * (step / 2 + scales) bytes of weights, where scales are the bytes of a row's scales and zero points in
a step; m * (2 * k + 16 * warps) bytes of activations, or some more where warps have no even number of steps; and m * (rows + 4) * 4 bytes
of sums for each warp and tile.

Sums of a group are multiplied by its scale, in float32. Where rows are no whole tiles, the last one shares some with its neighbour, and
both compute these.

A kernel is for one number of rows, which its CUDA text names. Returns a custom kernel of TIRx, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis.gemv_packed import GemvPackedParams
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Value
from kerneldecl.templates.gpu.gemv_packed_source import gemv_source
from kerneldecl.templates.gpu.packed_gemm_kernel import problem_of
from kerneldecl.templates.gpu.packed_gemm_persistent_kernel import PersistentKernel, build
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the GEMV with its epilogue as one kernel, or None where it is another computation or these parameters do not take it."""
    chosen = GemvPackedParams(**{name: params[name] for name in GemvPackedParams._fields if name in params})  # type: ignore[arg-type]
    gpu = arch.the_gpu
    found = problem_of(mod, chosen, gpu)
    if found is None:
        return None
    problem, sizes = found
    functions = gemv_source(sizes, chosen, problem.gemm.a.dtype)
    return build(PersistentKernel(problem, sizes, chosen.walk, supports_pdl(gpu), functions, chosen.smem_bytes(sizes, gpu), chosen.blocks))
