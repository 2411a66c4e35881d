"""Owns the CUDA text of slices that are looked up by indices: threads that share a piece of a slice, with all of its vectors under way.

Knows nothing of how parameters are chosen.

A slice can be loaded when its index has come, two latencies one after the other. Ahead, both pass while the preceding kernel ends: a
relaxed load reads the index as it is then, and what it names is prefetched to L2. The preceding kernel may still write indices or slices:
an index is a hint, brought between bounds. After the wait the index is read again while the slice is loaded that the hint names; where the
two differ, the right one is loaded. All these loads are asm, as nvcc may move others of what a kernel only reads before the wait.
"""

from __future__ import annotations

from kerneldecl.analysis.gather import GatherRowsParams
from kerneldecl.compiler.gather import GatherSpec
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.gpu.cuda_text import filled
from kerneldecl.templates.gpu.cuda_types import access_type, cuda_type

_CONSTANTS = """
constexpr int T = {threads}, L = {lanes}, U = {unroll}, V = {vectors}, PIECES = (V + L * U - 1) / (L * U);
constexpr int COUNT = {count}, ALL = {outer} * COUNT * PIECES;
constexpr long long EXTENT = {extent};
using Access = {access};  // neighbouring elements, which a thread loads or stores at once
using Index = {index};
struct Piece {
  int slice, first;  // of the result; this thread's first vector
};
__device__ __forceinline__ Piece piece_of(int number, int thread) { return {number / PIECES, number % PIECES * (L * U) + thread % L}; }
__device__ __forceinline__ const Access* source_of(const Access* x, Piece piece, long long index) {
  return x + (piece.slice / COUNT * EXTENT + index) * V + piece.first;
}
__device__ __forceinline__ void store(Access* y, Piece piece, const Access (&held)[U]) {
  Access* to = y + (long long)piece.slice * V + piece.first;
  #pragma unroll
  for (int u = 0; u < U; u++)
    if (piece.first + u * L < V) to[u * L] = held[u];
}
"""

_AT_ONCE = """
__device__ __forceinline__ void gather_piece(const Access* __restrict__ x, const Index* __restrict__ indices, Access* __restrict__ y,
                                             int number, int thread) {
  if (number >= ALL) return;
  Piece piece = piece_of(number, thread);
  const Access* from = source_of(x, piece, indices[piece.slice % COUNT]);
  Access held[U];
  #pragma unroll
  for (int u = 0; u < U; u++)
    if (piece.first + u * L < V) held[u] = from[u * L];
  store(y, piece, held);
}
"""

_AHEAD = """
__device__ __forceinline__ Index look(const Index* at) {
  Index found;
  asm volatile("ld.relaxed.gpu.global.{index_load} %0, [%1];" : "={index_register}"(found) : "l"(at) : "memory");
  return found;
}
__device__ __forceinline__ void load(const Access* from, int first, Access (&held)[U]) {
  #pragma unroll
  for (int u = 0; u < U; u++)
    if (first + u * L < V) asm volatile("ld.global.{load} : "l"(from + u * L) : "memory");
}
__device__ __forceinline__ void gather_piece(const Access* x, const Index* indices, Access* y, int number, int thread) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  // The last block may have threads without a piece.
  Piece piece = piece_of(number < ALL ? number : ALL - 1, thread);
  const Index* at = indices + piece.slice % COUNT;
  Index hint = look(at);
  const Access* from = source_of(x, piece, min(max((long long)hint, 0ll), EXTENT - 1));
  #pragma unroll
  for (int u = 0; u < U; u++)
    if (piece.first + u * L < V && (piece.first + u * L) % {line_vectors} == 0)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(from + u * L));
  asm volatile("griddepcontrol.wait;" ::: "memory");
  Index index = look(at);
  Access held[U];
  load(from, piece.first, held);
  if (index != hint) load(source_of(x, piece, index), piece.first, held);
  if (number < ALL) store(y, piece, held);
}
"""

_CALLED = """
// Where a GPU does not compute with bfloat16, TVM has words of 16 bits.
template <class X>
__device__ __forceinline__ void gather_rows(const X* x, const Index* indices, X* y, int block, int thread) {
  gather_piece(reinterpret_cast<const Access*>(x), indices, reinterpret_cast<Access*>(y), block * (T / L) + thread / L, thread);
}
"""
_LOADS = {
    16: """v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(held[u].x), "=r"(held[u].y), "=r"(held[u].z), "=r"(held[u].w)""",
    8: """v2.u32 {%0, %1}, [%2];" : "=r"(held[u].x), "=r"(held[u].y)""",
    4: """u32 %0, [%1];" : "=r"(held[u])""",
}
"""A load in PTX by the bytes of a vector, but for the address."""
_LINE_BYTES = 128


def gather_rows_source(spec: GatherSpec, params: GatherRowsParams) -> str:
    """Return the text of the kernel's work, `gather_rows`; ahead, it waits for the preceding kernel itself."""
    sizes = spec.sizes
    bits = 8 * dtype_bytes(sizes.index_dtype)
    return filled(
        _CONSTANTS + (_AHEAD if params.ahead else _AT_ONCE) + _CALLED,
        threads=params.threads,
        lanes=params.lanes,
        unroll=params.unroll,
        vectors=sizes.vectors,
        count=sizes.indices,
        outer=sizes.outer,
        extent=sizes.extent,
        access=access_type(sizes.access_bytes),
        index=cuda_type(sizes.index_dtype),
        index_load=f"u{bits}",
        index_register="l" if bits == 64 else "r",
        load=_LOADS[sizes.access_bytes],
        line_vectors=_LINE_BYTES // sizes.access_bytes,
    )
