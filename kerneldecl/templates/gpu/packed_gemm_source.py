"""Owns the CUDA of a GEMM with packed 4-bit weights on mma.sync: each warp streams weights through stages of its own.

Knows nothing of epilogues or of how parameters are chosen.

A lane copies 16 bytes of each tile by cp.async and reads the same bytes back, so that warps wait for their own copies alone. Activations
are in shared memory in rows, all of a thread block's at once or those of each step with its weights, and ldmatrix reads them. Columns of
a fragment beyond the last row of activations are computed of that row, and not stored.
"""

from __future__ import annotations

import hashlib

from kerneldecl.analysis.matmul_packed import PADDING_BYTES, PARTIAL_PADDING, PackedParams, PackedSizes
from kerneldecl.analysis.packed_weights import TILE_K, TILE_ROWS
from kerneldecl.compiler.intrinsics import float4_fragments, int4_fragments

_NAMES = {"float16": ("half", "f16", "__half2float"), "bfloat16": ("__nv_bfloat16", "bf16", "__bfloat162float")}


def multiply_source(sizes: PackedSizes, params: PackedParams, dtype: str) -> tuple[str, str, str]:
    """Return the names of two functions and their CUDA: one prefetches a warp's first weights to L2, the other leaves partial results.

    Their arguments are weights, scales and zero points, for the second then the activations and shared memory, then the block of rows, the
    thread block's rank in its cluster, warp and lane. Partial results are [warp along k, row of activations, row of weights].
    """
    _, mma, _ = _NAMES[dtype]
    multiply, helper = _multiply_sums(sizes, dtype) if params.scales_sums(sizes) else _multiply_scaled(sizes, params, dtype)
    body = f"""
{_constants(sizes, params)}
struct Warp {{
  const unsigned char *values, *scales, *zeros, *activations;  // activations: those of the lane, where they come with steps
  unsigned char* ring;
  int row, lane;
}};
__device__ __forceinline__ void copy(const void* to, const void* from) {{
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" : : "r"(at), "l"(from) : "memory");
}}
__device__ __forceinline__ void load_activations(unsigned* b, const unsigned char* activations, int column, int k, int lane) {{
  const unsigned char* from = activations + min(column + lane % 8, M - 1) * PITCH + (k + lane / 8 * 8) * 2;
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(from));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%0, %1, %2, %3}}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(at) : "memory");
}}
__device__ __forceinline__ void mma(float* c, const unsigned* a, const unsigned* b) {{
  asm("mma.sync.aligned.m16n8k16.row.col.f32.{mma}.{mma}.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}}
{_FETCH}
{multiply}
{_KERNEL}
"""
    space = f"kd_packed_{hashlib.sha256((helper + body).encode()).hexdigest()[:12]}"
    text = f"""#ifndef {space}_text
#define {space}_text
#include <cuda_fp16.h>
#include <cuda_bf16.h>
{helper}
namespace {space} {{{body}}}
#endif
"""
    return f"{space}::prefetch", f"{space}::multiply", text


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
        "WARPS_N": params.warps_n,
        "WARPS_K": params.warps_k,
        "THREADS": params.threads,
        "STAGES": params.stages,
        "STAGE_BYTES": params.stage_bytes(sizes),
        "WEIGHT_BYTES": params.rows * sizes.step // 2,
        "BLOCK_STEPS": params.block_steps(sizes),
        "BLOCK_K": block_k,
        "K": sizes.k,
        "STREAM": params.stream,
        "PITCH": (sizes.step if params.stream else block_k) * 2 + PADDING_BYTES,
        "ROW_VECTORS": sizes.step // 8,
        "STEP_ACTIVATIONS": params.rows * sizes.step // 2 + factor_bytes,
        "ACTIVATION_BYTES": params.activation_bytes(sizes),
        "PARTIAL_PITCH": params.block_rows + PARTIAL_PADDING,
        "AHEAD": params.stages // 2,
    }
    return "\n".join(f"constexpr int {name} = {value};" for name, value in values.items())


