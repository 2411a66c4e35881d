"""Owns the CUDA text of GEMVs whose matrix has rows of no whole vectors.

Knows nothing of how parameters are chosen.

No load stands behind a branch: those out of bounds load another vector, of which nothing is used. nvcc lets no load cross a branch, and
a thread would have one in flight. Only the matrix's last vector, where it is not whole, is loaded by elements.
"""

from __future__ import annotations

from kerneldecl.analysis.unaligned_gemv import ADDING_WARPS, GemvParams, GemvSizes, block_columns
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.gpu.cuda_text import filled
from kerneldecl.templates.gpu.cuda_types import cuda_type, narrowed, widened

_CONSTANTS = """
constexpr int N = {n}, K = {k}, T = {threads}, LANES = {lanes}, TILE = {tile}, U = {unroll}, PARTS = {parts};
constexpr int W = {width}, ITEM_BYTES = {item_bytes}, PERIOD = {period}, WARPS = T / 32;
constexpr int ELEMENTS = N * K, VECTORS = ELEMENTS / W;  // of the matrix, whole ones
constexpr int PART = {part_rows}, COLUMNS = {columns}, LANE = {padded_lane}, ADDING = {adding_warps};
using Item = {item};
using Result = {result};
"""

_COMMON = """
struct Vector { uint4 bits; };
__device__ __forceinline__ float at(const Vector& held, int w) { return wide(reinterpret_cast<const Item*>(&held)[w]); }
// The matrix's last vector, of which only some elements are there.
__device__ __forceinline__ Vector last_of(const Item* matrix) {
  Vector held{make_uint4(0, 0, 0, 0)};
  #pragma unroll
  for (int w = 0; w < ELEMENTS % W; w++) reinterpret_cast<Item*>(&held)[w] = matrix[VECTORS * W + w];
  return held;
}
"""

