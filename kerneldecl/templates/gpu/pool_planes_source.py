"""Owns the CUDA text of pooling with channels first: a thread goes down a few neighbouring columns of a plane, and keeps their windows.

Knows nothing of how parameters are chosen.

Maxima and sums are separable: elements of a column are combined down a window first, two of 16 bits at once, then along it. Each element of
a thread's rows is in one load, as wide as its place is aligned. What is outside the image is minus infinity or zero, which a predicate of
each load leaves in the registers.
"""

from __future__ import annotations

from kerneldecl.analysis.pool import FIRST_CAPABILITY
from kerneldecl.analysis.pool_planes import LINE_BYTES, PlanesParams, pieces
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.compiler.passes.l2_prefetch import PREFETCH_BYTES
from kerneldecl.model import Gpu, dtype_bytes
from kerneldecl.templates.gpu.cuda_text import filled
from kerneldecl.templates.gpu.cuda_types import access_type, cuda_type, widened
from kerneldecl.templates.gpu.read_pool import PoolSpec

_CONSTANTS = """
constexpr int T = {threads}, COLUMN = {column}, STRIP = {strip};
constexpr int PLANES = {images} * {channels}, IMAGE_ROWS = {image_rows}, IMAGE_COLUMNS = {image_columns};
constexpr int OUT_ROWS = {out_rows}, OUT_COLUMNS = {out_columns};
constexpr int WINDOW_ROWS = {window_rows}, STRIDE_ROWS = {stride_rows}, STEP_ROWS = {step_rows}, BEFORE_ROWS = {before_rows};
constexpr int WINDOW_COLUMNS = {window_columns}, STRIDE_COLUMNS = {stride_columns}, STEP_COLUMNS = {step_columns};
constexpr int BEFORE_COLUMNS = {before_columns};
constexpr int BANDS = (OUT_ROWS + COLUMN - 1) / COLUMN, STRIPS = (OUT_COLUMNS + STRIP - 1) / STRIP;
constexpr int TURNS = PLANES * BANDS * STRIPS;
// Rows and columns of the input that a thread reads.
constexpr int ROWS = (COLUMN - 1) * STRIDE_ROWS + (WINDOW_ROWS - 1) * STEP_ROWS + 1;
constexpr int COLUMNS = (STRIP - 1) * STRIDE_COLUMNS + (WINDOW_COLUMNS - 1) * STEP_COLUMNS + 1;
constexpr int AHEAD = {ahead} < ROWS ? {ahead} : ROWS;
constexpr int LAST_ROW = (BANDS - 1) * COLUMN * STRIDE_ROWS - BEFORE_ROWS;
constexpr int LAST_COLUMN = (STRIPS - 1) * STRIP * STRIDE_COLUMNS - BEFORE_COLUMNS;
constexpr int OUT_WIDTH = {out_width};
using Item = {item};
using Out = {out};
using Sum = {sum};
using Access = {access};  // OUT_WIDTH neighbouring results
using From = {from};
constexpr int ITEM_BYTES = sizeof(Item);
// Elements of a word, and where an element is: in a word of its own where loads are of one element of 16 bits.
constexpr int EACH = 4 / ITEM_BYTES, SINGLE = {single}, SHIFT = BEFORE_COLUMNS % EACH;
__device__ constexpr int place_of(int e) { return SINGLE ? e * EACH : e == 0 ? 0 : e + SHIFT; }
constexpr int WORDS = ({last_place}) / EACH + 1;
struct Row {
  unsigned words[WORDS];
  __device__ __forceinline__ Item& item(int e) { return reinterpret_cast<Item*>(words)[place_of(e)]; }
};
"""

