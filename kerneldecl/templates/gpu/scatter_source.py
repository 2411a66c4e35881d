"""Owns the CUDA text of rows added at indices: a thread block owns some rows and columns of the result, and looks through all indices.

Knows nothing of how parameters are chosen. What goes to one element is added by one thread in the order of the updates: there are no
atomic additions, and every call gives the same bits.
"""

from __future__ import annotations

from kerneldecl.analysis.scatter import GpuScatterParams
from kerneldecl.compiler.scatter import ScatterSpec
from kerneldecl.templates.gpu.cuda_text import filled
from kerneldecl.templates.gpu.cuda_types import cuda_type, vector_types, widened

_CONSTANTS = """
constexpr int T = {threads}, LANES = {lanes}, W = {width}, G = T / LANES, R = {tile_rows}, C = LANES * W;
constexpr long long ROWS = {rows}, COLUMNS = {columns}, UPDATES = {updates}, SLICES = (COLUMNS + C - 1) / C;
constexpr bool HAS_BASE = {has_base};
using Item = {item};
using Sum = {sum};
using Index = {index};
using Access = {access};  // W neighbouring elements
"""

_WORK = """
__device__ __forceinline__ void sum_of(const Index* __restrict__ indices, const Item* __restrict__ updates, const Item* __restrict__ base,
                                       Item* __restrict__ y, Sum* sums, int block, int thread) {
  // A thread has its own columns of every G-th row of the tile.
  int* found = reinterpret_cast<int*>(sums + R * C);
  int* row_of = found + T;
  int* counts = row_of + T;
  long long first_row = block / SLICES * R, column = block % SLICES * C + thread % LANES * W;
  int group = thread / LANES, own = thread % LANES * W;
  bool exists = column < COLUMNS;
  for (int r = group; r < R; r += G) {
    Access held;
    if (HAS_BASE && exists && first_row + r < ROWS) held = *reinterpret_cast<const Access*>(base + (first_row + r) * COLUMNS + column);
    #pragma unroll
    for (int w = 0; w < W; w++)
      sums[r * C + own + w] = HAS_BASE && exists && first_row + r < ROWS ? wide(reinterpret_cast<const Item*>(&held)[w]) : Sum(0);
  }
  for (long long first = 0; first < UPDATES; first += T) {
    long long row = first + thread < UPDATES ? (long long)indices[first + thread] - first_row : -1;
    bool is_here = row >= 0 && row < R;
    int all = __syncthreads_count(is_here);
    if (!all) continue;
    unsigned votes = __ballot_sync(0xffffffffu, is_here);
    if (thread % 32 == 0) counts[thread / 32] = __popc(votes);
    __syncthreads();
    if (is_here) {
      int at = __popc(votes & ((1u << thread % 32) - 1));
      for (int warp = 0; warp < thread / 32; warp++) at += counts[warp];
      found[at] = thread;
      row_of[at] = row;
    }
    __syncthreads();
    for (int at = 0; at < all; at++) {
      int r = row_of[at];
      if (r % G == group && exists) {
        Access held = *reinterpret_cast<const Access*>(updates + (first + found[at]) * COLUMNS + column);
        #pragma unroll
        for (int w = 0; w < W; w++) sums[r * C + own + w] += wide(reinterpret_cast<const Item*>(&held)[w]);
      }
    }
  }
  for (int r = group; r < R && first_row + r < ROWS; r += G) {
    Access out;
    #pragma unroll
    for (int w = 0; w < W; w++) reinterpret_cast<Item*>(&out)[w] = narrow(sums[r * C + own + w]);
    if (exists) *reinterpret_cast<Access*>(y + (first_row + r) * COLUMNS + column) = out;
  }
}
// Where a GPU does not compute with bfloat16, TVM has words of 16 bits.
template <class X>
__device__ __forceinline__ void add_to(const Index* indices, const X* updates, const X* base, X* y, Sum* sums, int block, int thread) {
  auto* given = reinterpret_cast<const Item*>(base);
  sum_of(indices, reinterpret_cast<const Item*>(updates), given, reinterpret_cast<Item*>(y), sums, block, thread);
}
template <class X>
__device__ __forceinline__ void add_up(const Index* indices, const X* updates, X* y, Sum* sums, int block, int thread) {
  sum_of(indices, reinterpret_cast<const Item*>(updates), nullptr, reinterpret_cast<Item*>(y), sums, block, thread);
}
"""


def scatter_source(spec: ScatterSpec, params: GpuScatterParams) -> str:
    """Return the text of the kernel's work: function `add_to` with a base, `add_up` without."""
    sizes = spec.sizes
    return filled(
        _CONSTANTS + widened(sizes.dtype, spec.accum) + _WORK,
        threads=params.threads,
        lanes=params.lanes,
        width=params.width,
        tile_rows=params.tile_rows,
        rows=sizes.rows,
        columns=sizes.columns,
        updates=sizes.updates,
        has_base=sizes.has_base,
        index=cuda_type(sizes.index_dtype),
        **vector_types(sizes.dtype, spec.accum, params.width),
    )
