"""Owns the CUDA text of the first elements of rows in their order: a thread block for each row chooses few elements and sorts them.

Knows nothing of how parameters are chosen.

An element becomes an entry of 64 bits: a word whose order is the elements', and below it the place, counted down. All entries differ, and
the larger comes first, so that the sort is stable whatever order it starts from.

Where a row has more elements than entries, those are chosen first that may be among the results. The count-th largest of the threads'
largest elements is a bound that at least so many elements reach. Where too many do, such as equal ones, the bound is searched bit by bit,
among words and then among the places of those that equal it.
"""

from __future__ import annotations

from kerneldecl.analysis.row_sort import GpuTopParams
from kerneldecl.analysis.top_vectors import has_ends, least_vectors, top_width
from kerneldecl.arrays import is_float
from kerneldecl.compiler.row_sort import TopSpec
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.gpu.cuda_text import filled
from kerneldecl.templates.gpu.cuda_types import access_type, cuda_type, in_float32

_CONSTANTS = """
constexpr int T = {threads}, W = {width}, N = {extent}, K = {count}, E = {entries}, VECTORS = {vectors};
constexpr bool KEPT = {kept}, LARGEST = {largest};
using Item = {item};
using Index = {index};
using Access = {access};  // W neighbouring elements
using Entry = unsigned long long;
"""

_FLOAT_WORD = """
// A word that is larger where the element comes earlier. NaN is the largest, -0 equals 0.
__device__ __forceinline__ unsigned word(Item item) {
  float x = {wide};
  unsigned bits = x == 0.0f ? 0u : __float_as_uint(x);
  unsigned ordered = x != x ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return LARGEST ? ordered : ~ordered;
}
"""
_INTEGER_WORD = """
__device__ __forceinline__ unsigned word(Item item) {
  unsigned ordered = (unsigned)(int)item ^ 0x80000000u;
  return LARGEST ? ordered : ~ordered;
}
"""