_PACKED_MAXIMA = """
using Part = Row;
using Pair = {item}2;
constexpr unsigned OUTSIDE = {lowest};  // minus infinity, twice
__device__ __forceinline__ Part part_of(const Row& row) { return row; }
__device__ __forceinline__ void combine(Part& part, Part& other) {
  #pragma unroll
  for (int w = 0; w < WORDS; w++) {
    Pair& pair = reinterpret_cast<Pair*>(part.words)[w];
    pair = __hmax2_nan(pair, reinterpret_cast<Pair*>(other.words)[w]);
  }
}
__device__ __forceinline__ Out along(Part& part, int s, int row, int column) {
  if constexpr (SINGLE) {  // in whole words, as halves would be moved
    Pair* pairs = reinterpret_cast<Pair*>(part.words) + s * STRIDE_COLUMNS;
    Pair most = pairs[0];
    #pragma unroll
    for (int j = 1; j < WINDOW_COLUMNS; j++) most = __hmax2_nan(most, pairs[j * STEP_COLUMNS]);
    return reinterpret_cast<Item*>(&most)[0];
  }
  Item most = part.item(s * STRIDE_COLUMNS);
  #pragma unroll
  for (int j = 1; j < WINDOW_COLUMNS; j++) most = __hmax_nan(most, part.item(s * STRIDE_COLUMNS + j * STEP_COLUMNS));
  return most;
}
"""

_SINGLE = """
struct Part {
  Sum sums[COLUMNS];
};
constexpr unsigned OUTSIDE = {lowest};
__device__ __forceinline__ Part part_of(Row& row) {
  Part part;
  #pragma unroll
  for (int e = 0; e < COLUMNS; e++) part.sums[e] = wide(row.item(e));
  return part;
}
__device__ __forceinline__ Sum of_both(Sum a, Sum b) { {of_both} }
__device__ __forceinline__ void combine(Part& part, Part& other) {
  #pragma unroll
  for (int e = 0; e < COLUMNS; e++) part.sums[e] = of_both(part.sums[e], other.sums[e]);
}
__device__ __forceinline__ Out along(Part& part, int s, int row, int column) {
  Sum sum = part.sums[s * STRIDE_COLUMNS];
  #pragma unroll
  for (int j = 1; j < WINDOW_COLUMNS; j++) sum = of_both(sum, part.sums[s * STRIDE_COLUMNS + j * STEP_COLUMNS]);
  return {finished};
}
"""