_FETCH = """
__device__ __forceinline__ const unsigned char* weights_of(const Warp& warp, int k_tile, int tile) {
  int row_tile = warp.row / 16 + tile;
  if (N % (ROWS * WARPS_N) != 0) row_tile = min(row_tile, N / 16 - 1);
  return warp.values + (k_tile * (N / 16) + row_tile) * 512;
}
template <int BYTES>
__device__ __forceinline__ void fetch_factors(const Warp& warp, unsigned char* to, const unsigned char* from, int step) {
  constexpr int VECTORS = ROWS * BYTES / 16;
#pragma unroll
  for (int first = 0; first < STEP_SCALES * VECTORS; first += 32) {
    int vector = first + warp.lane, row = warp.row + vector % VECTORS * (16 / BYTES);
    if (N % (ROWS * WARPS_N) != 0) row = min(row, N - 16 / BYTES);
    if (vector < STEP_SCALES * VECTORS) copy(to + vector * 16, from + ((step * STEP / GROUP + vector / VECTORS) * N + row) * BYTES);
  }
}
__device__ __forceinline__ void fetch(const Warp& warp, int step, int stage) {
  unsigned char* to = warp.ring + stage * STAGE_BYTES;
#pragma unroll
  for (int k_tile = 0; k_tile < TILES_K; ++k_tile) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      copy(to + (k_tile * TILES + tile) * 512 + warp.lane * 16, weights_of(warp, step * TILES_K + k_tile, tile) + warp.lane * 16);
    }
  }
  fetch_factors<SCALE_BYTES>(warp, to + WEIGHT_BYTES, warp.scales, step);
  if (HAS_ZEROS) fetch_factors<1>(warp, to + WEIGHT_BYTES + STEP_SCALES * ROWS * SCALE_BYTES, warp.zeros, step);
  if (STREAM) {
    unsigned char* row = to + STEP_ACTIVATIONS + warp.lane / ROW_VECTORS * PITCH + warp.lane % ROW_VECTORS * 16;
#pragma unroll
    for (int first = 0; first < M; first += 32 / ROW_VECTORS) {
      if (first + warp.lane / ROW_VECTORS < M) copy(row + first * PITCH, warp.activations + (step * STEP + first * K) * 2);
    }
  }
}
"""

_KERNEL = """
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" : : : "memory"); }
template <int PENDING>
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory"); }

__device__ __forceinline__ void prefetch_line(const unsigned char* from) { asm volatile("prefetch.global.L2 [%0];" : : "l"(from)); }

__device__ __forceinline__ void prefetch(const void* values, const void* scales, const void* zeros, int block, int rank, int number,
                                         int lane) {
  Warp warp{};
  warp.values = static_cast<const unsigned char*>(values);
  warp.row = (block * WARPS_N + number % WARPS_N) * ROWS;
  int begin = rank * BLOCK_STEPS + number / WARPS_N, end = min(STEPS, (rank + 1) * BLOCK_STEPS), row = min(warp.row, N - 1);
#pragma unroll
  for (int ahead = 0; ahead < STAGES - 1; ++ahead) {
    int step = begin + ahead * WARPS_K;
    if (step >= end) break;
#pragma unroll
    for (int first = 0; first < TILES_K * TILES * 4; first += 32) {
      int line = first + lane, k_tile = step * TILES_K + line / (TILES * 4);
      if (line < TILES_K * TILES * 4) prefetch_line(weights_of(warp, k_tile, line / 4 % TILES) + line % 4 * 128);
    }
    int place = (step * STEP / GROUP + lane % STEP_SCALES) * N + row;
    if (lane < STEP_SCALES) {
      prefetch_line(static_cast<const unsigned char*>(scales) + place * SCALE_BYTES);
      if (HAS_ZEROS) prefetch_line(static_cast<const unsigned char*>(zeros) + place);
    }
  }
}

__device__ __forceinline__ void fetch_activations(unsigned char* to, const unsigned char* from, int first_k, int thread) {
  constexpr int VECTORS = BLOCK_K / 8;
  for (int at = thread; at < M * VECTORS; at += THREADS) {
    int row = at / VECTORS, k = at % VECTORS * 8;
    if (first_k + k < K) copy(to + row * PITCH + k * 2, from + (row * K + first_k + k) * 2);
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
  warp.row = (block * WARPS_N + warp_n) * ROWS;
  warp.lane = lane;
  int begin = rank * BLOCK_STEPS, end = min(STEPS, begin + BLOCK_STEPS), ahead = begin + warp_k;
  // Half of the first steps, then all activations, so that memory is busy while these come.
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (!STREAM && stage == AHEAD) {
      fetch_activations(shared, warp.activations, begin * STEP, thread);
      commit();
    }
    if (ahead < end) fetch(warp, ahead, stage);
    commit();
    ahead += WARPS_K;
  }
  if (!STREAM) {
    if (AHEAD >= STAGES - 1) {
      fetch_activations(shared, warp.activations, begin * STEP, thread);
      commit();
    }
    wait_for_copies<STAGES - 1 - AHEAD>();
    __syncthreads();
  }
  float acc[TILES][FRAGMENTS][4] = {};
  int stage = 0;
  for (int step = begin + warp_k; step < end; step += WARPS_K) {
    wait_for_copies<STAGES - 2>();
    __syncwarp();
    int next = stage == 0 ? STAGES - 1 : stage - 1;
    if (ahead < end) fetch(warp, ahead, next);
    commit();
    ahead += WARPS_K;
    const unsigned char* from = warp.ring + stage * STAGE_BYTES;
    multiply_step(acc, from, STREAM ? from + STEP_ACTIVATIONS : shared + (step - begin) * (STEP * 2), lane);
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
        if (column < M) partial[column * PARTIAL_PITCH + tile * 16 + at / 2 * 8] = acc[tile][fragment][at] * FACTOR;
      }
    }
  }
  __syncthreads();
}
"""


