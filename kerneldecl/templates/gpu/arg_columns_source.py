"""Owns the CUDA text of the places of extreme elements along an axis that is not the last: threads have neighbouring columns.

Knows nothing of how parameters are chosen.

What a thread has found of a column becomes a key of 64 bits: a word in the order of the element, and below it the row, counted down. So
the largest key is the first of equals, whichever threads had the rows. Columns are counted over the outer axis, too: a thread block has
neighbouring ones of the result, of several outer indices where rows are short.
"""

from __future__ import annotations

from kerneldecl.analysis.arg_reduce import ArgColumnsParams
from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.compiler.arg_reduce import ArgSpec
from kerneldecl.templates.gpu.arg_source import largest_of, types, words
from kerneldecl.templates.gpu.cuda_text import filled

PARTS_THREADS = 4 * WARP_LANES
"""Threads of a block that chooses among parts."""

_CONSTANTS = """
// Threads in all, side by side and below one another; columns of a thread, rows of a turn.
constexpr int T = {threads}, LANES = {lanes}, BELOW = T / LANES, W = {width}, U = {unroll};
// Vectors of a row, and of all results.
constexpr int VECTORS = {inner} / W, COUNT = {outer} * VECTORS;
constexpr int ROWS = {extent}, PARTS = {parts}, PART = (ROWS + PARTS - 1) / PARTS;
// Threads that look for the largest of a column's keys, of one thread block and of several.
constexpr int SHARING = {sharing}, PARTS_SHARING = {parts_sharing};
// From one column of a thread to its next one, and to the thread below: odd, for shared memory's banks.
constexpr int PITCH = LANES | 1, BELOW_PITCH = W * PITCH | 1;
constexpr bool LARGEST = {largest};
using Item = {item};
using Sum = {sum};
using Index = {index};
using Access = {access};  // W neighbouring columns
using Key = uint64_t;
using Cell = {cell};  // a key, or its lower half where there are no others
"""

_FLOAT_WORST = """
__device__ __forceinline__ float worst() { return __int_as_float(LARGEST ? 0xff800000 : 0x7f800000); }
"""
_INTEGER_WORST = """
__device__ __forceinline__ int worst() { return LARGEST ? -2147483647 - 1 : 2147483647; }
"""

_WORK = """
// What a thread finds in its rows of one part of its columns. Rows beyond the part are its last one again, which changes nothing: no load
// waits for a bound, and a thread without a row of its own finds no more than that one.
__device__ __forceinline__ void look_through(const Access* __restrict__ x, Cell* cells, int strip, int part, int thread) {
  int side = thread % LANES, below = thread / LANES, vector = min(strip * LANES + side, COUNT - 1);
  const Access* column = x + (vector / VECTORS * ROWS * VECTORS + vector % VECTORS);
  int first = part * PART + below, last = min(part * PART + PART, ROWS) - 1;
  Sum best[W];
  int row[W];
  #pragma unroll
  for (int w = 0; w < W; w++) best[w] = worst(), row[w] = min(first, last);
  for (int base = first; base <= last; base += BELOW * U) {
    Access held[U];
    #pragma unroll
    for (int u = 0; u < U; u++) held[u] = column[min(base + u * BELOW, last) * VECTORS];
    #pragma unroll
    for (int u = 0; u < U; u++) {
      int own = min(base + u * BELOW, last);
      #pragma unroll
      for (int w = 0; w < W; w++) {
        Sum x = at(held[u], w);
        // Comparisons with NaN are false: it is taken, and nothing after it.
        bool is_better = (LARGEST ? !(x <= best[w]) : !(x >= best[w])) && !is_nan(best[w]);
        if (is_better) best[w] = x, row[w] = own;
      }
    }
  }
  #pragma unroll
  for (int w = 0; w < W; w++) cells[below * BELOW_PITCH + w * PITCH + side] = (Cell)key_of(word(best[w]), row[w]);
}
// Places where thread blocks have whole columns; keys of one part otherwise.
template <class X, class Y>
__device__ __forceinline__ void look_for(const X* x, Y* y, Cell* cells, int block, int thread) {
  int strip = block / PARTS, part = block % PARTS;
  look_through(reinterpret_cast<const Access*>(x), cells, strip, part, thread);
  __syncthreads();
  #pragma unroll
  for (int from = 0; from < LANES * W; from += T / SHARING) {
    int column = from + thread / SHARING, result = strip * (LANES * W) + column;
    bool exists = column < LANES * W && result < COUNT * W;
    Key key = 0;
    if (exists)
      for (int below = thread % SHARING; below < BELOW; below += SHARING) {
        Key other = cells[below * BELOW_PITCH + column % W * PITCH + column / W];
        key = other > key ? other : key;
      }
    key = largest_of_threads(key);
    if (exists && thread % SHARING == 0) y[PARTS == 1 ? result : result * PARTS + part] = PARTS == 1 ? (Y)(int)~(unsigned)key : (Y)key;
  }
}
template <class K>
__device__ __forceinline__ void choose(const K* found, Index* y, int block, int thread) {
  int result = (block * {parts_threads} + thread) / PARTS_SHARING;
  Key key = 0;
  if (result < COUNT * W)
    for (int part = thread % PARTS_SHARING; part < PARTS; part += PARTS_SHARING) {
      Key other = reinterpret_cast<const Key*>(found)[result * PARTS + part];
      key = other > key ? other : key;
    }
  key = largest_of_parts(key);
  if (result < COUNT * W && thread % PARTS_SHARING == 0) y[result] = (Index)(int)~(unsigned)key;
}
"""


def arg_columns_source(spec: ArgSpec, params: ArgColumnsParams) -> str:
    """Return the text of the kernels' work: `look_for`, and `choose` among parts."""
    worst = _FLOAT_WORST if spec.compared == "float32" else _INTEGER_WORST
    largest = largest_of("threads", params.sharing) + largest_of("parts", params.parts_sharing)
    return filled(
        _CONSTANTS + words(spec) + largest + worst + _WORK,
        **params._asdict(),
        **spec.sizes._asdict(),
        sharing=params.sharing,
        parts_sharing=params.parts_sharing,
        parts_threads=PARTS_THREADS,
        cell="unsigned" if params.smem[0] == "uint32" else "Key",
        **types(spec, params.width),
    )
