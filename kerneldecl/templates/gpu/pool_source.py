"""Owns the CUDA text of pooling: a thread goes down a strip of columns, and keeps the windows that each row of its input is in.

Knows nothing of how parameters are chosen.

Maxima and sums are separable: a row's part of a window is computed once, for all windows of a column that contain the row. Maxima of 16
bits are computed two at once, and give NaN where an operand is NaN; sums of 16 bits are float32. What is outside the image is minus
infinity or zero, which a predicate of each vector's load leaves in the registers.
"""

from __future__ import annotations

from kerneldecl.analysis.pool import PoolParams
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.compiler.passes.l2_prefetch import PREFETCH_BYTES
from kerneldecl.model import Gpu, dtype_bytes
from kerneldecl.templates.gpu.cuda_text import filled
from kerneldecl.templates.gpu.cuda_types import vector_types, widened
from kerneldecl.templates.gpu.read_pool import PoolSpec

_CONSTANTS = """
constexpr int T = {threads}, WIDTH = {width}, COLUMN = {column}, STRIP = {strip};
constexpr int IMAGE_ROWS = {image_rows}, IMAGE_COLUMNS = {image_columns}, VECTORS = {channels} / WIDTH;
constexpr int OUT_ROWS = {out_rows}, OUT_COLUMNS = {out_columns};
constexpr int WINDOW_ROWS = {window_rows}, STRIDE_ROWS = {stride_rows}, STEP_ROWS = {step_rows}, BEFORE_ROWS = {before_rows};
constexpr int WINDOW_COLUMNS = {window_columns}, STRIDE_COLUMNS = {stride_columns}, STEP_COLUMNS = {step_columns};
constexpr int BEFORE_COLUMNS = {before_columns};
constexpr int BANDS = (OUT_ROWS + COLUMN - 1) / COLUMN, STRIPS = (OUT_COLUMNS + STRIP - 1) / STRIP;
constexpr int TURNS = {images} * BANDS * STRIPS * VECTORS;
// Rows and columns of the input that a thread reads.
constexpr int ROWS = (COLUMN - 1) * STRIDE_ROWS + (WINDOW_ROWS - 1) * STEP_ROWS + 1;
constexpr int COLUMNS = (STRIP - 1) * STRIDE_COLUMNS + (WINDOW_COLUMNS - 1) * STEP_COLUMNS + 1;
constexpr int AHEAD = {ahead} < ROWS ? {ahead} : ROWS;
constexpr bool ROWS_LEAVE = BEFORE_ROWS > 0 || (BANDS - 1) * COLUMN * STRIDE_ROWS + ROWS > BEFORE_ROWS + IMAGE_ROWS;
constexpr bool COLUMNS_LEAVE = BEFORE_COLUMNS > 0 || (STRIPS - 1) * STRIP * STRIDE_COLUMNS + COLUMNS > BEFORE_COLUMNS + IMAGE_COLUMNS;
using Item = {item};
using Sum = {sum};
using Access = {access};  // WIDTH neighbouring channels
union Held {
  Access access;
  unsigned words[sizeof(Access) / 4];
};
__device__ __forceinline__ Item& item(Held& held, int w) { return reinterpret_cast<Item*>(&held)[w]; }
"""

_PACKED_MAXIMA = """
using Part = Held;
using Pair = {item}2;
constexpr unsigned OUTSIDE = {lowest};  // minus infinity, twice
__device__ __forceinline__ Part part_of(const Held& held) { return held; }
__device__ __forceinline__ void combine(Part& part, Part& other) {
  #pragma unroll
  for (int w = 0; w < WIDTH / 2; w++) {
    Pair& pair = reinterpret_cast<Pair*>(&part)[w];
    pair = __hmax2_nan(pair, reinterpret_cast<Pair*>(&other)[w]);
  }
}
__device__ __forceinline__ Access result(const Part& part, int row, int column) { return part.access; }
"""

_SINGLE = """
struct Part {
  Sum sums[WIDTH];
};
constexpr unsigned OUTSIDE = {lowest};
__device__ __forceinline__ Part part_of(Held& held) {
  Part part;
{widened}
  return part;
}
__device__ __forceinline__ Sum of_both(Sum a, Sum b) { {of_both} }
__device__ __forceinline__ void combine(Part& part, Part& other) {
  #pragma unroll
  for (int w = 0; w < WIDTH; w++) part.sums[w] = of_both(part.sums[w], other.sums[w]);
}
__device__ __forceinline__ Access result(const Part& part, int row, int column) {
  Held held;
  #pragma unroll
  for (int w = 0; w < WIDTH; w++) {
    Sum sum = part.sums[w];
    item(held, w) = {finished};
  }
  return held.access;
}
"""

