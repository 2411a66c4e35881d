"""Owns the CUDA that copies steps of a persistent GEMM's packed 4-bit weights to shared memory, its activations, and that prefetches to L2.

Knows nothing of how weights are multiplied or of how parameters are chosen.

Addresses are a warp's own and offsets that compilers know, but for the row: loops over the steps of a tile are unrolled.
"""

from __future__ import annotations

from string import Template

from kerneldecl.templates.gpu.packed_gemm_instructions import BARRIERS, COPY, NO_BARRIERS, PREFETCH_LINE

SLICES = {
    "first": "(rank * WARPS + number) * SLICE_STEPS",
    "steps": "max(0, min(SLICE_STEPS, STEPS - warp.first))",
    "step": "step",
    "vector": "vector",
}
"""Where a warp's steps begin, how many there are where some warps have more, where a step is, and a vector of activations: each warp has
steps that follow each other."""
INTERLEAVED = {
    "first": "rank * WARPS + number",
    "steps": "max(0, (STEPS - warp.first + STRIDE - 1) / STRIDE)",
    "step": "step * STRIDE",
    "vector": "(vector / (STEP / 8) * STRIDE * (STEP / 8) + vector % (STEP / 8))",
}
"""The same where each has every STRIDE-th step: all warps read weights that follow each other."""


def copies_source(*, is_bulk: bool, is_interleaved: bool = False) -> str:
    """Return CUDA of `prefetch_steps`, `fetch`, which starts the copies of a step, and of `fetch_activations`, all of a warp."""
    by_kind = f"{BARRIERS}{_BULK}" if is_bulk else f"{NO_BARRIERS}{_LANES}"
    text = Template(f"{_WARP}{COPY}{PREFETCH_LINE}{by_kind}{_FETCH}")
    return text.substitute(INTERLEAVED if is_interleaved else SLICES)


_WARP = """
struct Warp {
  const unsigned char *values, *scales, *zeros;
  unsigned char* ring;
  unsigned weights, factors;  // bytes and elements from there to the warp's first step in row 0: 32 bits, for which registers are scarce
  unsigned barriers;  // in shared memory, one for each stage, where copies are bulk
  int first, steps, lane;  // steps: those that it has of each tile, from the first on
};
__device__ __forceinline__ Warp warp_of(const void* values, const void* scales, const void* zeros, int rank, int number, int lane) {
  Warp warp{};
  warp.lane = lane;
  warp.first = $first;
  warp.steps = IS_EVEN ? SLICE_STEPS : $steps;
  warp.weights = warp.first * (TILES_K * N * 32);
  warp.factors = warp.first * STEP / GROUP * N;
  warp.values = static_cast<const unsigned char*>(values);
  warp.scales = static_cast<const unsigned char*>(scales);
  warp.zeros = static_cast<const unsigned char*>(zeros);
  return warp;
}
// The last tile begins earlier where its rows would lie beyond the end, and both compute what it shares with its neighbour.
__device__ __forceinline__ int first_row(int tile) { return N % ROWS == 0 ? tile * ROWS : min(tile * ROWS, N - ROWS); }
// The first group of a step, counted from that of the warp's first step.
__device__ __forceinline__ int first_group(const Warp& warp, int step) {
  return GROUP <= STEP ? $step * STEP_SCALES : (warp.first + $step) * STEP / GROUP - warp.first * STEP / GROUP;
}
__device__ __forceinline__ unsigned factors_of(const Warp& warp, int row, int step) {
  return warp.factors + row + first_group(warp, step) * N;
}
__device__ __forceinline__ bool has_step(const Warp& warp, int step) { return IS_EVEN || step < warp.steps; }
"""

_LANES = """
template <int BYTES>
__device__ __forceinline__ void fetch_factors(const Warp& warp, unsigned char* to, const unsigned char* from, unsigned place) {
  constexpr int VECTORS = ROWS * BYTES / 16;
  from += (warp.lane / VECTORS * N + warp.lane % VECTORS * (16 / BYTES) + place) * BYTES;
#pragma unroll
  for (int first = 0; first < STEP_SCALES * VECTORS; first += 32) {
    int vector = first + warp.lane;
    if (vector < STEP_SCALES * VECTORS) copy(to + vector * 16, from + first / VECTORS * (N * BYTES));
  }
}
__device__ __forceinline__ void fetch_step(const Warp& warp, int row, int step, int stage) {
  unsigned char* to = warp.ring + stage * STAGE_BYTES;
  const unsigned char* from = warp.values + (warp.weights + warp.lane * 16 + row * 32);
#pragma unroll
  for (int k_tile = 0; k_tile < TILES_K; ++k_tile) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      copy(to + (k_tile * TILES + tile) * 512 + warp.lane * 16, from + ($step * TILES_K + k_tile) * (N * 32) + tile * 512);
    }
  }
  unsigned place = factors_of(warp, row, step);
  fetch_factors<SCALE_BYTES>(warp, to + WEIGHT_BYTES, warp.scales, place);
  if (HAS_ZEROS) fetch_factors<1>(warp, to + WEIGHT_BYTES + STEP_SCALES * ROWS * SCALE_BYTES, warp.zeros, place);
}
__device__ __forceinline__ void skip_step(const Warp&, int) {}
"""