def _multiply_sums(sizes: PackedSizes, dtype: str) -> tuple[str, str]:
    """Return the multiplication of a step in which sums of a group are scaled, and the functions that it calls."""
    if sizes.is_float4:
        values, helper, factor = float4_fragments.values_source(dtype)
        widen, wide_scale = float4_fragments.wide_scale_source(sizes.scale_dtype)
        helper += wide_scale
        prepared, scale, bias = _QUADS_SCALES.format(widen=widen), "__shfl_sync(~0u, own[tile][group / 4][{row}], group % 4, 4)", ""
        fragments = f"{values}(a, word);"
    else:
        (values, helper), factor = int4_fragments.values_source(dtype, has_zeros=sizes.has_zeros), 1.0
        ctype, _, widen = _NAMES[dtype]
        prepared = f"  const {ctype}* scales = reinterpret_cast<const {ctype}*>(stage + WEIGHT_BYTES);"
        scale = f"{widen}(scales[group * ROWS + tile * 16 + lane / 4 + {{row}} * 8])"
        zero = "zeros[group * ROWS + tile * 16 + lane / 4 + {row} * 8]" if sizes.has_zeros else "8u"
        bias = f"{values}_bias(bias[tile], {zero.format(row=0)}, {zero.format(row=1)});"
        fragments = f"{values}(a, word, bias[tile]);"
    text = f"""
constexpr float FACTOR = {factor}f;
__device__ __forceinline__ void multiply_step(float (&acc)[TILES][FRAGMENTS][4], const unsigned char* stage,
                                              const unsigned char* activations, int lane) {{
  constexpr int GROUP_PARTS = STEP / 16 / STEP_SCALES;
  const unsigned char* zeros = stage + WEIGHT_BYTES + STEP_SCALES * ROWS * SCALE_BYTES;
{prepared}
  float sums[TILES][FRAGMENTS][4];
  unsigned b[FRAGMENTS][4], bias[TILES][2];
  uint4 words[TILES];
#pragma unroll
  for (int part = 0; part < STEP / 16; ++part) {{
    int group = part / GROUP_PARTS;
    if (part % 2 == 0) {{
#pragma unroll
      for (int fragment = 0; fragment < FRAGMENTS; ++fragment) load_activations(b[fragment], activations, fragment * 8, part * 16, lane);
    }}
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {{
      const unsigned char* from = stage + (part / 4 * TILES + tile) * 512 + lane * 16;
      if (part % 4 == 0) words[tile] = *reinterpret_cast<const uint4*>(from);
      if (part % GROUP_PARTS == 0) {{
        {bias}
#pragma unroll
        for (int i = 0; i < FRAGMENTS * 4; ++i) sums[tile][i / 4][i % 4] = 0.0f;
      }}
      const uint4 four = words[tile];
      unsigned a[4], word = part % 4 == 0 ? four.x : part % 4 == 1 ? four.y : part % 4 == 2 ? four.z : four.w;
      {fragments}
#pragma unroll
      for (int fragment = 0; fragment < FRAGMENTS; ++fragment) mma(sums[tile][fragment], a, b[fragment] + part % 2 * 2);
      if ((part + 1) % GROUP_PARTS == 0) {{
        float first = {scale.format(row=0)}, second = {scale.format(row=1)};
#pragma unroll
        for (int i = 0; i < FRAGMENTS * 4; ++i) acc[tile][i / 4][i % 4] += sums[tile][i / 4][i % 4] * (i % 4 < 2 ? first : second);
      }}
    }}
  }}
}}
"""
    return text, helper