_WORK = """
{reads}
struct Place {
  int out_row, out_column, row, column;  // of a thread's first result and its first element
  __device__ __forceinline__ bool has_row(int r) const {
    return (r >= BEFORE_ROWS && LAST_ROW + r < IMAGE_ROWS) || unsigned(row + r) < unsigned(IMAGE_ROWS);
  }
  __device__ __forceinline__ bool has_column(int c) const {
    return (c >= BEFORE_COLUMNS && LAST_COLUMN + c < IMAGE_COLUMNS) || unsigned(column + c) < unsigned(IMAGE_COLUMNS);
  }
  __device__ __forceinline__ bool has_result(int p, int s) const {
    return (OUT_ROWS % COLUMN == 0 || out_row + p < OUT_ROWS) && (OUT_COLUMNS % STRIP == 0 || out_column + s < OUT_COLUMNS);
  }
};
template <int SIZE>
__device__ __forceinline__ void load_piece(Row& into, From from, Place place, bool has_row, int r, int c) {
  constexpr int PIECE_WORDS = SIZE < EACH ? 1 : SIZE / EACH;
  unsigned* words = into.words + place_of(c) / EACH;
  #pragma unroll
  for (int w = 0; w < PIECE_WORDS; w++) words[w] = OUTSIDE;
  if (has_row && place.has_column(c)) read<SIZE * ITEM_BYTES>(words, from + (r * IMAGE_COLUMNS + c) * {from_step});
}
__device__ __forceinline__ void load(Row& into, From from, Place place, int r) {
  bool has_row = place.has_row(r);
{pieces}
}
// A template, as nvcc leaves some loops over rows as they are, whatever pragmas say.
template <int R>
__device__ __forceinline__ void go_down(Row (&held)[AHEAD], Part (&parts)[COLUMN], From from, Out* to, Place place) {
  Part of_row = part_of(held[R % AHEAD]);
  if (R + AHEAD < ROWS) load(held[R % AHEAD], from, place, R + AHEAD);
  #pragma unroll
  for (int p = 0; p < COLUMN; p++) {
    int tap = R - p * STRIDE_ROWS;
    if (tap < 0 || tap % STEP_ROWS != 0 || tap >= WINDOW_ROWS * STEP_ROWS) continue;
    if (tap == 0) parts[p] = of_row;
    else combine(parts[p], of_row);
    if (tap != (WINDOW_ROWS - 1) * STEP_ROWS) continue;
    #pragma unroll
    for (int s = 0; s < STRIP; s += OUT_WIDTH) {
      union {
        Access access;
        Out items[OUT_WIDTH];
      } results;
      #pragma unroll
      for (int w = 0; w < OUT_WIDTH; w++) results.items[w] = along(parts[p], s + w, place.out_row + p, place.out_column + s + w);
      if (place.has_result(p, s)) *reinterpret_cast<Access*>(to + p * OUT_COLUMNS + s) = results.access;
    }
  }
  if constexpr (R + 1 < ROWS) go_down<R + 1>(held, parts, from, to, place);
}
__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ void pool_planes(const Item* x, Out* y, {shared_argument}int block, int thread) {
  // 1. What a block reads lies between two elements of the input.
  int turn = block * T + thread, first_band = block * T / STRIPS, last_band = (least(block * T + T, TURNS) - 1) / STRIPS;
  int first_row = first_band % BANDS * COLUMN * STRIDE_ROWS - BEFORE_ROWS;
  int last_row = least(IMAGE_ROWS, last_band % BANDS * COLUMN * STRIDE_ROWS - BEFORE_ROWS + ROWS);
  int first = (first_band / BANDS * IMAGE_ROWS + (first_row < 0 ? 0 : first_row)) * IMAGE_COLUMNS;
  int last = (last_band / BANDS * IMAGE_ROWS + last_row) * IMAGE_COLUMNS;
  {start}
  // 2. The thread's part of it.
  int strip = turn % STRIPS, band = turn / STRIPS % BANDS, plane = turn / (STRIPS * BANDS);
  Place place = {band * COLUMN, strip * STRIP, band * COLUMN * STRIDE_ROWS - BEFORE_ROWS, strip * STRIP * STRIDE_COLUMNS - BEFORE_COLUMNS};
  int from_row = plane * IMAGE_ROWS + place.row;
  Out* to = y + (plane * OUT_ROWS + place.out_row) * OUT_COLUMNS + place.out_column;
  {stage}
  if (TURNS % T != 0 && turn >= TURNS) return;
  // From here on an address is this one and a constant, which a load adds itself.
  {hide}
  Row held[AHEAD];
  Part parts[COLUMN];
  #pragma unroll
  for (int r = 0; r < AHEAD; r++) load(held[r], from, place, r);
  go_down<0>(held, parts, from, to, place);
}
// Where a GPU does not compute with bfloat16, TVM has words of 16 bits.
template <class X, class Y>
__device__ __forceinline__ void pool_all(const X* x, Y* y, {shared_parameter}int block, int thread) {
  pool_planes(reinterpret_cast<const Item*>(x), reinterpret_cast<Out*>(y), {shared_value}block, thread);
}
"""
_READS = """
template <int BYTES>
__device__ __forceinline__ void read(unsigned* words, From from) {
  if constexpr (BYTES == 16) {
    asm volatile("ld.{space}.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "{register}"(from) : "memory");
  } else if constexpr (BYTES == 8) {
    asm volatile("ld.{space}.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "{register}"(from) : "memory");
  } else if constexpr (BYTES == 4) {
    asm volatile("ld.{space}.u32 %0, [%1];" : "=r"(words[0]) : "{register}"(from) : "memory");
  } else {
    asm volatile("ld.{space}.u16 %0, [%1];" : "=r"(words[0]) : "{register}"(from) : "memory");
  }
}
"""
"""They are asm, as nvcc moves other loads of what a kernel only reads before its wait."""
_DIRECT = """const Item* from = x + from_row * IMAGE_COLUMNS + place.column;"""
_HIDE = 'asm("" : "+{register}"(from));'
_STAGE = """// Rows begin anywhere, but copies by 16 bytes at a multiple of them, up to the input's end.
  constexpr int VECTOR = 16 / ITEM_BYTES, COPIES = ({staged_elements} / VECTOR + T - 1) / T, ELEMENTS = PLANES * IMAGE_ROWS * IMAGE_COLUMNS;
  int staged_from = first / VECTOR * VECTOR, copied = staged_from + thread * VECTOR;
  unsigned shared_from = static_cast<unsigned>(__cvta_generic_to_shared(shared)), copy_to = shared_from + thread * 16;
  const Item* copy_from = x + copied;
  asm("" : "+l"(copy_from), "+r"(copy_to));
  #pragma unroll
  for (int c = 0; c < COPIES; c++) {
    unsigned to = copy_to + c * T * 16;
    const Item* from = copy_from + c * T * VECTOR;
    if (copied < last - c * T * VECTOR) {
      if constexpr (ELEMENTS % VECTOR == 0) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
      } else {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                     "r"(least(VECTOR, ELEMENTS - copied - c * T * VECTOR) * ITEM_BYTES) : "memory");
      }
    }
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  unsigned from = shared_from + (from_row * IMAGE_COLUMNS + place.column - staged_from) * ITEM_BYTES;"""
_START = """asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  // The preceding kernel may still write the image: this changes nothing but where its bytes are. Only blocks of the first wave prefetch.
  int early = first + thread * ({line_bytes} / ITEM_BYTES);
  if (block < {first_blocks} && thread < {early_threads} && early < last) asm volatile("prefetch.global.L2 [%0];" ::"l"(x + early));
  asm volatile("griddepcontrol.wait;" ::: "memory");"""
