"""Owns the CUDA of attention against a KV cache on CUDA cores: lanes share rows, an online softmax, what warps have found is added up.

Knows nothing of arguments' layouts or of how parameters are chosen. Names in braces are filled in.
"""

from __future__ import annotations

CONSTANTS = """
constexpr int ROWS = {rows}, LANES = {lanes}, UNROLL = {unroll}, WARPS = {warps}, PARTS = {split_k}, WIDTH = {width};
constexpr int SLOTS = 32 / LANES, BLOCK = SLOTS * UNROLL;  // keys side by side, and in all, that a warp multiplies together
constexpr int HEAD_DIM = {head_dim}, VALUE_DIM = {value_dim}, KEYS = {keys}, QUERIES = {queries}, HEADS = {heads}, KV_HEADS = {kv_heads};
constexpr int GROUP = HEADS / KV_HEADS, GROUP_ROWS = GROUP * QUERIES, ROW_BLOCKS = (GROUP_ROWS + ROWS - 1) / ROWS;
constexpr int PAGE = {page_size}, PAGES = PAGE ? KEYS / PAGE : 0;
constexpr int K_VECTORS = HEAD_DIM / WIDTH, V_VECTORS = VALUE_DIM / WIDTH;
constexpr int K_HELD = (K_VECTORS + LANES - 1) / LANES, V_HELD = (V_VECTORS + LANES - 1) / LANES;
constexpr bool IS_LATENT = {is_latent}, HAS_LENGTHS = {has_lengths}, IS_CAUSAL = {is_causal}, IS_BHSD = {is_bhsd};
constexpr float LOG2 = {scale_log2};  // by which scores are multiplied before powers of two are taken of them
using Item = {item};
using Access = {access};
struct alignas(16) Quad {{ float x[4]; }};
struct alignas({columns_bytes}) Columns {{ float x[WIDTH]; }};  // a lane's neighbouring columns of results
struct alignas(4 * sizeof(Item)) Four {{ Item x[4]; }};
{widen}
"""

