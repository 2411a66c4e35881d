"""Owns the CUDA text of cumulative sums along rows in one pass: tiles wait for the sums of all tiles before them.

Knows nothing of how parameters are chosen.

Thread blocks take tiles in the order in which they begin, by a counter, so that whatever a block waits for is under way already. A tile's
sum is published together with the word that says so, and the last tile of each group publishes the group's. Every tile adds up the sums of
the tiles before it in its group and of the groups before that, in one order: unlike decoupled look-back, which takes a neighbour's total
where it is there already, each call gives the same bits.
"""

from __future__ import annotations

from kerneldecl.analysis.scan import GROUP_TILES, GpuScanOnceParams, GpuScanParams
from kerneldecl.compiler.scan import ScanSpec
from kerneldecl.templates.gpu.cuda_text import filled
from kerneldecl.templates.gpu.scan_source import constants_of, row_parts

PUBLISHED = """\
constexpr uint64_t THERE = 1ull << 32;
// Nothing is published yet, and no tile is taken.
template <class K>
__device__ __forceinline__ void clear(K* found, int block, int thread) {
  int at = block * 256 + thread;
  if (at <= WORDS) found[at] = 0;
}
__device__ __forceinline__ void publish(uint64_t* to, Sum sum) {
  uint64_t word = THERE | *reinterpret_cast<const unsigned*>(&sum);
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word));
}
__device__ __forceinline__ uint64_t look(const uint64_t* at) {
  uint64_t word;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(at));
  return word;
}
"""
"""Words that hold a sum and say that it is there: how they are cleared, published and looked at."""
_SIZES = """
constexpr int TILE = T * W * U, TILES = (N + TILE - 1) / TILE, COUNT = {outer} * TILES;
constexpr int G = {group}, GROUPS = (TILES + G - 1) / G, WORDS = COUNT + {outer} * GROUPS, MOST = GROUPS > G ? GROUPS : G;
constexpr int LOOKS = MOST > 3 * T ? 4 : (MOST + T - 1) / T;
"""
_TILES = """\
// This thread's share of so many published sums: several are asked for before one is waited for. The first one has been looked at before.
__device__ __forceinline__ Sum added(const uint64_t* words, int count, int thread, uint64_t first) {
  Sum sum = 0;
  for (int begin = 0; begin < count; begin += LOOKS * T) {
    uint64_t seen[LOOKS] = {begin == 0 ? first : 0};
    bool waits = true;
    while (waits) {
      waits = false;
      #pragma unroll
      for (int i = 0; i < LOOKS; i++) {
        int at = begin + i * T + thread;
        if (at < count && !(seen[i] & THERE)) seen[i] = look(words + at);
      }
      #pragma unroll
      for (int i = 0; i < LOOKS; i++) waits |= begin + i * T + thread < count && !(seen[i] & THERE);
    }
    #pragma unroll
    for (int i = 0; i < LOOKS; i++) {
      unsigned word = (unsigned)seen[i];
      if (begin + i * T + thread < count) sum += *reinterpret_cast<const Sum*>(&word);
    }
  }
  return sum;
}
__device__ __forceinline__ void scan_tile(const Item* __restrict__ x, Item* __restrict__ y, uint64_t* found, Sum* cells, int thread) {
  unsigned* taken = reinterpret_cast<unsigned*>(cells + 96);
  if (thread == 0) *taken = atomicAdd(reinterpret_cast<unsigned*>(found + WORDS), 1u);
  __syncthreads();
  int at_tile = *taken, tile = at_tile % TILES, group = tile / G, before = tile % G;
  uint64_t* groups = found + COUNT + at_tile / TILES * GROUPS;
  const Item* from = x + (long long)(at_tile / TILES) * N;
  Item* to = y + (long long)(at_tile / TILES) * N;
  long long first = (long long)tile * TILE;
  // 1. The tile's own sums.
  Access held[U];
  load(from, first, thread, held);
  // Most groups before have been published long ago: nobody waits here for the others.
  uint64_t early = thread < group ? look(groups + thread) : 0;
  Sum own[U] = {}, before_it[U], all;
  sum_each(held, first, thread, own);
  before_each(own, before_it, cells, thread, all);
  if (thread == 0) publish(found + at_tile, all);
  // 2. The sums of the tiles before it in its group, and of the groups before.
  Sum sum = added(found + (at_tile - before), before, thread, 0), carry;
  if (before == G - 1) {
    Sum others;
    before_me(sum, cells + 64, thread, others);
    if (thread == 0) publish(groups + group, others + all);
    __syncthreads();
  }
  sum += added(groups, group, thread, early);
  before_me(sum, cells + 64, thread, carry);
  // 3. The results.
  store(to, held, first, thread, before_it, carry);
}
// Where a GPU does not compute with bfloat16, TVM has words of 16 bits.
template <class X>
__device__ __forceinline__ void scan_once(const X* x, X* y, uint64_t* found, Sum* cells, int, int thread) {
  scan_tile(reinterpret_cast<const Item*>(x), reinterpret_cast<Item*>(y), found, cells, thread);
}
"""
SMEM_SUMS = 100
"""Sums that a thread block keeps in shared memory: of its warps, of warps that add up earlier tiles', and which tile it has."""
CLEAR_THREADS = 256


def scan_once_source(spec: ScanSpec, params: GpuScanOnceParams) -> str:
    """Return the text of both kernels' work: `clear` and `scan_once`."""
    parts = GpuScanParams(params.threads, 1, params.unroll)
    all_there = spec.sizes.extent % parts.step(spec.sizes) == 0
    work = filled(_SIZES + PUBLISHED + _TILES, outer=spec.sizes.outer, group=GROUP_TILES)
    return constants_of(spec, parts) + row_parts(spec, parts, all_there=all_there) + work
