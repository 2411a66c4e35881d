"""Owns the CUDA of a persistent GEMM with packed 4-bit weights on mma.sync: each warp keeps its activations and walks over tiles of rows.

Knows nothing of epilogues or of how parameters are chosen.

A warp's activations come to its last stages, and from there to registers, before weights come to these. Steps of the next tile are on their
way while those of this one are multiplied.
"""

from __future__ import annotations

from collections.abc import Mapping

from kerneldecl.analysis.gpu_limits import SM_PARTITIONS
from kerneldecl.analysis.matmul_packed import PADDING_BYTES, PARTIAL_PADDING, PackedSizes
from kerneldecl.analysis.matmul_packed_persistent import PersistentParams
from kerneldecl.analysis.packed_weights import TILE_K, TILE_ROWS
from kerneldecl.templates.gpu.packed_gemm_instructions import COMMITS, in_namespace, mma_source
from kerneldecl.templates.gpu.packed_gemm_persistent_copies import copies_source
from kerneldecl.templates.gpu.packed_gemm_persistent_steps import step_source

LONE_WARPS = 2 * SM_PARTITIONS
"""Warps up to which MMAs of one warp wait for each other longer than others' instructions take: a second set of sums costs 9 registers."""


def multiply_source(sizes: PackedSizes, params: PersistentParams, dtype: str) -> tuple[str, str, str]:
    """Return the names of two functions and their CUDA: one prefetches a warp's first weights to L2, the other leaves sums.

    Their arguments are weights, scales and zero points, for the second then the activations and shared memory, then the cluster or thread
    block, the thread block's rank in its cluster, warp and lane. Sums are [part, tile, row of activations, row of weights].
    """
    step, helper = step_source(sizes, dtype)
    body = f"""
{constants_source(constants(sizes, params))}
{mma_source(dtype)}
{COMMITS}
{copies_source(is_bulk=bool(params.bulk), is_interleaved=bool(params.interleave))}
{step}
{_KERNEL}
"""
    space, text = in_namespace("kd_persistent", helper, body)
    return f"{space}::prefetch", f"{space}::multiply", text


def constants_source(values: Mapping[str, int]) -> str:
    """Return CUDA that defines constants."""
    return "\n".join(f"constexpr int {name} = {value};" for name, value in values.items())


def constants(sizes: PackedSizes, params: PersistentParams) -> dict[str, int]:
    """Return the sizes that the CUDA names."""
    step_scales = params.step_scales(sizes)
    run_parts = params.step // 16 // step_scales
    is_lone = params.warps <= LONE_WARPS and params.rows == TILE_ROWS and sizes.fragments == 1
    return {
        "M": sizes.m,
        "N": sizes.n,
        "K": sizes.k,
        "GROUP": sizes.group,
        "SCALE_BYTES": sizes.scale_bytes,
        "HAS_ZEROS": int(sizes.has_zeros),
        "FRAGMENTS": sizes.fragments,
        "ROWS": params.rows,
        "TILES": params.rows // TILE_ROWS,
        "ROW_TILES": params.row_tiles(sizes),
        "BLOCKS": params.blocks(sizes),
        "TURNS": params.tiles,
        "STEP": params.step,
        "STEPS": params.steps(sizes),
        "TILES_K": params.step // TILE_K,
        "STEP_SCALES": step_scales,
        "RUN_PARTS": run_parts,
        "ADDS_ACTIVATIONS": int(not sizes.is_float4),
        "CHAINS": 2 if is_lone and run_parts > 1 else 1,
        "SLICE_STEPS": params.slice_steps(sizes),
        "IS_EVEN": int(params.is_even(sizes)),
        "WARPS": params.warps,
        "THREADS": params.threads,
        "STAGES": params.stages,
        "FREE_STAGES": params.free_stages(sizes),
        "FIRST_STAGES": params.first_stages(sizes),
        "COVER": params.cover,
        "STAGE_BYTES": params.stage_bytes(sizes),
        "WEIGHT_BYTES": params.rows * params.step // 2,
        "PITCH": params.slice_steps(sizes) * params.step * 2 + PADDING_BYTES,
        "ACTIVATION_BYTES": params.activation_bytes(sizes),
        "HELD": params.held,
        "ADDS_AT_END": int(params.adds_at_end),
        "SUM_PITCH": params.rows + PARTIAL_PADDING,
        "SUM_BYTES": params.sum_bytes(sizes),
        "RING_OFFSET": params.sum_bytes(sizes) + params.round_bytes(sizes),
        "BARRIERS": params.barrier_offset(sizes),
        "BULK": params.bulk,
        "PREFETCHED": params.prefetch,
        **({"STRIDE": params.stride} if params.interleave else {}),
    }


