"""Owns the CUDA of a GEMV with packed 4-bit weights on mma.sync: each warp streams steps through stages of its own.

Knows nothing of epilogues or of how parameters are chosen.

A warp copies the activations of its own steps to shared memory, so that warps meet but for the order of the first copies, and for the sums
at the end. With one row of activations all eight columns of a fragment are that row, so that each lane of a quad has the results of every
tile of 16 rows: it scales those of one.
"""

from __future__ import annotations

from kerneldecl.analysis.gemv_packed import GemvPackedParams
from kerneldecl.analysis.matmul_packed import PackedSizes
from kerneldecl.templates.gpu.packed_gemm_instructions import COMMITS, in_namespace, mma_source
from kerneldecl.templates.gpu.packed_gemm_persistent_copies import copies_source
from kerneldecl.templates.gpu.packed_gemm_persistent_source import constants, constants_source
from kerneldecl.templates.gpu.packed_gemm_persistent_steps import int4_parts
from kerneldecl.templates.gpu.packed_gemm_steps import ONES


def gemv_source(sizes: PackedSizes, params: GemvPackedParams, dtype: str) -> tuple[str, str, str]:
    """Return the names of two functions and their CUDA, as `multiply_source` of the persistent GEMM does."""
    values = constants(sizes, params.walk) | {
        "PITCH": params.pitch(sizes),
        "ACTIVATION_BYTES": sizes.m * params.pitch(sizes),
        "RING_OFFSET": params.ring_offset(sizes),
        "BARRIERS": params.barrier_offset(sizes),
        "SETS": 1 if sizes.m == 1 else params.rows // 16,
    }
    parts, helper = int4_parts(sizes, dtype)
    body = f"""
{constants_source(values)}
{mma_source(dtype)}
{COMMITS}
{copies_source(is_bulk=bool(params.bulk), is_interleaved=True)}
{_STEP.format(ones=ONES[dtype], **parts)}
{_KERNEL}
"""
    space, text = in_namespace("kd_gemv_packed", helper, body)
    return f"{space}::prefetch", f"{space}::multiply", text


_STEP = """
{factors}
// A result of the tile that a lane has.
__device__ __forceinline__ float of_tile(const float (&sums)[TILES][4], int tile, int at) {{
  float found = sums[0][at];
#pragma unroll
  for (int other = 1; other < TILES; ++other) found = tile == other ? sums[other][at] : found;
  return found;
}}
__device__ __forceinline__ void multiply_step(float (&acc)[SETS][4], const unsigned char* own, int step, const unsigned char* stage,
                                              int lane) {{
  const unsigned ones[4] = {{{ones}, {ones}, {ones}, {ones}}};
{scales}
  uint4 words[TILES];
  unsigned b[4];
#pragma unroll
  for (int run = 0; run < STEP_SCALES; ++run) {{
    float sums[TILES][4] = {{}}, totals[4] = {{}};
#pragma unroll
    for (int part = run * RUN_PARTS; part < (run + 1) * RUN_PARTS; ++part) {{
      if (part % 2 == 0) load_activations(b, own, 0, step * STEP + part * 16, lane);
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {{
        if (part % 4 == 0) words[tile] = *reinterpret_cast<const uint4*>(stage + (part / 4 * TILES + tile) * 512 + lane * 16);
        const uint4 four = words[tile];
        unsigned a[4], word = part % 4 == 0 ? four.x : part % 4 == 1 ? four.y : part % 4 == 2 ? four.z : four.w;
        {name}(a, word);
        mma(sums[tile], a, b + part % 2 * 2);
      }}
      mma(totals, ones, b + part % 2 * 2);
    }}
#pragma unroll
    for (int set = 0; set < SETS; ++set) {{
      int tile = M == 1 ? lane % TILES : set;
{scale}
#pragma unroll
      for (int i = 0; i < 4; ++i) {{
        if (M == 1 && i % 2) continue;
        float sum = M == 1 ? of_tile(sums, tile, i) : sums[set][i];
        acc[set][i] += (sum + bias[i / 2] * totals[i % 2]) * scale[i / 2];
      }}
    }}
  }}
}}
"""

_KERNEL = """
__device__ __forceinline__ void prefetch(const void* values, const void* scales, const void* zeros, int block, int rank, int number,
                                         int lane) {
  prefetch_steps<0, PREFETCHED>(warp_of(values, scales, zeros, rank, number, lane), block);
}

// What a warp has of a tile's results goes to [row of activations, row of weights].
__device__ __forceinline__ void store_partial(float* to, const float (&acc)[SETS][4], int lane) {
  if (M == 1 && lane % 4 >= TILES) return;
#pragma unroll
  for (int set = 0; set < SETS; ++set) {
#pragma unroll
    for (int at = 0; at < 4; ++at) {
      if (M == 1 && at % 2) continue;
      int column = M == 1 ? 0 : lane % 4 * 2 + at % 2, row = (M == 1 ? lane % TILES : set) * 16 + at / 2 * 8 + lane / 4;
      if (column < M) to[column * SUM_PITCH + row] = acc[set][at] * (at < 2 ? FACTOR : SECOND_FACTOR);
    }
  }
}

// The step that a warp copies next.
struct Next {
  int tile, step;
};
__device__ __forceinline__ void fetch_next(const Warp& warp, Next& next, int stage) {
  fetch(warp, next.tile, next.step, stage);
  commit();
  bool is_last = ++next.step == SLICE_STEPS;
  next.tile += is_last ? BLOCKS : 0;
  next.step = is_last ? 0 : next.step;
}

__device__ __forceinline__ void multiply(const void* values, const void* scales, const void* zeros, const void* activations, void* smem,
                                         int block, int rank, int number, int lane) {
  unsigned char* shared = static_cast<unsigned char*>(smem);
  float* sums = static_cast<float*>(smem);
  Warp warp = warp_of(values, scales, zeros, rank, number, lane);
  unsigned char* own = shared + SUM_BYTES + number * ACTIVATION_BYTES;
  warp.ring = shared + RING_OFFSET + number * (STAGES * STAGE_BYTES);
  start_copies(warp, shared, number);
  // Activations come before the weights, or they would arrive after them.
  fetch_activations(warp, own, static_cast<const unsigned char*>(activations));
  commit();
  Next next{block, 0};
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    // Copies arrive in the order in which they start: the last warp's first step should not come behind all stages of other warps.
    if (stage > 0) __syncthreads();
    fetch_next(warp, next, stage);
  }
  int stage = 0, at = 0;
  unsigned turn = 0;
#pragma unroll 1
  for (int tile = block; tile < ROW_TILES; tile += BLOCKS, ++at) {
    float acc[SETS][4] = {};
#pragma unroll 1
    for (int step = 0; step < SLICE_STEPS; ++step) {
      // Of the first step the activations come with it.
      wait_for_copies<STAGES - 2>();
      wait_for_weights(warp, stage, turn);
      // To the stage that every lane has finished reading.
      __syncwarp();
      fetch_next(warp, next, stage == 0 ? STAGES - 1 : stage - 1);
      if (has_step(warp, step)) multiply_step(acc, own, step, warp.ring + stage * STAGE_BYTES, lane);
      turn ^= stage == STAGES - 1;
      stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    store_partial(sums + (number * TURNS + at) * (M * SUM_PITCH), acc, lane);
  }
  wait_for_copies<0>();
  __syncthreads();
}
"""
