"""Owns the CUDA of attention on CUDA cores: GEMMs with accumulators in register tiles, an online softmax, accumulators of warps merged.

Knows nothing of arguments' layouts or of how parameters are chosen. The structure is that of Dao, FlashAttention-2, 2023, with FMAs of
float32. Names in braces are filled in.
"""

from __future__ import annotations

CONSTANTS = """
constexpr int WM = {warps_m}, WN = {warps_n}, TM = {thread_m}, TN = {thread_n}, THREADS = {threads};
constexpr int HEAD_DIM = {head_dim}, VALUE_DIM = {value_dim}, PITCH = {pitch}, COLUMNS = {columns}, TV = COLUMNS / 32, POWERS = {powers};
constexpr int WARP_ROWS = 4 * TM, WARP_KEYS = 8 * TN, BM = WM * WARP_ROWS, BN = WN * WARP_KEYS;
constexpr int QUERIES = {queries}, KEYS = {keys}, HEADS = {heads}, GROUP = {group};
constexpr int TILES = (QUERIES + BM - 1) / BM, ALL_HEADS = {all_heads}, TOGETHER = {together};
constexpr bool IS_CAUSAL = {has_upper}, HAS_LOWER = {has_lower}, IS_ASYNC = {is_async}, HAS_BIAS = {has_bias};
constexpr int UPPER = {upper}, LOWER = {lower};
constexpr float SCALE = {scale}, LOG2 = {scale_log2};  // by which scores are multiplied before powers of two are taken of them
using Item = {item};
using Out = {out};
struct alignas(16) Quad {{ float x[4]; }};
namespace items {{ {widen_items} }}
namespace outs {{ {widen_outs} }}
"""

COPIES = """
__device__ __forceinline__ void wait_for_copies() {
  if (IS_ASYNC) asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
}
template <int W>
__device__ __forceinline__ void copy_some(float* to, const Item* from, bool is_there);
// Copy so many rows to shared memory, as float32; zeros in place of those that are not there.
template <int ROWS, int DIM, int WIDTH, int TO>
__device__ __forceinline__ void copy_rows(float* to, const Item* from, long long stride, int first, int end, int thread) {
  constexpr int PIECES = DIM / WIDTH;
  for (int at = thread; at < ROWS * PIECES; at += THREADS) {
    int row = at / PIECES, column = at % PIECES * WIDTH;
    bool is_there = first + row < end;
    copy_some<WIDTH>(to + row * TO + column, from + (is_there ? first + row : 0) * stride + column, is_there);
  }
}
// Fill what rows have beyond their elements with zeros, which no copy overwrites.
template <int ROWS, int DIM, int TO>
__device__ __forceinline__ void clear_rest(float* to, int thread) {
  constexpr int REST = TO - DIM;
  if (REST > 0)
    for (int at = thread; at < ROWS * REST; at += THREADS) to[at / (REST > 0 ? REST : 1) * TO + DIM + at % (REST > 0 ? REST : 1)] = 0.0f;
}
"""

ASYNC = """
template <>
__device__ __forceinline__ void copy_some<{width}>(float* to, const Item* from, bool is_there) {{
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("{instruction} [%0], [%1], {nbytes}, %2;" : : "r"(at), "l"(from), "r"(is_there ? {nbytes} : 0) : "memory");
}}
"""

THROUGH_REGISTERS = """
template <>
__device__ __forceinline__ void copy_some<{width}>(float* to, const Item* from, bool is_there) {{
  {access} held = {{}};
  if (is_there) held = *reinterpret_cast<const {access}*>(from);
  #pragma unroll
  for (int w = 0; w < {width}; w++) to[w] = items::wide(reinterpret_cast<const Item*>(&held)[w]);
}}
"""

POWERS = """
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// What powers are distances to: a maximum, or zero where no key is seen.
__device__ __forceinline__ float reference(float highest) { return highest == -INFINITY ? 0.0f : highest * LOG2; }
__device__ __forceinline__ float power(float score, float reference) { return power_of_two(fmaf(score, LOG2, -reference)); }
"""
"""Powers of two of scores, in units of LOG2, less those of a row's maximum."""
SOFTMAX = (
    POWERS
    + """\
__device__ __forceinline__ bool is_seen(int row, int key) {
  return key < KEYS && (!IS_CAUSAL || key <= row + UPPER) && (!HAS_LOWER || key >= row + LOWER);
}
"""
)

