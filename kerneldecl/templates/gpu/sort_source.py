"""Owns the CUDA text of sorted rows: a thread block for each row, whose threads keep several elements each in registers.

Knows nothing of how parameters are chosen.

An element becomes an entry: a word whose order is the elements', and below it the place, counted down. All entries differ, and the larger
comes first, so that the sort is stable. Elements of 16 bits and less have entries of 32 bits, others of 64.

Batcher's bitonic sort, in the form whose merges begin with mirrored pairs, so that all comparisons have one direction. Entries of one
thread are compared in registers, those of a warp by shuffles, others through shared memory.
"""

from __future__ import annotations

from kerneldecl.analysis.row_sort import GpuSortParams
from kerneldecl.arrays import is_float
from kerneldecl.compiler.row_sort import TopSpec
from kerneldecl.templates.gpu.cuda_text import filled
from kerneldecl.templates.gpu.cuda_types import cuda_type, in_float32

_CONSTANTS = """
constexpr int T = {threads}, V = {items}, N = {extent}, K = {count};
constexpr bool LARGEST = {largest};
using Item = {item};
using Index = {index};
using Entry = {entry};
constexpr int PLACE_BITS = sizeof(Entry) * 4;
"""

_FLOAT_WORD = """
// A word that is larger where the element comes earlier. NaN is the largest, -0 equals 0.
__device__ __forceinline__ unsigned word(Item item) {
  float x = {wide};
  unsigned bits = x == 0.0f ? 0u : {bits}, sign = 1u << (PLACE_BITS - 1), all = sign * 2 - 1;
  unsigned ordered = x != x ? all : bits & sign ? ~bits & all : bits | sign;
  return LARGEST ? ordered : ~ordered & all;
}
"""
_INTEGER_WORD = """
__device__ __forceinline__ unsigned word(Item item) {
  unsigned sign = 1u << (PLACE_BITS - 1), all = sign * 2 - 1, ordered = ((unsigned)(int)item ^ sign) & all;
  return LARGEST ? ordered : ~ordered & all;
}
"""

_WORK = """
__device__ __forceinline__ Entry from_lane(Entry entry, int mask) {
  unsigned low = __shfl_xor_sync(0xffffffffu, (unsigned)entry, mask);
  if (sizeof(Entry) == 4) return low;
  return (Entry)__shfl_xor_sync(0xffffffffu, (unsigned)(entry >> (PLACE_BITS % 64)), mask) << (PLACE_BITS % 64) | low;
}
__device__ __forceinline__ void order(Entry& first, Entry& second) {
  Entry a = first, b = second;
  first = a > b ? a : b;
  second = a > b ? b : a;
}
// Compare entries of a thread that lie apart, at halving distances.
__device__ __forceinline__ void merge_own(Entry (&own)[V], int from) {
  #pragma unroll
  for (int apart = V / 2; apart > 0; apart /= 2) {
    if (apart > from) continue;
    #pragma unroll
    for (int i = 0; i < V; i++)
      if (!(i & apart)) order(own[i], own[i | apart]);
  }
}
// Compare entries with those of another thread, in the same order or mirrored; the first thread keeps the larger ones.
template <bool MIRRORED>
__device__ __forceinline__ void merge_with(Entry (&own)[V], Entry* shared, int mask, bool is_first, int thread) {
  if (mask < 32) {
    Entry other[V];
    #pragma unroll
    for (int i = 0; i < V; i++) other[i] = from_lane(own[MIRRORED ? V - 1 - i : i], mask);
    #pragma unroll
    for (int i = 0; i < V; i++)
      if ((other[i] > own[i]) == is_first) own[i] = other[i];
  } else {
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < V; i++) shared[i * T + thread] = own[i];
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < V; i++) {
      Entry other = shared[(MIRRORED ? V - 1 - i : i) * T + (thread ^ mask)];
      if ((other > own[i]) == is_first) own[i] = other;
    }
  }
}
__device__ __forceinline__ void sort_row(const Item* __restrict__ all, Item* __restrict__ values, Index* __restrict__ indices,
                                         Entry* shared, int block, int thread) {
  const Item* x = all + (long long)block * N;
  // 1. Any thread may have any element.
  Entry own[V];
  #pragma unroll
  for (int i = 0; i < V; i++) {
    int place = i * T + thread;
    own[i] = place < N ? (Entry)word(x[place]) << PLACE_BITS | ((Entry)~place & (((Entry)1 << PLACE_BITS) - 1)) : 0;
  }
  // 2. Entries of a thread, then those of more and more threads.
  #pragma unroll
  for (int size = 2; size <= V; size *= 2) {
    #pragma unroll
    for (int i = 0; i < V; i++)
      if (!(i & size / 2)) order(own[i], own[i ^ (size - 1)]);
    merge_own(own, size / 4);
  }
  #pragma unroll 1
  for (int span = 2; span <= T; span *= 2) {
    merge_with<true>(own, shared, span - 1, !(thread & span / 2), thread);
    #pragma unroll 1
    for (int apart = span / 4; apart > 0; apart /= 2) merge_with<false>(own, shared, apart, !(thread & apart), thread);
    merge_own(own, V / 2);
  }
  // 3. Through shared memory, whose rows of V entries begin in different banks, to neighbours that store neighbours.
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < V; i++) shared[thread * (V + 1) + i] = own[i];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < V; i++) {
    int at = i * T + thread;
    if (at < K) {
      int place = (int)(~shared[at / V * (V + 1) + at % V] & (((Entry)1 << PLACE_BITS) - 1));
      values[(long long)block * K + at] = x[place];
      indices[(long long)block * K + at] = place;
    }
  }
}
// Where a GPU does not compute with bfloat16, TVM has words of 16 bits.
template <class X>
__device__ __forceinline__ void sort(const X* x, X* values, Index* indices, Entry* shared, int block, int thread) {
  sort_row(reinterpret_cast<const Item*>(x), reinterpret_cast<Item*>(values), indices, shared, block, thread);
}
"""


def sort_source(spec: TopSpec, params: GpuSortParams) -> str:
    """Return the text of the kernel's work, function `sort`."""
    sizes = spec.sizes
    return filled(
        _CONSTANTS + (_FLOAT_WORD if is_float(spec.dtype) else _INTEGER_WORD) + _WORK,
        threads=params.threads,
        items=params.items,
        extent=sizes.extent,
        count=sizes.results,
        largest=spec.is_largest_first,
        item=cuda_type(spec.dtype),
        index=cuda_type(spec.index_dtype),
        entry={4: "unsigned", 8: "uint64_t"}[params.entry_bytes(sizes)],
        wide=in_float32(spec.dtype, "item"),
        bits="__float_as_uint(x)" if spec.dtype == "float32" else "(unsigned)*reinterpret_cast<const unsigned short*>(&item)",
    )