_LOWEST = {"float16": "0xfc00fc00u", "bfloat16": "0xff80ff80u", "float32": "0xff800000u"}
"""Words of minus infinity."""
_MAXIMUM = 'float c; asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c;'
_COMPARED = "return a > b || a != a ? a : b;"
"""The same where there is no such instruction: NaN is greater than nothing, and different from itself."""
_FIRST_THREADS = 1024
"""Threads of an SM that prefetch: those of 64 registers that it holds."""


def planes_source(spec: PoolSpec, params: PlanesParams, gpu: Gpu) -> str:
    """Return the text of the kernel's work, function `pool_all`; with PDL it waits for the preceding kernel itself."""
    sizes, pdl, staged = spec.sizes, supports_pdl(gpu), params.staged
    has_maxima = gpu.compute_capability >= FIRST_CAPABILITY
    is_packed = has_maxima and spec.is_maximum and sizes.dtype != "float32"
    before, vector, columns = spec.before[1], params.vector(sizes), params.columns(sizes)
    part = _PACKED_MAXIMA if is_packed else widened(sizes.dtype, "float32") + _SINGLE
    loads = [f"  load_piece<{size}>(into, from, place, has_row, r, {at});" for at, size in pieces(columns, before, vector)]
    is_single = vector == 1 and sizes.dtype != "float32"
    text = filled(
        _CONSTANTS + part + _WORK,
        reads=_READS,
        start=_START if pdl else "",
        stage=_STAGE if staged else _DIRECT,
        hide=_HIDE,
        pieces="\n".join(loads),
    )
    return filled(
        text,
        **params._asdict(),
        **sizes._asdict(),
        before_rows=spec.before[0],
        before_columns=before,
        staged_elements=params.staged_elements(sizes),
        out_width=params.out_vector(sizes),
        single=is_single,
        last_place="(COLUMNS - 1) * EACH" if is_single else "COLUMNS - 1 + SHIFT",
        lowest=_LOWEST[sizes.dtype] if spec.is_maximum else "0",
        of_both="return a + b;" if not spec.is_maximum else _MAXIMUM if has_maxima else _COMPARED,
        finished=spec.finished,
        space="shared" if staged else "global",
        register="r" if staged else "l",
        from_step="ITEM_BYTES" if staged else "1",
        shared_argument="Item* shared, " if staged else "",
        shared_parameter="X* shared, " if staged else "",
        shared_value="reinterpret_cast<Item*>(shared), " if staged else "",
        line_bytes=LINE_BYTES,
        first_blocks=gpu.sm_count * max(1, _FIRST_THREADS // params.threads),
        early_threads=params.threads * PREFETCH_BYTES // (_FIRST_THREADS * LINE_BYTES) or 1,
        item=cuda_type(sizes.dtype),
        out=cuda_type(sizes.out_dtype),
        sum="float",
        access=access_type(params.out_vector(sizes) * dtype_bytes(sizes.out_dtype)),
        **{"from": "unsigned" if staged else "const Item*"},
    )
