"""Owns the CUDA text of cumulative sums: along rows by thread blocks, and along other axes by threads.

Knows nothing of how parameters are chosen. Every sum has one order, so that results do not depend on which thread block is first.
"""

from __future__ import annotations

from kerneldecl.analysis.scan import GpuScanParams, ScanSizes
from kerneldecl.compiler.scan import ScanSpec
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.gpu.cuda_text import filled
from kerneldecl.templates.gpu.cuda_types import vector_types, widened

_CONSTANTS = """
constexpr int T = {threads}, W = {width}, U = {unroll}, P = {parts};
constexpr long long N = {extent}, I = {inner}, PART = {part};
constexpr bool REVERSE = {reverse}, EXCLUSIVE = {exclusive};
using Item = {item};
using Sum = {sum};
using Access = {access};  // W neighbouring elements, which a thread loads or stores at once
"""

RUNNING = """Access out;
        #pragma unroll
        for (int w = 0; w < W; w++) {
          Sum before = running[w];
          running[w] += value(held[u], w);
          reinterpret_cast<Item*>(&out)[w] = narrow(EXCLUSIVE ? before : running[w]);
        }"""
"""A vector of the results of neighbouring columns, in `out`: `running` has what comes before it."""

BEFORE_ME = """
// Return the sum of all threads before this one, and leave the sum of all in `all`.
__device__ __forceinline__ Sum before_me(Sum own, Sum* cells, int thread, Sum& all) {
  int lane = thread % 32, warp = thread / 32;
  Sum upto = own;
  #pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    Sum other = __shfl_up_sync(0xffffffffu, upto, by);
    if (lane >= by) upto += other;
  }
  if (lane == 31) cells[warp] = upto;
  __syncthreads();
  Sum mine = lane < T / 32 ? cells[lane] : Sum(0), warps = mine;
  #pragma unroll
  for (int by = 1; by < T / 32; by *= 2) {
    Sum other = __shfl_up_sync(0xffffffffu, warps, by);
    if (lane >= by) warps += other;
  }
  Sum base = __shfl_sync(0xffffffffu, warps, (warp + 31) % 32);
  all = __shfl_sync(0xffffffffu, warps, T / 32 - 1);
  Sum back = __shfl_up_sync(0xffffffffu, upto, 1);
  return (warp ? base : Sum(0)) + (lane ? back : Sum(0));
}
"""
"""A thread block's scan of one sum of each thread; `cells` are 32 sums in shared memory."""

_ROW_PARTS = """\
// For each vector of this thread, return the sum of all before it in `before`, and leave the sum of all in `all`.
__device__ __forceinline__ void before_each(const Sum (&own)[U], Sum (&before)[U], Sum* cells, int thread, Sum& all) {
  int lane = thread % 32, warp = thread / 32;
  Sum upto[U], of_warp = 0;
  #pragma unroll
  for (int u = 0; u < U; u++) upto[u] = own[u];
  #pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    #pragma unroll
    for (int u = 0; u < U; u++) {
      Sum other = __shfl_up_sync(0xffffffffu, upto[u], by);
      if (lane >= by) upto[u] += other;
    }
  }
  #pragma unroll
  for (int u = 0; u < U; u++) {
    Sum back = __shfl_up_sync(0xffffffffu, upto[u], 1);
    before[u] = of_warp + (lane ? back : Sum(0));
    of_warp += __shfl_sync(0xffffffffu, upto[u], 31);
  }
  if (lane == 31) cells[warp] = of_warp;
  __syncthreads();
  Sum warps = lane < T / 32 ? cells[lane] : Sum(0);
  #pragma unroll
  for (int by = 1; by < T / 32; by *= 2) {
    Sum other = __shfl_up_sync(0xffffffffu, warps, by);
    if (lane >= by) warps += other;
  }
  Sum base = __shfl_sync(0xffffffffu, warps, (warp + 31) % 32);
  all = __shfl_sync(0xffffffffu, warps, T / 32 - 1);
  #pragma unroll
  for (int u = 0; u < U; u++) before[u] += warp ? base : Sum(0);
}
// Where the `at`-th vector in the order of addition begins.
__device__ __forceinline__ long long place(long long at) { return REVERSE ? N - at - W : at; }
// Whether it is in the row: all are where steps divide rows and nothing is loaded beyond them.
__device__ __forceinline__ bool is_there(long long at) { return {all_there} || at < N; }
// Where a thread's vector is: a warp has U times 32 neighbouring vectors, so that each of its accesses is to whole lines.
__device__ __forceinline__ long long mine(long long first, int thread, int u) {
  return first + (long long)((thread / 32 * U + u) * 32 + thread % 32) * W;
}
__device__ __forceinline__ void load(const Item* row, long long first, int thread, Access (&held)[U]) {
  #pragma unroll
  for (int u = 0; u < U; u++) {
    long long at = mine(first, thread, u);
    if (is_there(at)) held[u] = *reinterpret_cast<const Access*>(row + place(at));
  }
}
__device__ __forceinline__ Sum value(const Access& held, int w) {
  return wide(reinterpret_cast<const Item*>(&held)[REVERSE ? W - 1 - w : w]);
}
// Add up the elements of each of a thread's vectors, but of those beyond the row.
__device__ __forceinline__ void sum_each(const Access (&held)[U], long long first, int thread, Sum (&own)[U]) {
  #pragma unroll
  for (int u = 0; u < U; u++) {
    if (is_there(mine(first, thread, u))) {
      #pragma unroll
      for (int w = 0; w < W; w++) own[u] += value(held[u], w);
    }
  }
}
__device__ __forceinline__ void put(Access* to, const Access& all) { {put} }
// Store the running sums of a thread's vectors: `before` says what comes before each of them in the tile, `carry` before the tile.
__device__ __forceinline__ void store(Item* row, const Access (&held)[U], long long first, int thread, const Sum (&before)[U], Sum carry) {
  #pragma unroll
  for (int u = 0; u < U; u++) {
    long long at = mine(first, thread, u);
    if (is_there(at)) {
      Access out;
      Sum running = carry + before[u];
      #pragma unroll
      for (int w = 0; w < W; w++) {
        Sum exclusive = running;
        running += value(held[u], w);
        reinterpret_cast<Item*>(&out)[REVERSE ? W - 1 - w : w] = narrow(EXCLUSIVE ? exclusive : running);
      }
      put(reinterpret_cast<Access*>(row + place(at)), out);
    }
  }
}
"""
"""A thread's vectors of a row: loads, their sums, the sums before each thread and each vector, stores."""