_QUADS_SCALES = """  // Each of four lanes with the same rows widens the scales of every fourth group, and gives them to the others.
  float own[TILES][(STEP_SCALES + 3) / 4][2];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {{
#pragma unroll
    for (int i = 0; i < (STEP_SCALES + 3) / 4; ++i) {{
      const unsigned char* bytes = stage + WEIGHT_BYTES + min(i * 4 + lane % 4, STEP_SCALES - 1) * ROWS + tile * 16 + lane / 4;
      own[tile][i][0] = {widen}(bytes[0]);
      own[tile][i][1] = {widen}(bytes[8]);
    }}
  }}"""


def _multiply_scaled(sizes: PackedSizes, params: PackedParams, dtype: str) -> tuple[str, str]:
    """Return the multiplication of a step in which weights are scaled, and the function that it calls."""
    scales = max(1, TILE_K // sizes.group)
    if sizes.is_float4:
        name, helper = float4_fragments.dequantise_source(dtype, sizes.scale_dtype, scales, params.rows)
        arguments = "scales"
    else:
        name, helper = int4_fragments.dequantise_source(dtype, scales, params.rows, has_zeros=sizes.has_zeros)
        arguments = f"reinterpret_cast<const {_NAMES[dtype][0]}*>(scales)" + ", zeros" * sizes.has_zeros
    text = f"""
constexpr float FACTOR = 1.0f;
__device__ __forceinline__ void multiply_step(float (&acc)[TILES][FRAGMENTS][4], const unsigned char* stage,
                                              const unsigned char* activations, int lane) {{
#pragma unroll
  for (int k_tile = 0; k_tile < TILES_K; ++k_tile) {{
    unsigned a[TILES][16];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {{
      int at = k_tile * STEP_SCALES / TILES_K * ROWS + tile * 16 + lane / 4;
      const unsigned char* scales = stage + WEIGHT_BYTES + at * SCALE_BYTES;
      const unsigned char* zeros = stage + WEIGHT_BYTES + STEP_SCALES * ROWS * SCALE_BYTES + at;
      {name}(a[tile], reinterpret_cast<const unsigned*>(stage + (k_tile * TILES + tile) * 512 + lane * 16), {arguments});
    }}
#pragma unroll
    for (int half = 0; half < 2; ++half) {{
#pragma unroll
      for (int fragment = 0; fragment < FRAGMENTS; ++fragment) {{
        unsigned b[4];
        load_activations(b, activations, fragment * 8, k_tile * 64 + half * 32, lane);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {{
          mma(acc[tile][fragment], a[tile] + half * 8, b);
          mma(acc[tile][fragment], a[tile] + half * 8 + 4, b + 2);
        }}
      }}
    }}
  }}
}}
"""
    return text, helper