_BULK = """
template <int BYTES>
__device__ __forceinline__ void fetch_factors(unsigned char* to, const unsigned char* from, unsigned barrier) {
#pragma unroll
  for (int group = 0; group < STEP_SCALES; ++group) copy_bulk(to + group * ROWS * BYTES, from + group * (N * BYTES), ROWS * BYTES, barrier);
}
__device__ __forceinline__ void fetch_step(const Warp& warp, int row, int step, int stage) {
  if (warp.lane != 0) return;
  unsigned char* to = warp.ring + stage * STAGE_BYTES;
  unsigned barrier = warp.barriers + stage * 8;
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" : : "r"(barrier), "r"(STAGE_BYTES) : "memory");
#pragma unroll
  for (int k_tile = 0; k_tile < TILES_K; ++k_tile) {
    const unsigned char* from = warp.values + (warp.weights + row * 32) + ($step * TILES_K + k_tile) * (N * 32);
    copy_bulk(to + k_tile * TILES * 512, from, TILES * 512, barrier);
  }
  unsigned place = factors_of(warp, row, step);
  fetch_factors<SCALE_BYTES>(to + WEIGHT_BYTES, warp.scales + place * SCALE_BYTES, barrier);
  if (HAS_ZEROS) fetch_factors<1>(to + WEIGHT_BYTES + STEP_SCALES * ROWS * SCALE_BYTES, warp.zeros + place, barrier);
}
// The phases of barriers go on where the warp has no weights.
__device__ __forceinline__ void skip_step(const Warp& warp, int stage) {
  if (warp.lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(warp.barriers + stage * 8) : "memory");
}
"""

_FETCH = """
// Start the copies of a step of a tile, if there are both.
__device__ __forceinline__ void fetch(const Warp& warp, int tile, int step, int stage) {
  if (tile >= ROW_TILES) return;
  if (has_step(warp, step)) fetch_step(warp, first_row(tile), step, stage);
  else skip_step(warp, stage);
}
__device__ __forceinline__ void fetch_activations(const Warp& warp, unsigned char* to, const unsigned char* activations) {
  constexpr int VECTORS = SLICE_STEPS * STEP / 8;
  int vectors = warp.steps * (STEP / 8);
  const unsigned char* from = activations + warp.first * (STEP * 2);
#pragma unroll
  for (int first = 0; first < M * VECTORS; first += 32) {
    int at = first + warp.lane, row = at / VECTORS, vector = at % VECTORS;
    if (at < M * VECTORS && (IS_EVEN || vector < vectors)) copy(to + row * PITCH + vector * 16, from + row * (K * 2) + $vector * 16);
  }
}
template <int BEGIN, int END>
__device__ __forceinline__ void prefetch_steps(const Warp& warp, int block) {
#pragma unroll
  for (int ahead = BEGIN; ahead < END; ++ahead) {
    int tile = block + ahead / SLICE_STEPS * BLOCKS, step = ahead % SLICE_STEPS;
    if (tile >= ROW_TILES || !has_step(warp, step)) continue;
    int row = first_row(tile);
    unsigned place = factors_of(warp, row, step) + warp.lane * N;
#pragma unroll
    for (int first = 0; first < TILES_K * TILES * 4; first += 32) {
      int line = first + warp.lane, k_tile = line / (TILES * 4);
      const unsigned char* from = warp.values + (warp.weights + row * 32) + ($step * TILES_K + k_tile) * (N * 32);
      if (line < TILES_K * TILES * 4) prefetch_line(from + line % (TILES * 4) * 128);
    }
    if (warp.lane < STEP_SCALES) {
      prefetch_line(warp.scales + place * SCALE_BYTES);
      if (HAS_ZEROS) prefetch_line(warp.zeros + place);
    }
  }
}
"""
