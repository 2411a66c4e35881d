"""Owns the CUDA text of rows added at indices in two kernels: the updates of each row are listed, then rows of the result add theirs.

Knows nothing of how parameters are chosen. Lists have the order of the updates, and one thread adds what goes to one element: there are
no atomic additions but of counts, and every call gives the same bits.
"""

from __future__ import annotations

from kerneldecl.analysis.scatter import GpuScatterRowsParams
from kerneldecl.compiler.scatter import ScatterSpec
from kerneldecl.templates.gpu.cuda_text import filled
from kerneldecl.templates.gpu.cuda_types import cuda_type, vector_types, widened

_CONSTANTS = """
constexpr int T = {threads}, LANES = {lanes}, W = {width}, G = T / LANES, H = {row_turns}, C = LANES * W;
constexpr int LT = {list_threads}, P = {part_rows}, BITS = {part_bits}, PER_THREAD = (P + LT - 1) / LT;
constexpr int ROWS = {rows}, COLUMNS = {columns}, UPDATES = {updates}, SLICES = (COLUMNS + C - 1) / C;
constexpr bool HAS_BASE = {has_base};
// Updates that a thread has in flight: 128 bytes where they are many.
constexpr int MANY = {in_flight}, FEW = 4;
using Item = {item};
using Sum = {sum};
using Index = {index};
{access_text}
"""

_NEIGHBOURS = "using Access = {access};  // W neighbouring elements"
_APART = """// W elements that lie LANES apart, as odd rows have no vectors: those of a warp are neighbours.
struct Access {
  Item items[W];
};
__device__ __forceinline__ int place(int column, int w) { return min(column + w * LANES, COLUMNS - 1); }
__device__ __forceinline__ Access load(const Item* row, int column) {
  Access held;
  // Behind the last column it is read again: no load has a condition.
  #pragma unroll
  for (int w = 0; w < W; w++) held.items[w] = row[place(column, w)];
  return held;
}
__device__ __forceinline__ void store(Item* row, int column, const Access& held) {
  #pragma unroll
  for (int w = 0; w < W; w++)
    if (column + w * LANES < COLUMNS) row[column + w * LANES] = held.items[w];
}"""
_COLUMN = "(block % SLICES * LANES + thread % LANES) * W"
_COLUMN_APART = "block % SLICES * C + thread % LANES"
_PREFETCH = """asm volatile("prefetch.global.L2 [%0];" ::"l"(ahead));"""
_PREFETCH_APART = """#pragma unroll
        for (int w = 0; w < W; w++) asm volatile("prefetch.global.L2 [%0];" ::"l"(ahead - column + place(column, w)));"""