_ROWS = """
constexpr int X_VECTORS = K / W;
// W elements of x from an element on that need not be the first of a vector: x is taken as 0 where it has none.
__device__ __forceinline__ Vector window(Vector before, Vector now, int shift) {
  unsigned c[9] = {before.bits.x, before.bits.y, before.bits.z, before.bits.w, now.bits.x, now.bits.y, now.bits.z, now.bits.w, 0u};
  const int offset = 16 - shift * ITEM_BYTES;  // 1 to 16 bytes from the beginning of both
  #pragma unroll
  for (int i = 0; i < 5; i++) c[i] = offset & 16 ? c[i + 4] : c[i];
  #pragma unroll
  for (int i = 0; i < 6; i++) c[i] = offset & 8 ? c[i + 2] : c[i];
  #pragma unroll
  for (int i = 0; i < 5; i++) c[i] = offset & 4 ? c[i + 1] : c[i];
  const unsigned bits = offset % 4 * 8;
  return Vector{make_uint4(__funnelshift_r(c[0], c[1], bits), __funnelshift_r(c[1], c[2], bits),
                           __funnelshift_r(c[2], c[3], bits), __funnelshift_r(c[3], c[4], bits))};
}
__device__ __forceinline__ Vector chosen(Vector whole, Vector tail, int vector) {
  bool is_whole = vector >= 0 && vector < X_VECTORS, is_tail = vector == X_VECTORS;
  return Vector{make_uint4(is_whole ? whole.bits.x : is_tail ? tail.bits.x : 0u, is_whole ? whole.bits.y : is_tail ? tail.bits.y : 0u,
                           is_whole ? whole.bits.z : is_tail ? tail.bits.z : 0u, is_whole ? whole.bits.w : is_tail ? tail.bits.w : 0u)};
}
template <class X, class Y>
__device__ __forceinline__ void rows(const X* given, const X* vector, Y* result, float* parts, int block, int thread) {
  const Item* matrix = reinterpret_cast<const Item*>(given);
  const Item* x = reinterpret_cast<const Item*>(vector);
  const Vector* a = reinterpret_cast<const Vector*>(matrix);
  const Vector* xs = reinterpret_cast<const Vector*>(x);
  const int group = block * (T / LANES) + thread / LANES, lane = thread % LANES;
  const int first = group / PERIOD * (PERIOD * TILE) + group % PERIOD;
  const int shift = (int)((long long)first * K % W);
  const int steps = (shift + K + W - 1) / W;  // aligned vectors that a row touches
  Vector tail{make_uint4(0, 0, 0, 0)};
  #pragma unroll
  for (int w = 0; w < K % W; w++) reinterpret_cast<Item*>(&tail)[w] = x[X_VECTORS * W + w];
  int begin[TILE];
  #pragma unroll
  for (int i = 0; i < TILE; i++) begin[i] = (int)(((long long)(first + i * PERIOD) * K - shift) / W);
  float sum[TILE] = {};
  for (int base = lane; base < steps; base += LANES * U) {
    Vector held[U][TILE], before[U], now[U];
    #pragma unroll
    for (int u = 0; u < U; u++) {
      const int v = base + u * LANES;
      #pragma unroll
      for (int i = 0; i < TILE; i++) {
        held[u][i] = a[min(begin[i] + min(v, steps - 1), VECTORS - 1)];
      }
      before[u] = xs[max(0, min(v - 1, X_VECTORS - 1))];
      now[u] = xs[min(v, X_VECTORS - 1)];
    }
    #pragma unroll
    for (int u = 0; u < U; u++) {
      const int v = base + u * LANES;
      const Vector of_x = window(chosen(before[u], tail, v - 1), chosen(now[u], tail, v), shift);
      const bool is_edge = v == 0 || v >= steps - 1;
      #pragma unroll
      for (int i = 0; i < TILE; i++) {
        if (is_edge) {
          if (ELEMENTS % W && begin[i] + v == VECTORS) held[u][i] = last_of(matrix);
          // The neighbouring rows' elements may be NaN.
          #pragma unroll
          for (int w = 0; w < W; w++) {
            const int k = v * W - shift + w;
            if (k < 0 || k >= K) reinterpret_cast<Item*>(&held[u][i])[w] = narrow(0.0f);
          }
        }
        #pragma unroll
        for (int w = 0; w < W; w++) sum[i] = fmaf(at(held[u][i], w), at(of_x, w), sum[i]);
      }
    }
  }
  #pragma unroll
  for (int i = 0; i < TILE; i++) {
    #pragma unroll
    for (int by = (LANES < 32 ? LANES : 32) / 2; by; by /= 2) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], by);
  }
  if (LANES > 32) {
    #pragma unroll
    for (int i = 0; i < TILE; i++) {
      if (thread % 32 == 0) parts[thread / 32 * TILE + i] = sum[i];
    }
    __syncthreads();
  }
  if (lane == 0) {
    #pragma unroll
    for (int i = 0; i < TILE; i++) {
      if (LANES > 32) {
        sum[i] = 0.0f;
        #pragma unroll
        for (int warp = 0; warp < LANES / 32; warp++) sum[i] += parts[(thread / 32 + warp) * TILE + i];
      }
      if (first + i * PERIOD < N) reinterpret_cast<Result*>(result)[first + i * PERIOD] = result_of(sum[i]);
    }
  }
}
"""

