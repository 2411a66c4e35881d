"""Owns the CUDA text of rotary position embedding: a thread turns the same two vectors of several heads.

Knows nothing of how parameters are chosen.
"""

from __future__ import annotations

from kerneldecl.analysis.rotary import RotaryParams
from kerneldecl.compiler.rotary import RotarySpec
from kerneldecl.templates.gpu.cuda_text import filled
from kerneldecl.templates.gpu.cuda_types import vector_types, widened

_CONSTANTS = """
constexpr int T = {threads}, W = {width}, H = {turned_heads}, SIZE = {size}, VECTORS = SIZE / 2 / W;
constexpr int TOKENS = {tokens}, HEADS = {heads}, TURNS = {turns};
constexpr bool PAIRS = {pairs}, X_TOKENS_FIRST = {x_first}, Y_TOKENS_FIRST = {y_first};
// Pairs of vectors of one element are neighbours. Otherwise a thread has a vector of each half, so that each access of a warp is to whole
// sectors.
constexpr bool ARE_NEIGHBOURS = PAIRS && W == 1;
// Elements from a thread's first vector to its second.
constexpr int APART = ARE_NEIGHBOURS ? 1 : SIZE / 2;
using Item = {item};
using Sum = {sum};
using Access = {access};  // W neighbouring elements
"""

_WORK = """
union Vector {
  Access access;
  unsigned short words[sizeof(Access) / 2];
};
__device__ __forceinline__ Sum at(const Vector& held, int w) { return wide(reinterpret_cast<const Item*>(&held)[w]); }
__device__ __forceinline__ int place(int head, int token, bool is_tokens_first) {
  int batch = head / HEADS, own = head % HEADS;
  return (is_tokens_first ? (batch * TOKENS + token) * HEADS + own : (batch * HEADS + own) * TOKENS + token) * SIZE;
}
__device__ __forceinline__ void load(Vector* held, const Item* from) {
  held[0].access = *reinterpret_cast<const Access*>(from);
  held[1].access = *reinterpret_cast<const Access*>(from + APART);
}
__device__ __forceinline__ void turn_heads(const Item* __restrict__ x, const Item* __restrict__ cosines, const Item* __restrict__ sines,
                                           Item* __restrict__ y, int block, int thread) {
  int turn = block * T + thread;
  if (TURNS % T != 0 && turn >= TURNS) return;
  int column = turn % VECTORS * (ARE_NEIGHBOURS ? 2 : W), token = turn / VECTORS % TOKENS, first = turn / (VECTORS * TOKENS) * H;
  Vector held[H][2], cosine[2], sine[2];
  // All loads are under way before one of them is waited for.
  #pragma unroll
  for (int h = 0; h < H; h++) load(held[h], x + place(first + h, token, X_TOKENS_FIRST) + column);
  load(cosine, cosines + token * SIZE + column);
  load(sine, sines + token * SIZE + column);
  #pragma unroll
  for (int h = 0; h < H; h++) {
    Vector out[2];
    #pragma unroll
    for (int v = 0; v < 2; v++) {
      #pragma unroll
      for (int w = 0; w < W; w++) {
        // With width 1, a pair's neighbours are the two vectors.
        bool is_within = PAIRS && W > 1;
        bool is_first = is_within ? w % 2 == 0 : v == 0;
        Sum other = is_within ? at(held[h][v], w ^ 1) : at(held[h][1 - v], w);
        Sum sum = at(held[h][v], w) * at(cosine[v], w) + (is_first ? -other : other) * at(sine[v], w);
        reinterpret_cast<Item*>(&out[v])[w] = narrow(sum);
      }
    }
    Item* to = y + place(first + h, token, Y_TOKENS_FIRST) + column;
    *reinterpret_cast<Access*>(to) = out[0].access;
    *reinterpret_cast<Access*>(to + APART) = out[1].access;
  }
}
// Where a GPU does not compute with bfloat16, TVM has words of 16 bits.
template <class X>
__device__ __forceinline__ void turn_all(const X* x, const X* cosines, const X* sines, X* y, int block, int thread) {
  turn_heads(reinterpret_cast<const Item*>(x), reinterpret_cast<const Item*>(cosines), reinterpret_cast<const Item*>(sines),
             reinterpret_cast<Item*>(y), block, thread);
}
"""


def rotary_source(spec: RotarySpec, params: RotaryParams) -> str:
    """Return the text of the kernel's work, function `turn_all`."""
    return filled(
        _CONSTANTS + widened(spec.dtype, spec.accum) + _WORK,
        threads=params.threads,
        width=params.width,
        turned_heads=params.heads,
        size=spec.size,
        tokens=spec.tokens,
        heads=spec.heads,
        turns=params.turns(spec.sizes),
        pairs=spec.pairs,
        x_first="x" in spec.interleaved,
        y_first="y" in spec.interleaved,
        **vector_types(spec.dtype, spec.accum, params.width),
    )