_LIST = """
// List the updates of a part of the rows, row by row: `starts` says where the list of each row begins.
__device__ __forceinline__ void list_updates(const Index* __restrict__ indices, int* starts, int* order, int* cursors, int block,
                                             int thread) {
  int* found = cursors + P;
  int* row_of = found + LT;
  int* counts = row_of + LT;
  int first_row = block * P, rows = min(P, ROWS - first_row), lane = thread % 32, warp = thread / 32;
  for (int r = thread; r < P; r += LT) cursors[r] = 0;
  __syncthreads();
  // 1. How many updates each row has, and how many go to the rows of earlier parts.
  int below = 0;
  for (int base = 0; base < UPDATES; base += 4 * LT) {
    long long held[4];
    #pragma unroll
    for (int u = 0; u < 4; u++) held[u] = base + u * LT + thread < UPDATES ? (long long)indices[base + u * LT + thread] : -1;
    #pragma unroll
    for (int u = 0; u < 4; u++) {
      long long row = held[u] - first_row;
      below += held[u] >= 0 && row < 0;
      if (row >= 0 && row < rows) atomicAdd(cursors + (int)row, 1);
    }
  }
  __syncthreads();
  // 2. Where lists begin: a prefix sum, to which all of the earlier parts' updates belong.
  int own = 0;
  #pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    int r = thread * PER_THREAD + i;
    if (r < P) own += cursors[r];
  }
  int before = own;
  #pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    int other = __shfl_up_sync(0xffffffffu, before, by);
    if (lane >= by) before += other;
    below += __shfl_xor_sync(0xffffffffu, below, by);
  }
  if (lane == 31) counts[warp] = before;
  if (lane == 0) counts[32 + warp] = below;
  __syncthreads();
  int start = before - own;
  for (int w = 0; w < LT / 32; w++) start += counts[32 + w] + (w < warp ? counts[w] : 0);
  #pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    int r = thread * PER_THREAD + i;
    if (r < rows) {
      int has = cursors[r];
      starts[first_row + r] = start;
      cursors[r] = start;
      start += has;
      if (first_row + r == ROWS - 1) starts[ROWS] = start;
    }
  }
  // 3. The lists, in the order of the updates.
  for (int base = 0; base < UPDATES; base += LT) {
    long long row = base + thread < UPDATES ? (long long)indices[base + thread] - first_row : -1;
    bool is_here = row >= 0 && row < rows;
    int all = __syncthreads_count(is_here);
    if (!all) continue;
    unsigned votes = __ballot_sync(0xffffffffu, is_here);
    if (lane == 0) counts[warp] = __popc(votes);
    __syncthreads();
    if (is_here) {
      int at = __popc(votes & ((1u << lane) - 1));
      for (int w = 0; w < warp; w++) at += counts[w];
      found[at] = base + thread;
      row_of[at] = (int)row;
    }
    __syncthreads();
    if (warp == 0) {
      for (int i = 0; i < all; i += 32) {
        bool has = i + lane < all;
        int r = has ? row_of[i + lane] : 0;
        // Lanes with the same row.
        unsigned same = __ballot_sync(0xffffffffu, has);
        #pragma unroll
        for (int bit = 0; bit < BITS; bit++) {
          unsigned set = __ballot_sync(0xffffffffu, r >> bit & 1);
          same &= r >> bit & 1 ? set : ~set;
        }
        int rank = __popc(same & ((1u << lane) - 1)), to = cursors[r] + rank;
        __syncwarp();
        if (has) {
          order[to] = found[i + lane];
          if (rank == __popc(same) - 1) cursors[r] = to + 1;
        }
        __syncwarp();
      }
    }
  }
}
"""

