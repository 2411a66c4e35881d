"""Owns the CUDA of a GEMM with packed 4-bit weights on mma.sync: each warp streams weights through stages of its own.

Knows nothing of epilogues or of how parameters are chosen.

Activations are in shared memory in rows, all of a thread block's or those of each step with its weights, and ldmatrix reads them.
Columns of a fragment beyond the last row of activations are computed of that row, and not stored.
"""

from __future__ import annotations

from kerneldecl.analysis.matmul_packed import BY_ROUNDS, BY_STEPS, PADDING_BYTES, PARTIAL_PADDING, PackedParams, PackedSizes
from kerneldecl.analysis.packed_weights import TILE_K, TILE_ROWS
from kerneldecl.templates.gpu.packed_gemm_cluster import cluster_source
from kerneldecl.templates.gpu.packed_gemm_copies import copies_source, kept_source
from kerneldecl.templates.gpu.packed_gemm_instructions import COMMITS, PREFETCH_LINE, in_namespace, mma_source
from kerneldecl.templates.gpu.packed_gemm_steps import step_source


def multiply_source(sizes: PackedSizes, params: PackedParams, dtype: str) -> tuple[str, str, str, str]:
    """Return the names of three functions and their CUDA: one prefetches a warp's first weights to L2, one prepares, the last multiplies.

    The second one's arguments are shared memory, the thread block's rank in its cluster, and the thread. The others' are weights, scales
    and zero points, for the last then activations and shared memory, then the block of rows, that rank, warp and lane. It leaves partial
    results [warp along k, row of activations, row of weights]; in a cluster besides, of the thread block's share of results, [thread block
    that has added it up over warps, result].
    """
    multiply, helper = step_source(sizes, params, dtype)
    body = f"""
{_constants(sizes, params)}
{mma_source(dtype)}{copies_source(is_bulk=bool(params.bulk))}{kept_source(is_kept=params.keeps_steps)}
{multiply}

{COMMITS}
{PREFETCH_LINE}{cluster_source(is_cluster=params.split_k > 1)}
{_KERNEL}
"""
    space, text = in_namespace("kd_packed", helper, body)
    return f"{space}::prefetch", f"{space}::prepare", f"{space}::multiply", text


def _constants(sizes: PackedSizes, params: PackedParams) -> str:
    """Return the sizes as constants."""
    block_k = params.block_steps(sizes) * sizes.step
    factor_bytes = params.rows * sizes.step_scales * sizes.factor_bytes
    values = {
        "M": sizes.m,
        "N": sizes.n,
        "STEP": sizes.step,
        "STEPS": sizes.steps,
        "GROUP": sizes.group,
        "TILES_K": sizes.step // TILE_K,
        "STEP_SCALES": sizes.step_scales,
        "SCALE_BYTES": sizes.scale_bytes,
        "HAS_ZEROS": int(sizes.has_zeros),
        "ROWS": params.rows,
        "TILES": params.rows // TILE_ROWS,
        "FRAGMENTS": sizes.fragments,
        "BLOCKS": params.row_blocks(sizes),
        "BLOCK_ROWS": params.block_rows,
        "BULK": params.bulk,
        "BARRIERS": params.barrier_offset(sizes),
        "STEP_BYTES": params.rows * sizes.step // 2 + factor_bytes,
        "WARPS_N": params.warps_n,
        "WARPS_K": params.warps_k,
        "THREADS": params.threads,
        "STAGES": params.stages,
        "STAGE_BYTES": params.stage_bytes(sizes),
        "WEIGHT_BYTES": params.rows * sizes.step // 2,
        "BLOCK_STEPS": params.block_steps(sizes),
        "BLOCK_K": block_k,
        "K": sizes.k,
        "STREAM": int(params.stream == BY_STEPS),
        "ROUNDS": int(params.stream == BY_ROUNDS),
        "KEPT": int(params.keeps_steps),
        "PITCH": (sizes.step if params.stream in (BY_STEPS, BY_ROUNDS) else block_k) * 2 + PADDING_BYTES,
        "ROW_VECTORS": sizes.step // 8,
        "STEP_ACTIVATIONS": params.rows * sizes.step // 2 + factor_bytes,
        "ROUND_BYTES": params.round_bytes(sizes),
        "ACTIVATION_BYTES": params.activation_bytes(sizes),
        "ACTIVATION_BARRIERS": params.activation_barrier_offset(sizes),
        "PARTIAL_PITCH": params.block_rows + PARTIAL_PADDING,
        "SPLIT_K": params.split_k,
        "RESULTS": params.results(sizes),
        "SHARE": params.share(sizes),
        "RECEIVED_BARRIER": params.received_barrier_offset(sizes),
        "RECEIVED": params.received_offset(sizes),
        "AHEAD": 1,
        "PREFETCHED": params.prefetch,
    }
    return "\n".join(f"constexpr int {name} = {value};" for name, value in values.items())