_PUT = {
    16: """asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(all.x), "r"(all.y), "r"(all.z), "r"(all.w));""",
    8: """asm volatile("st.global.v2.u32 [%0], {%1, %2};" : : "l"(to), "r"(all.x), "r"(all.y));""",
}
"""Stores of vectors by their bytes: in kernels that exchange sums, nvcc 13.0 made four stores of one of 16 bytes, to parts of sectors."""

_ROWS = """\
// The sum of one part of a row.
__device__ __forceinline__ void sums_of(const Item* __restrict__ x, Sum* __restrict__ sums, Sum* cells, int block, int thread) {
  long long row = block / P, part = block % P, end = (part + 1) * PART;
  Sum total = 0;
  for (long long first = part * PART + thread * W; first < end; first += 4LL * T * W) {
    Access held[4] = {};
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      long long at = first + (long long)i * T * W;
      if (at < end && at < N) held[i] = *reinterpret_cast<const Access*>(x + row * N + place(at));
    }
    #pragma unroll
    for (int i = 0; i < 4; i++)
      #pragma unroll
      for (int w = 0; w < W; w++) total += value(held[i], w);
  }
  Sum all;
  before_me(total, cells, thread, all);
  if (thread == 0) sums[block] = all;
}
__device__ __forceinline__ void scan_of(const Item* __restrict__ x, const Sum* __restrict__ sums, Item* __restrict__ y, Sum* cells,
                                          int at_block, int thread) {
  // The last parts are read first: they are in L2 still.
  int block = P > 1 ? {blocks} - 1 - at_block : at_block;
  long long row = block / P, part = block % P, end = (part + 1) * PART < N ? (part + 1) * PART : N;
  Sum carry = 0;
  if (P > 1) {
    Sum earlier = 0;
    for (int other = thread; other < part; other += T) earlier += sums[row * P + other];
    before_me(earlier, cells + 64, thread, carry);
  }
  const Item* from = x + row * N;
  Item* to = y + row * N;
  Access held[U], next[U];
  load(from, part * PART, thread, held);
  int turn = 0;
  for (long long first = part * PART; first < end; first += T * W * U, turn ^= 1) {
    load(from, first + T * W * U, thread, next);
    Sum own[U] = {}, before_it[U], all;
    sum_each(held, first, thread, own);
    before_each(own, before_it, cells + turn * 32, thread, all);
    store(to, held, first, thread, before_it, carry);
    #pragma unroll
    for (int u = 0; u < U; u++) held[u] = next[u];
    carry += all;
  }
}
"""