_BY_ONE = """  #pragma unroll
  for (int w = 0; w < WIDTH; w++) part.sums[w] = wide(item(held, w));"""
_BY_TWO = """  #pragma unroll
  for (int w = 0; w < WIDTH; w += 2) {
    float2 both = {both}(reinterpret_cast<{item}2*>(&held)[w / 2]);
    part.sums[w] = both.x;
    part.sums[w + 1] = both.y;
  }"""
_BOTH = {"float16": "__half22float2", "bfloat16": "__bfloat1622float2"}
"""Functions from two neighbours to two float32: nvcc takes more instructions for one after the other."""

_WORK = """
__device__ __forceinline__ void read(Access& access, const Access* from) {
  {read}
}
struct Place {
  int out_row, out_column, row, column;  // of a thread's first pixel and its first vector
  __device__ __forceinline__ bool has_row(int r) const { return !ROWS_LEAVE || unsigned(row + r) < unsigned(IMAGE_ROWS); }
  __device__ __forceinline__ bool has_column(int c) const { return !COLUMNS_LEAVE || unsigned(column + c) < unsigned(IMAGE_COLUMNS); }
  __device__ __forceinline__ bool has_result(int p, int s) const {
    return (OUT_ROWS % COLUMN == 0 || out_row + p < OUT_ROWS) && (OUT_COLUMNS % STRIP == 0 || out_column + s < OUT_COLUMNS);
  }
};
__device__ __forceinline__ void load(Held (&held)[COLUMNS], const Access* from, Place place, int r) {
  bool has_row = place.has_row(r);
  #pragma unroll
  for (int c = 0; c < COLUMNS; c++) {
    #pragma unroll
    for (int w = 0; w < int(sizeof(Access) / 4); w++) held[c].words[w] = OUTSIDE;
    if (has_row && place.has_column(c)) read(held[c].access, from + (r * IMAGE_COLUMNS + c) * VECTORS);
  }
}
// A template, as nvcc leaves some loops over rows as they are, whatever pragmas say.
template <int R>
__device__ __forceinline__ void go_down(Held (&held)[AHEAD][COLUMNS], Part (&parts)[COLUMN][STRIP], const Access* from, Access* to,
                                        Place place) {
  // 1. The row's part of each window.
  Part of_row[STRIP];
  #pragma unroll
  for (int s = 0; s < STRIP; s++) {
    of_row[s] = part_of(held[R % AHEAD][s * STRIDE_COLUMNS]);
    #pragma unroll
    for (int j = 1; j < WINDOW_COLUMNS; j++) {
      Part other = part_of(held[R % AHEAD][s * STRIDE_COLUMNS + j * STEP_COLUMNS]);
      combine(of_row[s], other);
    }
  }
  // 2. The next row that its registers are for.
  if (R + AHEAD < ROWS) load(held[R % AHEAD], from, place, R + AHEAD);
  // 3. The windows that contain the row; those that end with it are stored.
  #pragma unroll
  for (int p = 0; p < COLUMN; p++) {
    int tap = R - p * STRIDE_ROWS;
    if (tap < 0 || tap % STEP_ROWS != 0 || tap >= WINDOW_ROWS * STEP_ROWS) continue;
    #pragma unroll
    for (int s = 0; s < STRIP; s++) {
      if (tap == 0) parts[p][s] = of_row[s];
      else combine(parts[p][s], of_row[s]);
      if (tap == (WINDOW_ROWS - 1) * STEP_ROWS && place.has_result(p, s))
        to[(p * OUT_COLUMNS + s) * VECTORS] = result(parts[p][s], place.out_row + p, place.out_column + s);
    }
  }
  if constexpr (R + 1 < ROWS) go_down<R + 1>(held, parts, from, to, place);
}
__device__ __forceinline__ void pool_windows(const Access* x, Access* y, int block, int thread) {
  int turn = block * T + thread;
  int vector = turn % VECTORS, strip = turn / VECTORS % STRIPS, band = turn / (VECTORS * STRIPS) % BANDS;
  int image = turn / (VECTORS * STRIPS * BANDS);
  Place place = {band * COLUMN, strip * STRIP, band * COLUMN * STRIDE_ROWS - BEFORE_ROWS, strip * STRIP * STRIDE_COLUMNS - BEFORE_COLUMNS};
  const Access* from = x + ((image * IMAGE_ROWS + place.row) * IMAGE_COLUMNS + place.column) * VECTORS + vector;
  Access* to = y + ((image * OUT_ROWS + place.out_row) * OUT_COLUMNS + place.out_column) * VECTORS + vector;
  {start}
  if (TURNS % T != 0 && turn >= TURNS) return;
  // From here on an address is this one and a constant, which a load adds itself.
  asm("" : "+l"(from));
  Held held[AHEAD][COLUMNS];
  Part parts[COLUMN][STRIP];
  #pragma unroll
  for (int r = 0; r < AHEAD; r++) load(held[r], from, place, r);
  go_down<0>(held, parts, from, to, place);
}
// Where a GPU does not compute with bfloat16, TVM has words of 16 bits.
template <class X>
__device__ __forceinline__ void pool_all(const X* x, X* y, int block, int thread) {
  pool_windows(reinterpret_cast<const Access*>(x), reinterpret_cast<Access*>(y), block, thread);
}
"""
LINE_BYTES = 128
"""Bytes of one line of L2, which a prefetch loads."""
_LOWEST = {"float16": "0xfc00fc00u", "bfloat16": "0xff80ff80u", "float32": "0xff800000u"}
"""Words of minus infinity."""
_MAXIMUM = 'float c; asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c;'
_READS = {
    16: """asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(access.x), "=r"(access.y), "=r"(access.z), "=r"(access.w) : "l"(from) : "memory");""",
    8: """asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(access.x), "=r"(access.y) : "l"(from) : "memory");""",
    4: """asm volatile("ld.global.u32 %0, [%1];" : "=r"(access) : "l"(from) : "memory");""",
}
"""By the bytes of a vector. They are asm, as nvcc moves other loads of what a kernel only reads before its wait."""
_START = """asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  // The preceding kernel may still write the image: this changes nothing but where its bytes are.
  if (block < FIRST_BLOCKS && turn < TURNS && vector % LINE_VECTORS == 0) {
    #pragma unroll
    for (int r = 0; r < EARLY_ROWS; r++) {
      #pragma unroll
      for (int c = 0; c < EARLY_COLUMNS; c++) {
        int down = r + BEFORE_ROWS, along = c + BEFORE_COLUMNS;
        if (unsigned(place.row + down) < unsigned(IMAGE_ROWS) && unsigned(place.column + along) < unsigned(IMAGE_COLUMNS))
          asm volatile("prefetch.global.L2 [%0];" ::"l"(from + (down * IMAGE_COLUMNS + along) * VECTORS));
      }
    }
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");"""
_EARLY = """
// Blocks of the first wave, at most, and how many of a thread's rows and columns they prefetch: not those that neighbours do.
constexpr int FIRST_BLOCKS = {first_blocks}, EARLY_ROWS = {early_rows} < ROWS - BEFORE_ROWS ? {early_rows} : ROWS - BEFORE_ROWS;
constexpr int EARLY_COLUMNS = STRIP * STRIDE_COLUMNS < COLUMNS ? STRIP * STRIDE_COLUMNS : COLUMNS;
constexpr int LINE_VECTORS = VECTORS < {line_vectors} ? VECTORS : {line_vectors};
"""
_FIRST_THREADS = 1024
"""Threads of an SM that prefetch: those of 64 registers that it holds."""