_KERNEL = """\
__device__ __forceinline__ void prefetch(const void* values, const void* scales, const void* zeros, int block, int rank, int number,
                                         int lane) {
  Warp warp{};
  warp.values = static_cast<const unsigned char*>(values);
  warp.row = first_row(block) + number % WARPS_N * ROWS;
  int begin = rank * BLOCK_STEPS + number / WARPS_N, end = min(STEPS, (rank + 1) * BLOCK_STEPS);
#pragma unroll
  for (int ahead = 0; ahead < PREFETCHED; ++ahead) {
    int step = begin + ahead * WARPS_K;
    if (step >= end) break;
#pragma unroll
    for (int first = 0; first < TILES_K * TILES * 4; first += 32) {
      int line = first + lane, k_tile = line / (TILES * 4);
      if (line < TILES_K * TILES * 4) prefetch_line(weights_of(warp, step) + k_tile * N * 32 + line % (TILES * 4) * 128);
    }
    int place = (step * STEP / GROUP + lane % STEP_SCALES) * N + warp.row;
    if (lane < STEP_SCALES) {
      prefetch_line(static_cast<const unsigned char*>(scales) + place * SCALE_BYTES);
      if (HAS_ZEROS) prefetch_line(static_cast<const unsigned char*>(zeros) + place);
    }
  }
}

// What needs nothing of the preceding kernel.
__device__ __forceinline__ void prepare(void* smem, int rank, int thread) {
  unsigned char* shared = static_cast<unsigned char*>(smem);
  join_cluster(shared, rank, thread);
  start_activations(shared, thread);
  __syncthreads();
}

__device__ __forceinline__ void fetch_activations(unsigned char* to, const unsigned char* from, int first_k, int thread) {
  constexpr int VECTORS = BLOCK_K / 8;
  for (int at = thread; at < M * VECTORS; at += THREADS) {
    int row = at / VECTORS, k = at % VECTORS * 8;
    if (first_k + k < K) copy(to + row * PITCH + k * 2, from + (row * K + first_k + k) * 2);
  }
}

// A step of activations for each warp along k.
__device__ __forceinline__ void fetch_round(unsigned char* to, const unsigned char* from, int first, int end, int thread) {
  constexpr int VECTORS = WARPS_K * ROW_VECTORS, ROWS_AT_ONCE = THREADS / VECTORS;
  int vector = thread % VECTORS, first_row = thread / VECTORS, step = vector / ROW_VECTORS;
  if (first + step >= end) return;
  from += first * (STEP * 2) + first_row * (K * 2) + vector * 16;
  to += (step * M + first_row) * PITCH + vector % ROW_VECTORS * 16;
#pragma unroll
  for (int row = 0; row < M; row += ROWS_AT_ONCE) {
    if (row + first_row < M) copy(to + row * PITCH, from + row * (K * 2));
  }
}

__device__ __forceinline__ void multiply(const void* values, const void* scales, const void* zeros, const void* activations, void* smem,
                                         int block, int rank, int number, int lane) {
  unsigned char* shared = static_cast<unsigned char*>(smem);
  int thread = number * 32 + lane, warp_n = number % WARPS_N, warp_k = number / WARPS_N;
  Warp warp;
  warp.values = static_cast<const unsigned char*>(values);
  warp.scales = static_cast<const unsigned char*>(scales);
  warp.zeros = static_cast<const unsigned char*>(zeros);
  warp.activations = static_cast<const unsigned char*>(activations);
  if (STREAM) warp.activations += (lane / ROW_VECTORS * K + lane % ROW_VECTORS * 8) * 2;
  warp.ring = shared + ACTIVATION_BYTES + number * (STAGES * STAGE_BYTES);
  warp.row = first_row(block) + warp_n * ROWS;
  warp.lane = lane;
  start_copies(warp, shared, number);
  int begin = rank * BLOCK_STEPS, end = min(STEPS, begin + BLOCK_STEPS), ahead = begin + warp_k;
  // All warps' first steps, then all activations, so that memory is busy while these come.
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    // Copies arrive in the order in which they start: the last warp's first step should not come behind all stages of other warps.
    if (stage > 0) __syncthreads();
    if (!STREAM && !ROUNDS && !KEPT && stage == AHEAD) {
      fetch_activations(shared, warp.activations, begin * STEP, thread);
      commit();
    }
    if (ahead < end) fetch(warp, ahead, stage);
    if (ROUNDS) fetch_round(shared + stage * ROUND_BYTES, warp.activations, ahead - warp_k, end, thread);
    fetch_kept(warp, shared, ahead, begin, end, warp_n);
    commit();
    ahead += WARPS_K;
  }
  if (!STREAM && !ROUNDS && !KEPT) {
    if (AHEAD >= STAGES - 1) {
      fetch_activations(shared, warp.activations, begin * STEP, thread);
      commit();
    }
    wait_for_copies<STAGES - 1 - AHEAD>();
    __syncthreads();
  }
  float acc[TILES][FRAGMENTS][4] = {};
  int stage = 0;
  unsigned turn = 0;
  for (int step = begin + warp_k; step - ROUNDS * warp_k < end; step += WARPS_K) {
    bool is_own = !ROUNDS || step < end;
    wait_for_copies<STAGES - 2>();
    if (is_own) wait_for_weights(warp, stage, turn);
    wait_for_kept(shared, step - begin);
    if (ROUNDS) __syncthreads();
    else __syncwarp();
    int next = stage == 0 ? STAGES - 1 : stage - 1;
    if (ahead < end) fetch(warp, ahead, next);
    if (ROUNDS) fetch_round(shared + next * ROUND_BYTES, warp.activations, ahead - warp_k, end, thread);
    fetch_kept(warp, shared, ahead, begin, end, warp_n);
    commit();
    ahead += WARPS_K;
    const unsigned char* from = warp.ring + stage * STAGE_BYTES;
    const unsigned char* of_round = shared + stage * ROUND_BYTES + warp_k * (M * PITCH);
    const unsigned char* columns = STREAM ? from + STEP_ACTIVATIONS : ROUNDS ? of_round : shared + (step - begin) * (STEP * 2);
    if (is_own) multiply_step(acc, from, columns, lane);
    turn ^= stage == STAGES - 1;
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }
  // Partial results take the place of what has been multiplied.
  wait_for_copies<0>();
  __syncthreads();
  float* partial = static_cast<float*>(smem) + warp_k * (M * PARTIAL_PITCH) + warp_n * ROWS + lane / 4;
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int fragment = 0; fragment < FRAGMENTS; ++fragment) {
#pragma unroll
      for (int at = 0; at < 4; ++at) {
        int column = fragment * 8 + lane % 4 * 2 + at % 2;
        float factor = at < 2 ? FACTOR : SECOND_FACTOR;
        if (column < M) partial[column * PARTIAL_PITCH + tile * 16 + at / 2 * 8] = acc[tile][fragment][at] * factor;
      }
    }
  }
  __syncthreads();
  exchange(shared, static_cast<const float*>(smem), rank, thread);
}
"""
