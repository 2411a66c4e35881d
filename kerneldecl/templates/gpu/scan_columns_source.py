"""Owns the CUDA text of cumulative sums along an axis that is not the last, in one pass: thread blocks walk down strips of columns.

Knows nothing of how parameters are chosen.

A thread block takes neighbouring columns from their first element to the last, many rows at a time: each thread adds up a few rows of a
vector of columns, threads of the same columns scan these sums, and what all have together is carried on. The next rows are loaded
meanwhile. Every sum has one order.
"""

from __future__ import annotations

from kerneldecl.analysis.scan import GpuScanColumnsParams, GpuScanParams
from kerneldecl.compiler.scan import ScanSpec
from kerneldecl.templates.gpu.cuda_text import filled
from kerneldecl.templates.gpu.scan_source import RUNNING, constants_of

_WORK = """
// Threads side by side; threads below one another, in all and in a warp; rows of a step.
constexpr int X = {lanes}, BELOW = T / X, WARP_BELOW = 32 / X, WARPS = T / 32, STEP = BELOW * U, SLICES = {slices}, ROWS = N;
// From a warp's sums to the next one's, so that lanes read from different banks.
constexpr int PITCH = X * W + 1;
// The place of the `at`-th element in the order of addition.
__device__ __forceinline__ int place(int at) { return (REVERSE ? ROWS - 1 - at : at) * int(I); }
__device__ __forceinline__ Sum value(const Access& held, int w) { return wide(reinterpret_cast<const Item*>(&held)[w]); }
__device__ __forceinline__ void load(const Item* column, bool exists, int first, Access (&held)[U]) {
  #pragma unroll
  for (int u = 0; u < U; u++)
    if (exists && first + u < ROWS) held[u] = *reinterpret_cast<const Access*>(column + place(first + u));
}
__device__ __forceinline__ void scan_strip(const Item* __restrict__ x, Item* __restrict__ y, Sum* cells, int block, int thread) {
  int lane = thread % 32, warp = thread / 32, side = lane % X, below = warp * WARP_BELOW + lane / X;
  int column = (block % SLICES * X + side) * W, base = block / SLICES * (ROWS * int(I)) + column;
  bool exists = column < I;
  Sum carry[W] = {};
  Access held[U], next[U];
  load(x + base, exists, below * U, held);
  int turn = 0;
  for (int begin = 0; begin < ROWS; begin += STEP, turn ^= 1) {
    int first = begin + below * U;
    load(x + base, exists, first + STEP, next);
    // 1. The thread's own sums, and those of the threads above it in its warp.
    Sum running[W] = {};
    #pragma unroll
    for (int u = 0; u < U; u++)
      if (exists && first + u < ROWS)
        #pragma unroll
        for (int w = 0; w < W; w++) running[w] += value(held[u], w);
    #pragma unroll
    for (int by = X; by < 32; by *= 2) {
      #pragma unroll
      for (int w = 0; w < W; w++) {
        Sum other = __shfl_up_sync(0xffffffffu, running[w], by);
        if (lane >= by) running[w] += other;
      }
    }
    // 2. Those of the warps above: each warp scans them for some of the columns, a lane for each warp.
    Sum* sums = cells + turn * ((WARPS + 1) * PITCH);
    if (lane >= 32 - X)
      #pragma unroll
      for (int w = 0; w < W; w++) sums[warp * PITCH + side * W + w] = running[w];
    #pragma unroll
    for (int w = 0; w < W; w++) {
      Sum above = __shfl_up_sync(0xffffffffu, running[w], X % 32);
      running[w] = X < 32 && lane >= X ? above : Sum(0);
    }
    __syncthreads();
    for (int at = warp; at < X * W; at += WARPS) {
      Sum upto = lane < WARPS ? sums[lane * PITCH + at] : Sum(0);
      #pragma unroll
      for (int by = 1; by < WARPS; by *= 2) {
        Sum other = __shfl_up_sync(0xffffffffu, upto, by);
        if (lane >= by) upto += other;
      }
      Sum above = __shfl_up_sync(0xffffffffu, upto, 1);
      if (lane < WARPS) sums[lane * PITCH + at] = lane ? above : Sum(0);
      if (lane == WARPS - 1) sums[WARPS * PITCH + at] = upto;
    }
    __syncthreads();
    // 3. The results.
    #pragma unroll
    for (int w = 0; w < W; w++) {
      running[w] += carry[w] + sums[warp * PITCH + side * W + w];
      carry[w] += sums[WARPS * PITCH + side * W + w];
    }
    #pragma unroll
    for (int u = 0; u < U; u++) {
      if (exists && first + u < ROWS) {
        {running}
        *reinterpret_cast<Access*>(y + base + place(first + u)) = out;
      }
      held[u] = next[u];
    }
  }
}
// Where a GPU does not compute with bfloat16, TVM has words of 16 bits.
template <class Word>
__device__ __forceinline__ void scan_columns(const Word* x, Word* y, Sum* cells, int block, int thread) {
  scan_strip(reinterpret_cast<const Item*>(x), reinterpret_cast<Item*>(y), cells, block, thread);
}
"""


def scan_columns_source(spec: ScanSpec, params: GpuScanColumnsParams) -> str:
    """Return the text of the kernel's work, function `scan_columns`."""
    constants = constants_of(spec, GpuScanParams(params.threads, 1, params.unroll))
    return constants + filled(_WORK, lanes=params.lanes, slices=params.slices(spec.sizes), running=RUNNING)
