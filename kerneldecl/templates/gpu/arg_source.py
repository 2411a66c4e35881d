"""Owns the CUDA text of the places of extreme elements of rows: threads keep the extreme of whole vectors, and one is looked into at last.

Knows nothing of how parameters are chosen.

A vector becomes a key of 64 bits: a word in the order of its extreme element, and below it the vector's place, counted down. So the largest
key is the first vector that has the row's extreme. NaN is the extreme, as in torch and NumPy.
"""

from __future__ import annotations

from kerneldecl.analysis.arg_reduce import ArgReduceParams
from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.compiler.arg_reduce import ArgSpec
from kerneldecl.templates.gpu.cuda_text import filled
from kerneldecl.templates.gpu.cuda_types import cuda_type, vector_types, widened

_CONSTANTS = """
constexpr int T = {threads}, W = {width}, U = {unroll}, PARTS = {parts}, ROWS = {rows}, COLUMNS = {columns};
constexpr int VECTORS = COLUMNS / W, PART = (VECTORS + PARTS - 1) / PARTS;
constexpr bool LARGEST = {largest};
using Item = {item};
using Sum = {sum};
using Index = {index};
using Access = {access};  // W neighbouring elements
using Key = uint64_t;
"""

_FLOAT_WORD = """
__device__ __forceinline__ bool is_nan(float x) { return x != x; }
// A word that is larger where the element is preferred; -0 equals 0.
__device__ __forceinline__ unsigned word(float x) {
  unsigned bits = x == 0.0f ? 0u : __float_as_uint(x);
  unsigned ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return is_nan(x) ? 0xffffffffu : LARGEST ? ordered : ~ordered;
}
__device__ __forceinline__ float better(float a, float b) { return LARGEST ? fmaxf(a, b) : fminf(a, b); }
"""
_INTEGER_WORD = """
__device__ __forceinline__ bool is_nan(int) { return false; }
__device__ __forceinline__ unsigned word(int x) {
  unsigned ordered = (unsigned)x ^ 0x80000000u;
  return LARGEST ? ordered : ~ordered;
}
__device__ __forceinline__ int better(int a, int b) { return LARGEST ? max(a, b) : min(a, b); }
"""

_KEYS = """
__device__ __forceinline__ Sum at(const Access& held, int w) { return wide(reinterpret_cast<const Item*>(&held)[w]); }
__device__ __forceinline__ Key key_of(unsigned word, int vector) { return (Key)word << 32 | (unsigned)~vector; }
"""

_LARGEST = """\
__device__ __forceinline__ Key largest_of_{whom}(Key key) {
  #pragma unroll
  for (int by = {half}; by; by /= 2) {
    unsigned high = __shfl_xor_sync(0xffffffffu, (unsigned)(key >> 32), by), low = __shfl_xor_sync(0xffffffffu, (unsigned)key, by);
    Key other = (Key)high << 32 | low;
    key = other > key ? other : key;
  }
  return key;
}
"""