FUNCTIONS = """\
__device__ __forceinline__ float element(const Access& held, int w) { return wide(reinterpret_cast<const Item*>(&held)[w]); }
// Where a row of Q or O begins, in rows: those of a head of keys are ordered by queries, then by heads.
__device__ __forceinline__ long long query_row(int batch, int kv_head, int row) {
  int head = kv_head * GROUP + row % GROUP, query = row / GROUP;
  return batch * (long long)(HEADS * QUERIES) + (IS_BHSD ? head * QUERIES + query : query * HEADS + head);
}
// Load a lane's vectors of a row, LANES apart; zeros in place of those beyond its end.
template <int HELD, int VECTORS>
__device__ __forceinline__ void load_row(Access (&to)[HELD], const Item* row, int lane) {
  #pragma unroll
  for (int j = 0; j < HELD; j++) {
    to[j] = Access{};
    if ((j + 1) * LANES <= VECTORS || j * LANES + lane < VECTORS) to[j] = reinterpret_cast<const Access*>(row)[j * LANES + lane];
  }
}
// The key that a lane loads: the sequence's last one in place of those beyond it.
__device__ __forceinline__ int key_of(int block, int u, int slot, int length) { return min(block * BLOCK + u * SLOTS + slot, length - 1); }
// Load a lane's part of a block of keys or values.
template <int HELD, int VECTORS>
__device__ __forceinline__ void load_block(Access (&to)[UNROLL][HELD], const Item* cache, const int (&pages)[UNROLL], long long outer,
                                           long long stride, int block, int slot, int lane, int length) {
  #pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    int key = key_of(block, u, slot, length);
    const Item* row = PAGE ? cache + pages[u] * outer + key % (PAGE ? PAGE : 1) * stride : cache + key * stride;
    load_row<HELD, VECTORS>(to[u], row, lane);
  }
}
__device__ __forceinline__ void load_pages(int (&pages)[UNROLL], const int* table, int block, int slot, int length) {
  #pragma unroll
  for (int u = 0; u < UNROLL; u++) pages[u] = PAGE ? table[key_of(block, u, slot, length) / (PAGE ? PAGE : 1)] : 0;
}
// Make values of keys beyond the sequence's end zero: powers of zero do not hide infinities.
template <int HELD>
__device__ __forceinline__ void clear_rest(Access (&values)[UNROLL][HELD], int first, int length) {
  #pragma unroll
  for (int u = 0; u < UNROLL; u++)
    if (first + u * SLOTS >= length) {
      #pragma unroll
      for (int j = 0; j < HELD; j++) values[u][j] = Access{};
    }
}
// Scores of a thread's keys and rows: dot products over a lane's elements.
__device__ __forceinline__ void multiply_keys(const float (&queries)[ROWS][K_HELD][WIDTH], const Access (&keys)[UNROLL][K_HELD],
                                              float (&scores)[UNROLL][ROWS]) {
  #pragma unroll
  for (int u = 0; u < UNROLL; u++)
    #pragma unroll
    for (int r = 0; r < ROWS; r++) scores[u][r] = 0.0f;
  #pragma unroll
  for (int u = 0; u < UNROLL; u++)
    #pragma unroll
    for (int j = 0; j < K_HELD; j++)
      #pragma unroll
      for (int w = 0; w < WIDTH; w++) {
        float key = element(keys[u][j], w);
        #pragma unroll
        for (int r = 0; r < ROWS; r++) scores[u][r] = fmaf(queries[r][j][w], key, scores[u][r]);
      }
}
// Have all lanes that share a row of keys know its scores.
__device__ __forceinline__ void add_lanes(float (&scores)[UNROLL][ROWS]) {
  #pragma unroll
  for (int by = LANES / 2; by > 0; by /= 2)
    #pragma unroll
    for (int u = 0; u < UNROLL; u++)
      #pragma unroll
      for (int r = 0; r < ROWS; r++) scores[u][r] += __shfl_xor_sync(0xffffffffu, scores[u][r], by);
}
__device__ __forceinline__ void mask_keys(int first, const int (&limit)[ROWS], float (&scores)[UNROLL][ROWS]) {
  #pragma unroll
  for (int u = 0; u < UNROLL; u++)
    #pragma unroll
    for (int r = 0; r < ROWS; r++)
      if (first + u * SLOTS >= limit[r]) scores[u][r] = -INFINITY;
}
__device__ __forceinline__ void scale_row(float (&results)[V_HELD][WIDTH], float factor) {
  #pragma unroll
  for (int j = 0; j < V_HELD; j++)
    #pragma unroll
    for (int w = 0; w < WIDTH; w++) results[j][w] *= factor;
}
// Raise the maxima of rows where scores are higher, and shrink what was found before; seldom so after the first keys, so one vote decides.
__device__ __forceinline__ void follow_maxima(const float (&scores)[UNROLL][ROWS], float (&highest)[ROWS], float (&total)[ROWS],
                                              float (&results)[ROWS][V_HELD][WIDTH]) {
  float most[ROWS];
  bool has_grown = false;
  #pragma unroll
  for (int r = 0; r < ROWS; r++) {
    most[r] = highest[r];
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) most[r] = fmaxf(most[r], scores[u][r]);
    has_grown = has_grown || most[r] > highest[r];
  }
  if (!__any_sync(0xffffffffu, has_grown)) return;
  #pragma unroll
  for (int r = 0; r < ROWS; r++) {
    float shrink = power(highest[r], reference(most[r]));
    highest[r] = most[r];
    total[r] *= shrink;
    scale_row(results[r], shrink);
  }
}
// Store a lane's columns of results in shared memory, or add them to what is there.
__device__ __forceinline__ void add_results(float* to, const float (&results)[ROWS][V_HELD][WIDTH], int lane, bool is_first) {
  #pragma unroll
  for (int r = 0; r < ROWS; r++)
    #pragma unroll
    for (int j = 0; j < V_HELD; j++)
      if ((j + 1) * LANES <= V_VECTORS || j * LANES + lane < V_VECTORS) {
        Columns* place = reinterpret_cast<Columns*>(to + r * VALUE_DIM + (j * LANES + lane) * WIDTH);
        Columns sum = {};
        if (!is_first) sum = *place;
        #pragma unroll
        for (int w = 0; w < WIDTH; w++) sum.x[w] += results[r][j][w];
        *place = sum;
      }
}
// Add powers times values to a lane's columns of results.
template <int HELD>
__device__ __forceinline__ void multiply_values(const float (&powers)[UNROLL][ROWS], const Access (&values)[UNROLL][HELD],
                                                float (&results)[ROWS][V_HELD][WIDTH]) {
  #pragma unroll
  for (int u = 0; u < UNROLL; u++)
    #pragma unroll
    for (int j = 0; j < V_HELD; j++)
      #pragma unroll
      for (int w = 0; w < WIDTH; w++) {
        float value = element(values[u][j], w);
        #pragma unroll
        for (int r = 0; r < ROWS; r++) results[r][j][w] = fmaf(powers[u][r], value, results[r][j][w]);
      }
}
"""

