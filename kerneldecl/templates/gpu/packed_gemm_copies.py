"""Owns the CUDA that copies a warp's steps of packed 4-bit weights to shared memory, by cp.async or in bulk, and activations with them.

Knows nothing of how weights are multiplied or of how parameters are chosen.

A lane copies 16 bytes of each tile by cp.async and reads the same bytes back, so that warps wait for their own copies alone. In bulk one
lane copies all rows of a tile along k at once, and the warp waits at an mbarrier of the stage. Activations come by cp.async. Where they
stay, each step's come once, and warps of other rows of weights wait at the step's mbarrier as well.
"""

from __future__ import annotations

from kerneldecl.templates.gpu.packed_gemm_instructions import BARRIERS, COPY, NO_BARRIERS


def copies_source(*, is_bulk: bool) -> str:
    """Return CUDA of `fetch`, which starts the copies of a step, and of how a warp prepares for copies and waits for weights."""
    by_kind = f"\n{BARRIERS}{_BULK}" if is_bulk else f"\n{NO_BARRIERS}{_LANES}"
    return f"{_WARP}{COPY}{_WEIGHTS_OF}{by_kind}{_FETCH}"


def kept_source(*, is_kept: bool) -> str:
    """Return CUDA by which a thread block copies each step of activations once and waits for it; else that of functions without effect."""
    return _KEPT if is_kept else _NOT_KEPT


_WARP = """
struct Warp {
  const unsigned char *values, *scales, *zeros, *activations;  // activations: those of the lane, where they come with steps
  unsigned char* ring;
  unsigned barriers;  // in shared memory, one for each stage, where copies are bulk
  int row, lane;
};
// Where blocks have more rows than there are, neighbours share some.
__device__ __forceinline__ int first_row(int block) { return BLOCKS == 1 ? 0 : block * ((N - BLOCK_ROWS) / 16) / (BLOCKS - 1) * 16; }
"""

_WEIGHTS_OF = """\
__device__ __forceinline__ const unsigned char* weights_of(const Warp& warp, int step) {
  return warp.values + warp.row * 32 + step * (TILES_K * N * 32);
}
"""

_LANES = """\
template <int BYTES>
__device__ __forceinline__ void fetch_factors(const Warp& warp, unsigned char* to, const unsigned char* from, int step) {
  constexpr int VECTORS = ROWS * BYTES / 16;
#pragma unroll
  for (int first = 0; first < STEP_SCALES * VECTORS; first += 32) {
    int vector = first + warp.lane, row = warp.row + vector % VECTORS * (16 / BYTES);
    if (vector < STEP_SCALES * VECTORS) copy(to + vector * 16, from + ((step * STEP / GROUP + vector / VECTORS) * N + row) * BYTES);
  }
}
__device__ __forceinline__ void fetch_weights(const Warp& warp, unsigned char* to, int step, int) {
  const unsigned char* from = weights_of(warp, step) + warp.lane * 16;
#pragma unroll
  for (int k_tile = 0; k_tile < TILES_K; ++k_tile) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      copy(to + (k_tile * TILES + tile) * 512 + warp.lane * 16, from + (k_tile * N + tile * 16) * 32);
    }
  }
  fetch_factors<SCALE_BYTES>(warp, to + WEIGHT_BYTES, warp.scales, step);
  if (HAS_ZEROS) fetch_factors<1>(warp, to + WEIGHT_BYTES + STEP_SCALES * ROWS * SCALE_BYTES, warp.zeros, step);
}
"""

_BULK = """\
template <int BYTES>
__device__ __forceinline__ void fetch_factors(const Warp& warp, unsigned char* to, const unsigned char* from, int step, unsigned barrier) {
#pragma unroll
  for (int group = 0; group < STEP_SCALES; ++group) {
    copy_bulk(to + group * ROWS * BYTES, from + ((step * STEP / GROUP + group) * N + warp.row) * BYTES, ROWS * BYTES, barrier);
  }
}
__device__ __forceinline__ void fetch_weights(const Warp& warp, unsigned char* to, int step, int stage) {
  if (warp.lane != 0) return;
  unsigned barrier = warp.barriers + stage * 8;
  const unsigned char* from = weights_of(warp, step);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(barrier), "r"(STEP_BYTES) : "memory");
#pragma unroll
  for (int k_tile = 0; k_tile < TILES_K; ++k_tile) {
    copy_bulk(to + k_tile * TILES * 512, from + k_tile * N * 32, TILES * 512, barrier);
  }
  fetch_factors<SCALE_BYTES>(warp, to + WEIGHT_BYTES, warp.scales, step, barrier);
  if (HAS_ZEROS) fetch_factors<1>(warp, to + WEIGHT_BYTES + STEP_SCALES * ROWS * SCALE_BYTES, warp.zeros, step, barrier);
}
"""

_FETCH = """
__device__ __forceinline__ void fetch(const Warp& warp, int step, int stage) {
  unsigned char* to = warp.ring + stage * STAGE_BYTES;
  fetch_weights(warp, to, step, stage);
  if (STREAM) {
    const unsigned char* from = warp.activations + step * (STEP * 2);
    unsigned char* row = to + STEP_ACTIVATIONS + warp.lane / ROW_VECTORS * PITCH + warp.lane % ROW_VECTORS * 16;
#pragma unroll
    for (int first = 0; first < M; first += 32 / ROW_VECTORS) {
      if (first + warp.lane / ROW_VECTORS < M) copy(row + first * PITCH, from + first * (K * 2));
    }
  }
}
"""

_NOT_KEPT = """
__device__ __forceinline__ void start_activations(unsigned char*, int) {}
__device__ __forceinline__ void fetch_kept(const Warp&, unsigned char*, int, int, int, int) {}
__device__ __forceinline__ void wait_for_kept(unsigned char*, int) {}
"""

_KEPT = """
__device__ __forceinline__ unsigned barrier_of(unsigned char* shared, int step) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared)) + ACTIVATION_BARRIERS + step * 8;
}
__device__ __forceinline__ void start_activations(unsigned char* shared, int thread) {
  if (thread < BLOCK_STEPS) asm volatile("mbarrier.init.shared::cta.b64 [%0], 32;" : : "r"(barrier_of(shared, thread)) : "memory");
}
// Warps with the same steps take turns.
__device__ __forceinline__ void fetch_kept(const Warp& warp, unsigned char* shared, int step, int begin, int end, int warp_n) {
  int place = step - begin, first_row = warp.lane / ROW_VECTORS, vector = warp.lane % ROW_VECTORS;
  if (step >= end || place / WARPS_K % WARPS_N != warp_n) return;
  const unsigned char* from = warp.activations + first_row * (K * 2) + step * (STEP * 2) + vector * 16;
  unsigned char* to = shared + first_row * PITCH + place * (STEP * 2) + vector * 16;
#pragma unroll
  for (int row = 0; row < M; row += 32 / ROW_VECTORS) {
    if (row + first_row < M) copy(to + row * PITCH, from + row * (K * 2));
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" : : "r"(barrier_of(shared, place)) : "memory");
}
__device__ __forceinline__ void wait_for_kept(unsigned char* shared, int step) {
  unsigned is_done = 0;
  while (!is_done) {
    asm volatile("{ .reg .pred done; mbarrier.try_wait.parity.shared::cta.b64 done, [%1], 0; selp.b32 %0, 1, 0, done; }"
                 : "=r"(is_done) : "r"(barrier_of(shared, step)) : "memory");
  }
}
"""
