"""Owns the GEMM kernel on wgmma: warp-specialised, TMA into a ring of stages, a fused epilogue.

Knows nothing of how its parameters are chosen, and recognises a GEMM by its structure, never by its names.

wgmma multiplies m rows of A by n columns of B: those of the GEMM, or with `swap_ab` the GEMM's n and m.

Parameters:
  block_m          rows of a tile: 64 or 128 (one or two MMA tiles) for each consumer that works on it
  block_n          columns of a tile: a multiple of 8 up to 256. A thread has an accumulator for each 128 elements of its consumer's
                   part of a tile, in at most 192, 192 or 104 registers with 1, 2 or 3 consumers; two of float16 share a register
  consumers        1 to 4 consumer warpgroups of 128 threads; one more is the producer
  stages           2 to 12 k-tiles of both operands in shared memory at once; a k-tile has 128 bytes of k
  cluster_m        1, 2 or 4: CTAs of a cluster along m, which share tiles of B by TMA multicast
  cluster_n        1, 2 or 4: CTAs of a cluster along n, which share tiles of A; the two make at most 4. A shared tile is cut in TMA
                   boxes of 8 rows or a multiple, 64 where k is not contiguous; a CTA loads at most four, and the last ones fewer
  raster_group     rows of tiles (of clusters' tiles) in a rasterization group: scheduled before the next column
  split_k          1 to 8 CTAs of a cluster among which k is split; they reduce accumulators in each other's shared memory, each one a
                   share of them. Then cluster_m and cluster_n are 1, but with a workspace, and each cluster has one tile
  workspace        1 has up to 64 CTAs of different clusters share k: a second kernel adds their partial accumulators, out of global
                   memory; 0 where it is left out
  kernel_schedule  "cooperative": all consumers share a tile; "staggered": two do, the second some k-tiles behind the first;
                   "pingpong": two have tiles of their own (block_m is then one consumer's). With the latter two, one's epilogue
                   overlaps the other's mainloop
  swap_ab          1 exchanges the operands: the GEMM's n become rows of tiles (block_m, cluster_m, raster_group), its m columns
  pdl              1 launches with PDL: the kernel starts as soon as the preceding one leaves room and waits for its end before loading
  pack             1 copies operands whose rows are no multiples of 16 bytes to a workspace where they are, by a kernel of its own
                   before; the GEMM kernel, which starts while that one ends, has TMA read the copies
  stream_k         1 or 2: so many last waves of tiles, of which the very last is not full, are divided by k-tiles over all SMs
                   (stream-K); partial accumulators meet in global memory. That takes kernel_schedule = "cooperative", two or three
                   consumers, split_k = 1, 32-bit accumulators, and pdl = 1: a small kernel before clears flags

Shared memory: stages * (block_m + block_n) * 128 bytes (where k is not contiguous: block_n rounded up to 64), 8192 bytes for each
consumer's epilogue buffer of 64 x 64 results of 16 bits (as many of 1, 2, 4 as fit and divide the tile), with split_k > 1
block_m * block_n * 4 bytes (2 of float16 accumulators; none with a workspace; in the stages' place where there is no room beside them,
which the CTAs of a cluster wait for each other to leave), 1 KiB of barriers and alignment. CTAs of one consumer
share an SM if it fits. A residual (an operand of the epilogue with the result's shape and dtype) is loaded by TMA while k-tiles are
multiplied, where epilogue buffers for a whole tile fit, without split-K and stream-K; else threads load it chunk by chunk.
The last rows of an operand that fill no tile are loaded alone where k is contiguous; wgmma multiplies what a stage holds in place of the
others, for results that are not stored.
Operands whose rows are no multiples of 16 bytes, and those of 8 or 32 bits whose k is not contiguous, are loaded through registers
(without `pack`); that takes clusters of 1. wgmma's operand A of TF32 is not: TMA loads it as it lies, and consumers give it to wgmma in
registers. That is A, or B with `swap_ab`.

Returns a custom kernel of TIRx, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule

from kerneldecl.analysis import tensor_cores
from kerneldecl.analysis.hopper_limits import K_TILE_BYTES, MMA_TILE_ROWS
from kerneldecl.model import Arch, Value
from kerneldecl.templates.hopper.epilogue import gemm_epilogue
from kerneldecl.templates.hopper.gemm_kernel import build
from kerneldecl.templates.hopper.kernel_config import GemmKernel
from kerneldecl.templates.hopper.operands import operand_of
from kerneldecl.templates.hopper.pack import Packing, packing_of
from kerneldecl.templates.hopper.params import GemmParams
from kerneldecl.templates.hopper.read_gemm import GemmProblem, Matrix, read_gemm
from kerneldecl.templates.hopper.tails import with_tail
from kerneldecl.templates.shared.fast_parse import fast_parsing


@fast_parsing()
def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the GEMM with its epilogue as one custom kernel, or None where wgmma or these parameters do not take it."""
    gemm = read_gemm(mod) if has_wgmma(arch) else None
    if gemm is None or not takes(gemm):
        return None
    kernel = kernel_of(gemm, GemmParams.of(params), bool(params["pack"]), arch)
    return None if kernel is None else build(kernel)