_ROWS = """\
// The largest key of some vectors of a row; thread 0 has it.
__device__ __forceinline__ Key key_of_part(const Access* __restrict__ row, Key* keys, int begin, int end, int thread) {
  Sum best = Sum(0);
  int place = -1, first_nan = -1;
  for (int base = begin; base < end; base += T * U) {
    Access held[U];
    #pragma unroll
    for (int u = 0; u < U; u++) {
      int vector = base + u * T + thread;
      if (vector < end) held[u] = row[vector];
    }
    #pragma unroll
    for (int u = 0; u < U; u++) {
      int vector = base + u * T + thread;
      if (vector >= end) break;
      Sum own = at(held[u], 0);
      bool has = is_nan(own);
      #pragma unroll
      for (int w = 1; w < W; w++) {
        Sum x = at(held[u], w);
        has |= is_nan(x);
        own = better(own, x);
      }
      // Comparisons with NaN are false, and a vector that has one comes before all others anyway.
      bool is_better = place < 0 || (LARGEST ? own > best : own < best);
      if (has && first_nan < 0) first_nan = vector;
      if (is_better && !has) best = own, place = vector;
    }
  }
  Key key = first_nan >= 0 ? key_of(0xffffffffu, first_nan) : place >= 0 ? key_of(word(best), place) : 0;
  key = largest_of_warp(key);
  if (T == 32) return key;
  if (thread % 32 == 0) keys[thread / 32] = key;
  __syncthreads();
  if (thread < 32) key = largest_of_warp(thread < T / 32 ? keys[thread] : 0);
  return key;
}
// The first element of the vector that the key names which is preferred to all others there.
__device__ __forceinline__ Index place_of(const Access* row, Key key) {
  int vector = (int)~(unsigned)key, found = 0;
  Access held = row[vector];
  unsigned best = word(at(held, 0));
  #pragma unroll
  for (int w = 1; w < W; w++) {
    unsigned own = word(at(held, w));
    if (own > best) best = own, found = w;
  }
  return (Index)(vector * W + found);
}
// Where a GPU does not compute with bfloat16, TVM has words of 16 bits.
template <class X>
__device__ __forceinline__ void place_whole(const X* x, Index* y, Key* keys, int block, int thread) {
  auto* row = reinterpret_cast<const Access*>(x) + (long long)block * VECTORS;
  Key key = key_of_part(row, keys, 0, VECTORS, thread);
  if (thread == 0) y[block] = place_of(row, key);
}
template <class X, class K>
__device__ __forceinline__ void key_parts(const X* x, K* found, Key* keys, int block, int thread) {
  auto* row = reinterpret_cast<const Access*>(x) + (long long)(block / PARTS) * VECTORS;
  int begin = block % PARTS * PART;
  Key key = key_of_part(row, keys, begin, min(begin + PART, VECTORS), thread);
  if (thread == 0) reinterpret_cast<Key*>(found)[block] = key;
}
// A warp for each row.
template <class X, class K>
__device__ __forceinline__ void place_parts(const X* x, const K* found, Index* y, int block, int thread) {
  auto* row = reinterpret_cast<const Access*>(x) + (long long)block * VECTORS;
  Key key = 0;
  for (int part = thread; part < PARTS; part += 32) {
    Key other = reinterpret_cast<const Key*>(found)[block * PARTS + part];
    key = other > key ? other : key;
  }
  key = largest_of_warp(key);
  if (thread == 0) y[block] = place_of(row, key);
}
"""

_WARPS = """\
// A row for each warp.
template <class X>
__device__ __forceinline__ void place_rows(const X* x, Index* y, int block, int thread) {
  int at = block * {block_rows} + thread / 32;
  if (at >= ROWS) return;
  auto* row = reinterpret_cast<const Access*>(x) + (long long)at * VECTORS;
  Key key = key_of_part(row, nullptr, 0, VECTORS, thread % 32);
  if (thread % 32 == 0) y[at] = place_of(row, key);
}
"""


def arg_source(spec: ArgSpec, params: ArgReduceParams) -> str:
    """Return the text of the kernels' work: `place_whole` or `place_rows` of whole rows; `key_parts` and `place_parts` of rows in parts."""
    return filled(
        _CONSTANTS + words(spec) + largest_of("warp", WARP_LANES) + _ROWS + (_WARPS if params.rows > 1 else ""),
        block_rows=params.rows,
        threads=params.threads,
        width=params.width,
        unroll=params.unroll,
        parts=params.parts,
        rows=spec.sizes.outer,
        columns=spec.sizes.extent,
        **types(spec, params.width),
    )


def types(spec: ArgSpec, width: int) -> dict[str, object]:
    """Return which extreme is looked for, and CUDA's names of types, as texts name them."""
    return {"largest": spec.is_largest, "index": cuda_type(spec.index_dtype), **vector_types(spec.dtype, _accum(spec), width)}


def words(spec: ArgSpec) -> str:
    """Return functions of elements, of vectors and of keys: they need `LARGEST` and the types `Item`, `Sum`, `Access` and `Key`."""
    accum = _accum(spec)
    return widened(spec.dtype, accum) + (_FLOAT_WORD if accum == "float32" else _INTEGER_WORD) + _KEYS


def largest_of(whom: str, lanes: int) -> str:
    """Return function `largest_of_…`: the largest key of so many neighbouring lanes, a power of two; all of the warp call it."""
    return filled(_LARGEST, whom=whom, half=lanes // 2)


def _accum(spec: ArgSpec) -> str:
    return "float32" if spec.compared == "float32" else "int32"