_KERNEL = """
__device__ __forceinline__ void prefetch(const void* values, const void* scales, const void* zeros, int block, int rank, int number,
                                         int lane) {
  prefetch_steps<0, PREFETCHED>(warp_of(values, scales, zeros, rank, number, lane), block);
}

// What a warp has of a tile's results goes to [row of activations, row of weights].
__device__ __forceinline__ void store_partial(float* to, const float (&acc)[TILES][FRAGMENTS][4], int lane) {
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int fragment = 0; fragment < FRAGMENTS; ++fragment) {
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        int column = fragment * 8 + lane % 4 * 2 + at % 2, row = tile * 16 + at / 2 * 8 + lane / 4;
        if (column < M) to[column * SUM_PITCH + row] = acc[tile][fragment][at] * (at < 2 ? FACTOR : SECOND_FACTOR);
      }
    }
  }
}

// Add up what warps hold of a round of tiles, in their order; thread blocks meet before.
__device__ __forceinline__ void add_round(float* sums, const float* partials, int tiles, int thread) {
  for (int at = thread; at < tiles * M * ROWS; at += THREADS) {
    int place = at / ROWS * SUM_PITCH + at % ROWS;
    float total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) total += partials[warp * (HELD * M * SUM_PITCH) + place];
    sums[place] = total;
  }
}

__device__ __forceinline__ void multiply(const void* values, const void* scales, const void* zeros, const void* activations, void* smem,
                                         int block, int rank, int number, int lane) {
  unsigned char* shared = static_cast<unsigned char*>(smem);
  float *sums = static_cast<float*>(smem), *rounds = sums + SUM_BYTES / 4;
  Warp warp = warp_of(values, scales, zeros, rank, number, lane);
  warp.ring = shared + RING_OFFSET + number * (STAGES * STAGE_BYTES);
  start_copies(warp, shared, number);
  // Weights of half as many bytes come before activations: DRAM is busy while these come from L2. Behind more of them they would be late.
  unsigned char* own = warp.ring + STAGES * STAGE_BYTES - ACTIVATION_BYTES;
#pragma unroll
  for (int stage = 0; stage < FREE_STAGES; ++stage) {
    // Copies arrive in the order in which they start: the last warp's first step should not come behind all stages of other warps.
    if (stage > 0) __syncthreads();
    if (stage == FIRST_STAGES) {
      fetch_activations(warp, own, static_cast<const unsigned char*>(activations));
      commit();
    }
    fetch(warp, block + stage / SLICE_STEPS * BLOCKS, stage % SLICE_STEPS, stage);
    commit();
  }
  if (FIRST_STAGES == FREE_STAGES) {
    fetch_activations(warp, own, static_cast<const unsigned char*>(activations));
    commit();
  }
  if (COVER) prefetch_steps<FREE_STAGES, STAGES - 1>(warp, block);
  wait_for_copies<FREE_STAGES - FIRST_STAGES>();
  __syncwarp();
  Slice slice;
  load_slice(slice, warp, own);
  if (BULK) asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
  __syncwarp();
#pragma unroll
  for (int stage = FREE_STAGES; stage < STAGES - 1; ++stage) {
    fetch(warp, block + stage / SLICE_STEPS * BLOCKS, stage % SLICE_STEPS, stage);
    commit();
  }
  if (ADDS_ACTIVATIONS) add_slice(slice, warp);
  int stage = 0, at = 0;
  unsigned turn = 0;
  for (int tile = block; tile < ROW_TILES; tile += BLOCKS, ++at) {
    float acc[TILES][FRAGMENTS][4] = {};
#pragma unroll
    for (int step = 0; step < SLICE_STEPS; ++step) {
      constexpr int AHEAD = STAGES - 1;
      wait_for_copies<STAGES - 2>();
      wait_for_weights(warp, stage, turn);
      __syncwarp();
      // To the stage that every lane has finished reading.
      int freed = stage == 0 ? STAGES - 1 : stage - 1;
      fetch(warp, tile + (step + AHEAD) / SLICE_STEPS * BLOCKS, (step + AHEAD) % SLICE_STEPS, freed);
      commit();
      if (has_step(warp, step)) multiply_step(acc, slice, step, warp.ring + stage * STAGE_BYTES, lane);
      turn ^= stage == STAGES - 1;
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    if (ADDS_AT_END) {
      store_partial(sums + (number * TURNS + at) * (M * SUM_PITCH), acc, lane);
      continue;
    }
    int round = at / HELD;
    float* partials = rounds + round % 2 * (WARPS * HELD * M * SUM_PITCH);
    store_partial(partials + (number * HELD + at % HELD) * (M * SUM_PITCH), acc, lane);
    if (at % HELD == HELD - 1 || tile + BLOCKS >= ROW_TILES) {
      __syncthreads();
      add_round(sums + round * (HELD * M * SUM_PITCH), partials, at % HELD + 1, number * 32 + lane);
    }
  }
  wait_for_copies<0>();
  __syncthreads();
}
"""