def has_wgmma(arch: Arch) -> bool:
    """Say whether a GPU has wgmma: compute capability 9, since instructions of sm_90a exist in no other."""
    return arch.the_gpu.compute_capability[0] == tensor_cores.first_capability("wgmma")[0]


def takes(gemm: GemmProblem) -> bool:
    """Say whether wgmma multiplies the GEMM's dtypes."""
    a, b = gemm.a.dtype, gemm.b.dtype
    return a == b and gemm.contraction.accum_dtype in tensor_cores.accumulators("wgmma", a)


def _packing(matrix: Matrix, *, is_a: bool) -> Packing | None:
    """Return the copy of an operand that TMA reads; None where it needs none, as wgmma's operand A that comes from registers."""
    operand = operand_of(matrix, MMA_TILE_ROWS, 1, is_a=is_a)
    return None if operand is None or operand.tma else packing_of(matrix)


def kernel_of(gemm: GemmProblem, params: GemmParams, is_packed: bool, arch: Arch) -> GemmKernel | None:
    """Return the kernel of these parameters, None where the operands or the parameters do not allow it."""
    batch, m, n, k = gemm.extents
    packings = [_packing(matrix, is_a=is_b == bool(params.swap_ab)) if is_packed else None for is_b, matrix in enumerate((gemm.a, gemm.b))]
    if is_packed and not any(packings):
        return None
    operands = [packing.copy if packing else matrix for packing, matrix in zip(packings, (gemm.a, gemm.b), strict=True)]
    (a_matrix, m), (b_matrix, n) = list(zip(operands, (m, n), strict=True))[:: -1 if params.swap_ab else 1]
    a = with_tail(operand_of(a_matrix, params.block_m, params.cluster_n, is_a=True), a_matrix, params.block_m)
    b = operand_of(b_matrix, params.block_n, params.cluster_m)
    if params.cluster_m == 1 or params.cluster_n == 1:
        # Else a CTA may have neither rows nor columns, wait for no load, and give back stages that others still fill.
        b = with_tail(b, b_matrix, params.block_n)
    k_tiles = -(-k * a_matrix.item_bytes // K_TILE_BYTES)
    accum_dtype = gemm.contraction.accum_dtype
    if a is None or b is None or not params.fits(a_matrix.dtype, accum_dtype, k_tiles, a.stage_bytes + b.stage_bytes):
        return None
    if params.cluster_m * params.cluster_n > 1 and (a.via_registers or b.via_registers):
        return None
    kernel = GemmKernel(
        func_params=gemm.func_params,
        dtype=a_matrix.dtype,
        accum_dtype=accum_dtype,
        a=a,
        b=b,
        epilogue=gemm_epilogue(gemm, (params.block_m, params.block_n), is_swapped=bool(params.swap_ab)),
        params=params,
        grid=(batch, -(-m // params.block_m), -(-n // params.block_n)),
        k_tiles=k_tiles,
        sm_count=arch.the_gpu.sm_count,
        packings=tuple(filter(None, packings)),
    )
    if params.stream_k > 0 and not kernel.has_stream_k_tiles:
        return None
    return kernel if kernel.can_store else None