KERNEL = """
// Where a GPU does not compute with bfloat16, TVM has words of 16 bits.
template <class Word>
__device__ __forceinline__ void {function}({parameters}, float* smem, int block, int thread) {{
  // 1. The rows of queries, the head of keys, the part of these, and a lane's place.
  int row_block = block % ROW_BLOCKS, of_head = block / ROW_BLOCKS, part = of_head % PARTS, head = of_head / PARTS;
  int batch = head / KV_HEADS, kv_head = head % KV_HEADS, warp = thread / 32, slot = thread % 32 / LANES, lane = thread % LANES;
  int length = {length};
  int blocks = (length + BLOCK - 1) / BLOCK;
  int begin = (int)((long long)blocks * part / PARTS), end = (int)((long long)blocks * (part + 1) / PARTS);
  const Item* keys_of_head = reinterpret_cast<const Item*>(K) + (PAGE ? 0 : batch) * {k_outer}LL + kv_head * {k_head}LL;
  const Item* values_of_head = reinterpret_cast<const Item*>({v}) + (PAGE ? 0 : batch) * {v_outer}LL + kv_head * {v_head}LL;
  const int* table = {table};
  float queries[ROWS][K_HELD][WIDTH], results[ROWS][V_HELD][WIDTH] = {{}}, highest[ROWS], total[ROWS];
  int limit[ROWS];  // the first key that a row does not see
  #pragma unroll
  for (int r = 0; r < ROWS; r++) {{
    int row = min(row_block * ROWS + r, GROUP_ROWS - 1);
    Access held[K_HELD];
    load_row<K_HELD, K_VECTORS>(held, reinterpret_cast<const Item*>(Q) + query_row(batch, kv_head, row) * HEAD_DIM, lane);
    #pragma unroll
    for (int j = 0; j < K_HELD; j++)
      #pragma unroll
      for (int w = 0; w < WIDTH; w++) queries[r][j][w] = element(held[j], w);
    highest[r] = -INFINITY, total[r] = 0.0f;
    limit[r] = IS_CAUSAL ? length - (QUERIES - 1) + row / GROUP : length;
  }}
  // 2. A warp's blocks of keys. The next keys arrive during softmax and the second product, the next values during scores.
  Access keys[UNROLL][K_HELD], values[UNROLL][V_HELD];
  int pages[UNROLL];
  int first = begin + warp;
  if (first < end) {{
    load_pages(pages, table, first, slot, length);
    load_block<K_HELD, K_VECTORS>(keys, keys_of_head, pages, {k_outer}LL, {k_row}LL, first, slot, lane, length);
    if (!IS_LATENT) load_block<V_HELD, V_VECTORS>(values, values_of_head, pages, {v_outer}LL, {v_row}LL, first, slot, lane, length);
    load_pages(pages, table, first + WARPS, slot, length);
  }}
  #pragma unroll 1
  for (int at = first; at < end; at += WARPS) {{
    int next = at + WARPS;
    float scores[UNROLL][ROWS];
    multiply_keys(queries, keys, scores);
    if (!IS_LATENT && next < end)
      load_block<K_HELD, K_VECTORS>(keys, keys_of_head, pages, {k_outer}LL, {k_row}LL, next, slot, lane, length);
    add_lanes(scores);
    mask_keys(at * BLOCK + slot, limit, scores);
    follow_maxima(scores, highest, total, results);
    #pragma unroll
    for (int r = 0; r < ROWS; r++) {{
      float base = reference(highest[r]);
      #pragma unroll
      for (int u = 0; u < UNROLL; u++) scores[u][r] = power(scores[u][r], base), total[r] += scores[u][r];
    }}
    if ((at + 1) * BLOCK > length) clear_rest({values}, at * BLOCK + slot, length);
    multiply_values(scores, {values}, results);
    if (next < end) {{
      if (IS_LATENT) load_block<K_HELD, K_VECTORS>(keys, keys_of_head, pages, {k_outer}LL, {k_row}LL, next, slot, lane, length);
      else load_block<V_HELD, V_VECTORS>(values, values_of_head, pages, {v_outer}LL, {v_row}LL, next, slot, lane, length);
      load_pages(pages, table, next + WARPS, slot, length);
    }}
  }}
  // 3. What the lanes of a warp have found of other keys, one group of lanes after another, then what its warps have.
  float* mine = smem + warp * ROWS * VALUE_DIM;
  float* statistics = smem + WARPS * ROWS * VALUE_DIM;
  #pragma unroll
  for (int r = 0; r < ROWS; r++) {{
    float most = highest[r];
    #pragma unroll
    for (int by = LANES; by < 32; by *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, by));
    float factor = power(highest[r], reference(most));
    highest[r] = most;
    total[r] *= factor;
    #pragma unroll
    for (int by = LANES; by < 32; by *= 2) total[r] += __shfl_xor_sync(0xffffffffu, total[r], by);
    scale_row(results[r], factor);
    if (thread % 32 == 0) statistics[(warp * ROWS + r) * 2] = most, statistics[(warp * ROWS + r) * 2 + 1] = total[r];
  }}
  #pragma unroll 1
  for (int turn = 0; turn < SLOTS; turn++) {{
    if (slot == turn) add_results(mine, results, lane, turn == 0);
    __syncwarp();
  }}
  __syncthreads();
  // 4. The sum over all warps, and its store.
  #pragma unroll 1
  for (int index = thread; index < ROWS * VALUE_DIM / 4; index += WARPS * 32) {{
    int r = index / (VALUE_DIM / 4), column = index % (VALUE_DIM / 4) * 4, row = row_block * ROWS + r;
    float most = -INFINITY, sum = 0.0f;
    #pragma unroll
    for (int other = 0; other < WARPS; other++) most = fmaxf(most, statistics[(other * ROWS + r) * 2]);
    float base = reference(most);
    Quad found = {{}};
    #pragma unroll
    for (int other = 0; other < WARPS; other++) {{
      float factor = power(statistics[(other * ROWS + r) * 2], base);
      Quad theirs = *reinterpret_cast<const Quad*>(smem + (other * ROWS + r) * VALUE_DIM + column);
      sum = fmaf(statistics[(other * ROWS + r) * 2 + 1], factor, sum);
      #pragma unroll
      for (int c = 0; c < 4; c++) found.x[c] = fmaf(theirs.x[c], factor, found.x[c]);
    }}
    if (row < GROUP_ROWS) {{
      {store}
    }}
  }}
}}
"""

STORE = """float factor = sum == 0.0f ? 0.0f : 1.0f / sum;
      Four four;
      #pragma unroll
      for (int c = 0; c < 4; c++) four.x[c] = narrow(found.x[c] * factor);
      {access}* to = reinterpret_cast<{access}*>(O + query_row(batch, kv_head, row) * VALUE_DIM + column);
      *to = *reinterpret_cast<const {access}*>(&four);"""

STORE_PART = """long long place = ((long long)(head * ROW_BLOCKS + row_block) * PARTS + part) * ROWS + r;
      *reinterpret_cast<float4*>(parts + place * VALUE_DIM + column) = make_float4(found.x[0], found.x[1], found.x[2], found.x[3]);
      if (column == 0) part_sums[place * 2] = most, part_sums[place * 2 + 1] = sum;"""