_EACH = """// Do something with each of a thread's elements: its word and its place.
template <bool FIRST, class Use>
__device__ __forceinline__ void each(const Item* __restrict__ x, Shared& shared, int thread, Use use) {
  constexpr int U = 4;
  for (int base = 0; base < VECTORS; base += T * U) {
    Access held[U];
    #pragma unroll
    for (int u = 0; u < U; u++) {
      int at = base + u * T + thread;
      if (at < VECTORS) held[u] = KEPT && !FIRST ? shared.row[at] : reinterpret_cast<const Access*>(x)[at];
    }
    #pragma unroll
    for (int u = 0; u < U; u++) {
      int at = base + u * T + thread;
      if (at < VECTORS) {
        if (KEPT && FIRST) shared.row[at] = held[u];
        #pragma unroll
        for (int w = 0; w < W; w++) use(word(reinterpret_cast<const Item*>(&held[u])[w]), at * W + w);
      }
    }
  }
}
"""
_EACH_WITH_ENDS = """// Do something with each of a thread's elements: its word and its place. Rows begin between vectors: elements before
// the first whole one and behind the last one are read one by one, while vectors are under way.
template <bool FIRST, class Use>
__device__ __forceinline__ void each(const Item* __restrict__ x, Shared& shared, int thread, Use use) {
  constexpr int U = 4;
  int head = (W - (int)((size_t)x / sizeof(Item) % W)) % W, vectors = (N - head) / W, ends = N - vectors * W;
  int end = thread < head ? thread : thread + vectors * W;
  Item single{};
  if (thread < ends) single = x[end];
  for (int base = 0; base < vectors; base += T * U) {
    Access held[U];
    #pragma unroll
    for (int u = 0; u < U; u++) {
      int at = base + u * T + thread;
      if (at < vectors) held[u] = KEPT && !FIRST ? shared.row[at] : reinterpret_cast<const Access*>(x + head)[at];
    }
    #pragma unroll
    for (int u = 0; u < U; u++) {
      int at = base + u * T + thread;
      if (at < vectors) {
        if (KEPT && FIRST) shared.row[at] = held[u];
        #pragma unroll
        for (int w = 0; w < W; w++) use(word(reinterpret_cast<const Item*>(&held[u])[w]), head + at * W + w);
      }
    }
  }
  if (thread < ends) use(word(single), end);
}
"""
_WORK = """
struct Shared {
  Entry* entries;
  unsigned* counter;
  Access* row;
};
__device__ __forceinline__ Entry entry_of(unsigned word, int place) { return (Entry)word << 32 | (unsigned)~place; }
{each}// Count over all threads; `counter` has three cells, which are taken in turns.
__device__ __forceinline__ int total(int own, unsigned* counter, int& turn, int thread) {
  #pragma unroll
  for (int by = 16; by; by /= 2) own += __shfl_xor_sync(0xffffffffu, own, by);
  if (thread == 0) counter[(turn + 1) % 3] = 0;
  if (thread % 32 == 0) atomicAdd(counter + turn, (unsigned)own);
  __syncthreads();
  int all = counter[turn];
  turn = (turn + 1) % 3;
  return all;
}
// Keep entries of elements from a bound on; return how many there are, also where not all have room.
template <class Wanted>
__device__ __forceinline__ int gather(const Item* x, Shared& shared, int thread, Wanted wanted) {
  if (thread == 0) shared.counter[3] = 0;
  __syncthreads();
  each<false>(x, shared, thread, [&](unsigned word, int place) {
    if (wanted(word, place)) {
      unsigned to = atomicAdd(shared.counter + 3, 1u);
      if (to < E) shared.entries[to] = entry_of(word, place);
    }
  });
  __syncthreads();
  return shared.counter[3];
}
// The first elements in any order: return their number.
__device__ __forceinline__ int choose(const Item* __restrict__ x, Shared& shared, int thread) {
  unsigned highest = 0;
  bool has = false;
  each<true>(x, shared, thread, [&](unsigned word, int) { highest = max(highest, word), has = true; });
  unsigned bound = 0;
  if (K <= T && K <= VECTORS) {
    for (int bit = 31; bit >= 0; bit--) {
      int reached = __syncthreads_count(has && highest >= (bound | 1u << bit));
      if (reached >= K) bound |= 1u << bit;
      if (reached == K) break;
    }
    int found = gather(x, shared, thread, [=](unsigned word, int) { return word >= bound; });
    if (found <= E) return found;
  }
  int turn = 0;
  if (thread == 0) shared.counter[0] = 0;
  __syncthreads();
  bound = 0;
  for (int bit = 31; bit >= 0; bit--) {
    int own = 0;
    unsigned tried = bound | 1u << bit;
    each<false>(x, shared, thread, [&](unsigned word, int) { own += word >= tried; });
    if (total(own, shared.counter, turn, thread) >= K) bound = tried;
  }
  int above = 0;
  each<false>(x, shared, thread, [&](unsigned word, int) { above += word > bound; });
  int equal = K - total(above, shared.counter, turn, thread), end = 0;
  for (int bit = 30; bit >= 0; bit--) {
    int own = 0, tried = end | 1 << bit;
    each<false>(x, shared, thread, [&](unsigned word, int place) { own += word == bound && place < tried; });
    if (total(own, shared.counter, turn, thread) < equal) end = tried;
  }
  return gather(x, shared, thread, [=](unsigned word, int place) { return word > bound || (word == bound && place <= end); });
}
// Sort a power of two of entries, the largest first (Batcher's bitonic sort). Neighbours up to 32 apart belong to one warp.
__device__ __forceinline__ void sort(Entry* entries, int count, int thread) {
  for (int size = 2; size <= count; size *= 2) {
    for (int apart = size / 2; apart > 0; apart /= 2) {
      for (int pair = thread; pair < count / 2; pair += T) {
        int first = 2 * pair - pair % apart, second = first + apart;
        Entry a = entries[first], b = entries[second];
        if ((a < b) == !(first & size)) entries[first] = b, entries[second] = a;
      }
      if (apart > 32 || (apart == 1 && size >= 64)) __syncthreads();
      else __syncwarp();
    }
  }
  __syncthreads();
}
__device__ __forceinline__ void top_of(const Item* __restrict__ all, Item* __restrict__ values, Index* __restrict__ indices,
                                    unsigned char* smem, int block, int thread) {
  const Item* x = all + (long long)block * N;
  Entry* entries = reinterpret_cast<Entry*>(smem);
  Shared shared{entries, reinterpret_cast<unsigned*>(entries + E), reinterpret_cast<Access*>(entries + E + 32)};
  int count;
  if (N <= E) {
    count = N;
    each<true>(x, shared, thread, [&](unsigned word, int place) { shared.entries[place] = entry_of(word, place); });
  } else {
    count = choose(x, shared, thread);
  }
  int power = 2;
  while (power < count) power *= 2;
  for (int at = count + thread; at < power; at += T) shared.entries[at] = 0;
  __syncthreads();
  sort(shared.entries, power, thread);
  for (int at = thread; at < K; at += T) {
    int place = ~(unsigned)shared.entries[at];
    values[(long long)block * K + at] = x[place];
    indices[(long long)block * K + at] = place;
  }
}
"""
_CALLED = """
// Where a GPU does not compute with bfloat16, TVM has words of 16 bits.
template <class X>
__device__ __forceinline__ void top(const X* x, X* values, Index* indices, unsigned char* smem, int block, int thread) {
  top_of(reinterpret_cast<const Item*>(x), reinterpret_cast<Item*>(values), indices, smem, block, thread);
}
"""


def top_source(spec: TopSpec, params: GpuTopParams) -> str:
    """Return the text of the kernel's work, function `top`."""
    sizes = spec.sizes
    width, is_odd = top_width(sizes, params), has_ends(sizes)
    text = filled(_WORK, each=_EACH_WITH_ENDS if is_odd else _EACH)
    return filled(
        _CONSTANTS + (_FLOAT_WORD if is_float(spec.dtype) else _INTEGER_WORD) + text + _CALLED,
        threads=params.threads,
        width=width,
        vectors=least_vectors(sizes, width) if is_odd else "N / W",
        extent=sizes.extent,
        count=sizes.results,
        entries=params.entries,
        kept=bool(params.kept),
        largest=spec.is_largest_first,
        item=cuda_type(spec.dtype),
        index=cuda_type(spec.index_dtype),
        access=access_type(width * dtype_bytes(spec.dtype)),
        wide=in_float32(spec.dtype, "item"),
    )