def pool_source(spec: PoolSpec, params: PoolParams, gpu: Gpu) -> str:
    """Return the text of the kernel's work, function `pool_all`; with PDL it waits for the preceding kernel itself."""
    sizes, pdl = spec.sizes, supports_pdl(gpu)
    access_bytes = params.width * dtype_bytes(sizes.dtype)
    is_packed = spec.is_maximum and sizes.dtype != "float32"
    part = _PACKED_MAXIMA if is_packed else widened(sizes.dtype, "float32") + _SINGLE
    widening = _BY_TWO if sizes.dtype in _BOTH else _BY_ONE
    text = filled(_CONSTANTS + part + (_EARLY if pdl else "") + _WORK, start=_START if pdl else "", widened=widening)
    return filled(
        text,
        **params._asdict(),
        **sizes._asdict(),
        before_rows=spec.before[0],
        before_columns=spec.before[1],
        lowest=_LOWEST[sizes.dtype] if spec.is_maximum else "0",
        of_both=_MAXIMUM if spec.is_maximum else "return a + b;",
        finished=spec.finished,
        both=_BOTH.get(sizes.dtype, ""),
        read=_READS[access_bytes],
        first_blocks=gpu.sm_count * max(1, _FIRST_THREADS // params.threads),
        early_rows=max(1, PREFETCH_BYTES // _FIRST_THREADS // (params.strip * sizes.stride_columns * access_bytes)),
        line_vectors=LINE_BYTES // access_bytes,
        **vector_types(sizes.dtype, "float32", params.width),
    )