PRODUCTS = """
// Scores of a thread's rows, 4 apart from the lane's first one, and keys, 8 apart.
__device__ __forceinline__ void multiply_keys(const float* queries, const float* keys, float (&scores)[TM][TN]) {
  #pragma unroll
  for (int i = 0; i < TM; i++)
    #pragma unroll
    for (int j = 0; j < TN; j++) scores[i][j] = 0.0f;
  #pragma unroll 2
  for (int d = 0; d < (HEAD_DIM + 3) / 4; d++) {
    Quad key[TN];
    #pragma unroll
    for (int j = 0; j < TN; j++) key[j] = *reinterpret_cast<const Quad*>(keys + j * 8 * PITCH + d * 4);
    #pragma unroll
    for (int i = 0; i < TM; i++) {
      Quad query = *reinterpret_cast<const Quad*>(queries + i * 4 * PITCH + d * 4);
      #pragma unroll
      for (int j = 0; j < TN; j++)
        #pragma unroll
        for (int e = 0; e < 4; e++) scores[i][j] = fmaf(query.x[e], key[j].x[e], scores[i][j]);
    }
  }
}
// Add powers times values to results: a lane has quads of columns, 8 quads apart.
__device__ __forceinline__ void multiply_values(const float* powers, const float* values, Quad (&results)[TM][TV]) {
  #pragma unroll 1
  for (int k = 0; k < WARP_KEYS; k += 4) {
    Quad power[TM];
    #pragma unroll
    for (int i = 0; i < TM; i++) power[i] = *reinterpret_cast<const Quad*>(powers + i * 4 * POWERS + k);
    #pragma unroll
    for (int e = 0; e < 4; e++)
      #pragma unroll
      for (int v = 0; v < TV; v++) {
        Quad value = *reinterpret_cast<const Quad*>(values + (k + e) * COLUMNS + v * 32);
        #pragma unroll
        for (int i = 0; i < TM; i++)
          #pragma unroll
          for (int c = 0; c < 4; c++) results[i][v].x[c] = fmaf(power[i].x[e], value.x[c], results[i][v].x[c]);
      }
  }
}
"""

STORES = """
__device__ __forceinline__ void store_quad(Out* to, const Quad& quad, float factor, int column) {
  if (VALUE_DIM % 4 == 0) {
    struct alignas(4 * sizeof(Out)) Four { Out x[4]; } four;
    #pragma unroll
    for (int c = 0; c < 4; c++) four.x[c] = outs::narrow(quad.x[c] * factor);
    if (column < VALUE_DIM) *reinterpret_cast<Four*>(to) = four;
  } else {
    #pragma unroll
    for (int c = 0; c < 4; c++)
      if (column + c < VALUE_DIM) to[c] = outs::narrow(quad.x[c] * factor);
  }
}
// Merge what the warps of the same rows have found: the first one of them has the results.
__device__ __forceinline__ void merge(float* cells, int warp_m, int warp_n, int lane, float (&highest)[TM], float (&total)[TM],
                                      Quad (&results)[TM][TV]) {
  constexpr int PARTS = TM * TV, STATISTICS = (WN - 1) * WM * PARTS * 32;
  __syncthreads();
  if (warp_n > 0) {
    int place = (warp_n - 1) * WM + warp_m;
    #pragma unroll
    for (int i = 0; i < TM; i++) {
      #pragma unroll
      for (int v = 0; v < TV; v++) reinterpret_cast<Quad*>(cells)[(place * PARTS + i * TV + v) * 32 + lane] = results[i][v];
      cells[STATISTICS * 4 + (place * TM + i) * 64 + lane] = highest[i];
      cells[STATISTICS * 4 + (place * TM + i) * 64 + 32 + lane] = total[i];
    }
  }
  __syncthreads();
  if (warp_n > 0) return;
  #pragma unroll 1
  for (int other = 0; other < WN - 1; other++) {
    int place = other * WM + warp_m;
    #pragma unroll
    for (int i = 0; i < TM; i++) {
      float its = cells[STATISTICS * 4 + (place * TM + i) * 64 + lane];
      float sum = cells[STATISTICS * 4 + (place * TM + i) * 64 + 32 + lane];
      float higher = fmaxf(highest[i], its), base = reference(higher);
      float mine = power(highest[i], base), theirs = power(its, base);
      highest[i] = higher;
      total[i] = total[i] * mine + sum * theirs;
      #pragma unroll
      for (int v = 0; v < TV; v++) {
        Quad added = reinterpret_cast<const Quad*>(cells)[(place * PARTS + i * TV + v) * 32 + lane];
        #pragma unroll
        for (int c = 0; c < 4; c++) results[i][v].x[c] = results[i][v].x[c] * mine + added.x[c] * theirs;
      }
    }
  }
}
"""