_SUM = """
__device__ __forceinline__ void add(Sum* sums, const Access& held) {
  #pragma unroll
  for (int w = 0; w < W; w++) sums[w] += wide(reinterpret_cast<const Item*>(&held)[w]);
}
// Add the updates of some rows to some of their columns.
__device__ __forceinline__ void sum_of(const Item* __restrict__ updates, const int* __restrict__ starts, const int* __restrict__ order,
                                       const Item* __restrict__ base, Item* __restrict__ y, int block, int thread) {
  int first = block / SLICES * (G * H) + thread / LANES, column = {column};
  if (column >= COLUMNS) return;
  Access held[H];
  int begin[H], end[H];
  #pragma unroll
  for (int h = 0; h < H; h++) {
    int row = first + h * G;
    begin[h] = end[h] = 0;
    if (row < ROWS) {
      if (HAS_BASE) held[h] = {load_base};
      begin[h] = starts[row];
      end[h] = starts[row + 1];
    }
  }
  if (H > 1) {
    // Rows are added to in turns: the first updates of all of them come meanwhile.
    int firsts[H];
    #pragma unroll
    for (int h = 0; h < H; h++) firsts[h] = begin[h] < end[h] ? order[begin[h]] : -1;
    #pragma unroll
    for (int h = 0; h < H; h++) {
      if (firsts[h] >= 0) {
        const Item* ahead = updates + firsts[h] * COLUMNS + column;
        {prefetch}
      }
    }
  }
  #pragma unroll
  for (int h = 0; h < H; h++) {
    int row = first + h * G, at = begin[h];
    if (row >= ROWS) break;
    Sum sums[W];
    #pragma unroll
    for (int w = 0; w < W; w++) sums[w] = HAS_BASE ? wide(reinterpret_cast<const Item*>(&held[h])[w]) : Sum(0);
    for (; at + MANY <= end[h]; at += MANY) {
      // A row of many updates takes latency after latency: those of L2 are shorter.
      #pragma unroll
      for (int u = 0; u < MANY; u++) {
        const Item* ahead = updates + order[min(at + 2 * MANY + u, end[h] - 1)] * COLUMNS + column;
        {prefetch}
      }
      Access all[MANY];
      #pragma unroll
      for (int u = 0; u < MANY; u++) all[u] = {load_update};
      #pragma unroll
      for (int u = 0; u < MANY; u++) add(sums, all[u]);
    }
    for (; at < end[h]; at += FEW) {
      Access some[FEW];
      #pragma unroll
      for (int u = 0; u < FEW; u++)
        if (at + u < end[h]) some[u] = {load_update};
      #pragma unroll
      for (int u = 0; u < FEW; u++)
        if (at + u < end[h]) add(sums, some[u]);
    }
    Access out;
    #pragma unroll
    for (int w = 0; w < W; w++) reinterpret_cast<Item*>(&out)[w] = narrow(sums[w]);
    {store_out};
  }
}
// Where a GPU does not compute with bfloat16, TVM has words of 16 bits.
template <class X>
__device__ __forceinline__ void add_to(const X* updates, const int* starts, const int* order, const X* base, X* y, int block, int thread) {
  auto *given = reinterpret_cast<const Item*>(base), *added = reinterpret_cast<const Item*>(updates);
  sum_of(added, starts, order, given, reinterpret_cast<Item*>(y), block, thread);
}
template <class X>
__device__ __forceinline__ void add_up(const X* updates, const int* starts, const int* order, X* y, int block, int thread) {
  sum_of(reinterpret_cast<const Item*>(updates), starts, order, nullptr, reinterpret_cast<Item*>(y), block, thread);
}
"""


def scatter_rows_source(spec: ScatterSpec, params: GpuScatterRowsParams) -> str:
    """Return the text of both kernels' work: `list_updates`, and `add_to` with a base, `add_up` without."""
    sizes = spec.sizes
    is_apart = params.is_apart(sizes)
    text = filled(
        _CONSTANTS + widened(sizes.dtype, spec.accum) + _LIST + _SUM,
        access_text=_APART if is_apart else _NEIGHBOURS,
        column=_COLUMN_APART if is_apart else _COLUMN,
        prefetch=_PREFETCH_APART if is_apart else _PREFETCH,
        load_base=_loaded("base + row * COLUMNS", is_apart=is_apart),
        load_update=_loaded("updates + order[at + u] * COLUMNS", is_apart=is_apart),
        store_out="store(y + row * COLUMNS, column, out)" if is_apart else "*reinterpret_cast<Access*>(y + row * COLUMNS + column) = out",
    )
    return filled(
        text,
        threads=params.threads,
        lanes=params.lanes,
        width=params.width,
        row_turns=params.rows,
        list_threads=params.list_threads,
        part_rows=params.part_rows,
        part_bits=max(1, (params.part_rows - 1).bit_length()),
        rows=sizes.rows,
        columns=sizes.columns,
        updates=sizes.updates,
        has_base=sizes.has_base,
        in_flight=params.in_flight(sizes),
        index=cuda_type(sizes.index_dtype),
        **vector_types(sizes.dtype, spec.accum, params.width),
    )


def _loaded(row: str, *, is_apart: bool) -> str:
    """Return the expression of a thread's elements of a row."""
    return f"load({row}, column)" if is_apart else f"*reinterpret_cast<const Access*>({row} + column)"