_COLUMNS = """
// The place of the `at`-th element in the order of addition.
__device__ __forceinline__ long long place(long long at) { return REVERSE ? N - 1 - at : at; }
struct Column {
  long long base, part;
  bool exists;
};
// Which neighbouring columns a thread has, and which part of them.
__device__ __forceinline__ Column column_of(int block, int thread) {
  constexpr int SLICES = {slices};
  long long slice = block % SLICES, outer = block / SLICES % {outer}, column = (slice * T + thread) * W;
  return {outer * N * I + column, block / (SLICES * {outer}), column < I};
}
__device__ __forceinline__ void load(const Item* x, const Column& at, long long first, Access (&held)[U]) {
  #pragma unroll
  for (int u = 0; u < U; u++)
    if (first + u < N) held[u] = *reinterpret_cast<const Access*>(x + at.base + place(first + u) * I);
}
__device__ __forceinline__ Sum value(const Access& held, int w) { return wide(reinterpret_cast<const Item*>(&held)[w]); }
__device__ __forceinline__ void sums_of(const Item* __restrict__ x, Sum* __restrict__ sums, Sum*, int block, int thread) {
  Column at = column_of(block, thread);
  if (!at.exists) return;
  Sum total[W] = {};
  for (long long first = at.part * PART; first < (at.part + 1) * PART && first < N; first += U) {
    Access held[U];
    load(x, at, first, held);
    #pragma unroll
    for (int u = 0; u < U; u++)
      if (first + u < N)
        #pragma unroll
        for (int w = 0; w < W; w++) total[w] += value(held[u], w);
  }
  long long outer = at.base / (N * I), column = at.base % (N * I);
  for (int w = 0; w < W; w++) sums[(outer * P + at.part) * I + column + w] = total[w];
}
__device__ __forceinline__ void scan_of(const Item* __restrict__ x, const Sum* __restrict__ sums, Item* __restrict__ y, Sum*,
                                          int at_block, int thread) {
  Column at = column_of(P > 1 ? {blocks} - 1 - at_block : at_block, thread);
  if (!at.exists) return;
  Sum running[W] = {};
  if (P > 1) {
    long long outer = at.base / (N * I), column = at.base % (N * I);
    #pragma unroll 4
    for (int part = 0; part < at.part; part++)
      #pragma unroll
      for (int w = 0; w < W; w++) running[w] += sums[(outer * P + part) * I + column + w];
  }
  Access held[U], next[U];
  load(x, at, at.part * PART, held);
  for (long long first = at.part * PART; first < (at.part + 1) * PART && first < N; first += U) {
    load(x, at, first + U, next);
    #pragma unroll
    for (int u = 0; u < U; u++) {
      if (first + u < N) {
        {running}
        *reinterpret_cast<Access*>(y + at.base + place(first + u) * I) = out;
      }
      held[u] = next[u];
    }
  }
}
"""

_CALLED = """
// Where a GPU does not compute with bfloat16, TVM has words of 16 bits.
template <class X>
__device__ __forceinline__ void sum_rows(const X* x, Sum* sums, Sum* cells, int block, int thread) {
  sums_of(reinterpret_cast<const Item*>(x), sums, cells, block, thread);
}
template <class X>
__device__ __forceinline__ void scan_rows(const X* x, const Sum* sums, X* y, Sum* cells, int block, int thread) {
  scan_of(reinterpret_cast<const Item*>(x), sums, reinterpret_cast<Item*>(y), cells, block, thread);
}
template <class X>
__device__ __forceinline__ void scan_whole(const X* x, X* y, Sum* cells, int block, int thread) {
  scan_of(reinterpret_cast<const Item*>(x), nullptr, reinterpret_cast<Item*>(y), cells, block, thread);
}
"""


def scan_source(spec: ScanSpec, params: GpuScanParams) -> str:
    """Return the text of the kernels' work as functions: `sum_rows` and `scan_rows`, or `scan_whole` where a row has one part."""
    sizes, width = spec.sizes, params.width(spec.sizes)
    blocks = params.blocks(sizes) * params.parts
    slices = -(-sizes.inner // (width * params.threads))
    text = row_parts(spec, params, all_there=False) + _ROWS if sizes.inner == 1 else _COLUMNS
    work = filled(text, blocks=blocks, slices=slices, outer=sizes.outer, running=RUNNING)
    return constants_of(spec, params) + work + _CALLED


def row_parts(spec: ScanSpec, params: GpuScanParams, *, all_there: bool) -> str:
    """Return the text of a thread's vectors of a row, of which none lies beyond it where all are there."""
    nbytes = params.width(spec.sizes) * dtype_bytes(spec.dtype)
    return filled(BEFORE_ME + _ROW_PARTS, all_there=all_there, put=_PUT.get(nbytes, "*to = all;"))


def constants_of(spec: ScanSpec, params: GpuScanParams) -> str:
    """Return the text of sizes, types and conversions."""
    sizes, width = spec.sizes, params.width(spec.sizes)
    constants = filled(
        _CONSTANTS,
        threads=params.threads,
        width=width,
        unroll=params.unroll,
        parts=params.parts,
        extent=sizes.extent,
        inner=sizes.inner,
        part=params.part(sizes),
        reverse=spec.is_reverse,
        exclusive=spec.is_exclusive,
        **vector_types(spec.dtype, spec.accum, width),
    )
    return constants + widened(spec.dtype, spec.accum)


def smem_sums(sizes: ScanSizes) -> int:
    """Return the sums that a thread block keeps in shared memory: of its warps, twice in turns, and while earlier parts are added up."""
    return 96 if sizes.inner == 1 else 32