KERNEL = """
__device__ __forceinline__ void {function}({parameters}, float* smem, int block, int thread) {{
  // 1. The tile of rows, of which head, and where its rows are. Tiles that see the most keys come first.
  int first_head = block / (TILES * TOGETHER) * TOGETHER, size = min(TOGETHER, ALL_HEADS - first_head);
  int index = block % (TILES * TOGETHER), tile = IS_CAUSAL ? TILES - 1 - index / size : index / size;
  int flat = first_head + index % size, batch = flat / HEADS, head = flat % HEADS, kv_head = head / GROUP, first_row = tile * BM;
  const Item* q = {q} + batch * {q_batch}LL + head * {q_head}LL;
  const Item* k = {k} + batch * {k_batch}LL + (kv_head + {k_first}) * {k_head}LL;
  const Item* v = {v} + batch * {v_batch}LL + (kv_head + {v_first}) * {v_head}LL;
  // 2. A thread's place. Lanes that differ by 1 share keys, those that differ by 2 rows: half a warp's quads are then served at once.
  int lane = thread % 32, warp = thread / 32, warp_m = warp % WM, warp_n = warp / WM;
  int lane_m = lane / 16 * 2 + lane % 2, lane_n = lane / 2 % 8, row = first_row + warp_m * WARP_ROWS + lane_m;
  float* queries = smem;
  float* keys = queries + BM * PITCH;
  float* values = keys + BN * PITCH;
  float* powers = values + BN * COLUMNS + warp * WARP_ROWS * POWERS;
  clear_rest<BM, HEAD_DIM, PITCH>(queries, thread);
  clear_rest<BN, HEAD_DIM, PITCH>(keys, thread);
  clear_rest<BN, VALUE_DIM, COLUMNS>(values, thread);
  // 3. The blocks of keys that some row sees. Values arrive while scores are multiplied, the next keys during the rest.
  int stop = IS_CAUSAL ? max(0, min(min(first_row + BM, QUERIES) + UPPER, KEYS)) : KEYS;
  int begin = HAS_LOWER ? max(0, first_row + LOWER) / BN * BN : 0;
  if (begin < stop) {{
    copy_rows<BM, HEAD_DIM, {qk_width}, PITCH>(queries, q, {q_row}LL, first_row, QUERIES, thread);
    copy_rows<BN, HEAD_DIM, {qk_width}, PITCH>(keys, k, {k_row}LL, begin, KEYS, thread);
  }}
  float highest[TM], total[TM];
  Quad results[TM][TV] = {{}};
  #pragma unroll
  for (int i = 0; i < TM; i++) highest[i] = -INFINITY, total[i] = 0.0f;
  #pragma unroll 1
  for (int block_key = begin; block_key < stop; block_key += BN) {{
    int first_key = block_key + warp_n * WARP_KEYS, last_row = first_row + warp_m * WARP_ROWS + WARP_ROWS - 1;
    bool has_keys = first_key < KEYS && (!IS_CAUSAL || first_key <= last_row + UPPER);
    float scores[TM][TN];
    wait_for_copies();
    copy_rows<BN, VALUE_DIM, {v_width}, COLUMNS>(values, v, {v_row}LL, block_key, KEYS, thread);
    if (has_keys) multiply_keys(queries + (warp_m * WARP_ROWS + lane_m) * PITCH, keys + (warp_n * WARP_KEYS + lane_n) * PITCH, scores);
    wait_for_copies();
    if (block_key + BN < stop) copy_rows<BN, HEAD_DIM, {qk_width}, PITCH>(keys, k, {k_row}LL, block_key + BN, KEYS, thread);
    if (has_keys) {{
      #pragma unroll
      for (int i = 0; i < TM; i++) {{
        float most = highest[i];
        #pragma unroll
        for (int j = 0; j < TN; j++) {{
          int at = row + i * 4, key = first_key + j * 8 + lane_n;
          float score = scores[i][j];
          {bias}
          scores[i][j] = is_seen(at, key) ? score : -INFINITY;
          most = fmaxf(most, scores[i][j]);
        }}
        #pragma unroll
        for (int by = 2; by < 16; by *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, by));
        float base = reference(most), shrink = power(highest[i], base);
        highest[i] = most;
        total[i] *= shrink;
        #pragma unroll
        for (int v = 0; v < TV; v++)
          #pragma unroll
          for (int c = 0; c < 4; c++) results[i][v].x[c] *= shrink;
        #pragma unroll
        for (int j = 0; j < TN; j++) {{
          float one = power(scores[i][j], base);
          total[i] += one;
          powers[(i * 4 + lane_m) * POWERS + j * 8 + lane_n] = one;
        }}
      }}
      __syncwarp();
      multiply_values(powers + lane_m * POWERS, values + warp_n * WARP_KEYS * COLUMNS + lane_n * 4, results);
    }}
  }}
  // 4. Sums of rows, results of other warps, and the store.
  #pragma unroll
  for (int i = 0; i < TM; i++)
    #pragma unroll
    for (int by = 2; by < 16; by *= 2) total[i] += __shfl_xor_sync(0xffffffffu, total[i], by);
  if (WN > 1) merge(smem, warp_m, warp_n, lane, highest, total, results);
  if (warp_n > 0) return;
  #pragma unroll
  for (int i = 0; i < TM; i++) {{
    int at = row + i * 4;
    if (at >= QUERIES) continue;
    float factor = total[i] == 0.0f ? 0.0f : {value_scale} / total[i];
    Out* to = o + batch * {o_batch}LL + head * {o_head}LL + at * {o_row}LL;
    #pragma unroll
    for (int v = 0; v < TV; v++) store_quad(to + (v * 8 + lane_n) * 4, results[i][v], factor, (v * 8 + lane_n) * 4);
    {sums}
  }}
}}
"""

SUMS = """if (lane_n == 0) {
      float log2;
      asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(log2) : "f"(total[i]));
      logsumexp[flat * (long long)QUERIES + at] = fmaf(highest[i], LOG2, log2) * 0.6931471805599453f;
    }"""