_COLUMNS = """
__device__ __forceinline__ void store(float* to, int place, float value) { to[place] = value; }
template <class Y> __device__ __forceinline__ void store(Y* to, int place, float value) {
  reinterpret_cast<Result*>(to)[place] = result_of(value);
}
template <class X, class Y>
__device__ __forceinline__ void columns(const X* given, const X* vector, Y* result, float* sums, int block, int thread) {
  const Item* matrix = reinterpret_cast<const Item*>(given);
  const Item* x = reinterpret_cast<const Item*>(vector);
  const Vector* a = reinterpret_cast<const Vector*>(matrix);
  const int strip = block / PARTS, part = block % PARTS, warp = thread / 32, lane = thread % 32;
  const int begin = part * PART + warp, end = min(K, part * PART + PART);
  const int shift = (int)((long long)begin * N % W);
  float sum[W] = {};
  for (int base = begin; base < end; base += WARPS * U) {
    Vector held[U];
    float of_x[U];
    #pragma unroll
    for (int u = 0; u < U; u++) {
      const int k = min(base + u * WARPS, end - 1);
      // Lanes behind the row's end take its last vector, so that they load nothing more.
      const int row = (int)(((long long)k * N - shift) / W), last = (int)(((long long)k * N + N - 1) / W);
      const int place = min(row + strip * (COLUMNS / W) + lane, last);
      held[u] = a[min(place, VECTORS - 1)];
      of_x[u] = wide(x[k]);
    }
    #pragma unroll
    for (int u = 0; u < U; u++) {
      const int k = base + u * WARPS;
      if (k < end) {
        if (ELEMENTS % W && k == K - 1) {
          if (((long long)k * N - shift) / W + strip * (COLUMNS / W) + lane >= VECTORS) held[u] = last_of(matrix);
        }
        #pragma unroll
        for (int w = 0; w < W; w++) sum[w] = fmaf(at(held[u], w), of_x[u], sum[w]);
      }
    }
  }
  #pragma unroll
  for (int w = 0; w < W; w++) sums[(warp * 32 + lane) * LANE + w] = sum[w];
  __syncthreads();
  for (int column = thread; column < COLUMNS; column += T) {
    float total = 0.0f;
    #pragma unroll
    for (int other = 0; other < WARPS; other++) {
      const int place = column + (int)((long long)(part * PART + other) * N % W);
      total += sums[(other * 32 + place / W) * LANE + place % W];
    }
    const int y = strip * COLUMNS + column;
    if (y < N) store(result, PARTS > 1 ? part * N + y : y, total);
  }
}
// A lane for each column; warps share the parts.
template <class Y>
__device__ __forceinline__ void add(const float* sums, Y* result, float* totals, int block, int thread) {
  const int warp = thread / 32, lane = thread % 32, y = min(block * 32 + lane, N - 1);
  float total = 0.0f;
  #pragma unroll 16
  for (int part = warp; part < PARTS; part += ADDING) total += sums[part * N + y];
  totals[thread] = total;
  __syncthreads();
  if (warp) return;
  #pragma unroll
  for (int other = 1; other < ADDING; other++) total += totals[other * 32 + lane];
  if (block * 32 + lane < N) reinterpret_cast<Result*>(result)[y] = result_of(total);
}
"""


def padded_lane(sizes: GemvSizes) -> int:
    """Return the floats of shared memory for a lane's sums: one more than it has, so that lanes write to different banks."""
    return sizes.width + 1


def unaligned_gemv_source(sizes: GemvSizes, params: GemvParams) -> str:
    """Return the text of the kernels' work: `rows` along x; `columns` and `add` where rows run along y."""
    values = {
        "n": sizes.n,
        "k": sizes.k,
        "threads": params.threads,
        "lanes": params.lanes,
        "tile": params.tile,
        "unroll": params.unroll,
        "parts": params.parts,
        "width": sizes.width,
        "item_bytes": dtype_bytes(sizes.dtype),
        "period": sizes.period,
        "part_rows": params.part_rows(sizes),
        "columns": block_columns(sizes),
        "padded_lane": padded_lane(sizes),
        "item": cuda_type(sizes.dtype),
        "result": cuda_type(sizes.out_dtype),
        "adding_warps": ADDING_WARPS,
    }
    result = f"__device__ __forceinline__ Result result_of(float x) {{ return {narrowed(sizes.out_dtype)}; }}"
    text = _CONSTANTS + widened(sizes.dtype, "float32") + result + "\n" + _COMMON + (_COLUMNS if sizes.is_across else _ROWS)
    return filled(text, **values)
