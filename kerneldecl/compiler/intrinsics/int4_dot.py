"""Owns the intrinsics of dot products with weights packed to 4 bits: their names, the computation of each, and its CUDA.

Knows nothing of schedules, policies or how kernels are compiled.

A conversion from integer to float costs as much as four additions; here nibbles become halves by logic operations alone. 1024
plus an integer below 1024 is a half whose last bits are that integer, so 0x6400 with a nibble in its last bits is 1024 plus
the nibble (Kim et al., Who Says Elephants Can't Run: Bringing Large Scale MoE Models into Cloud Scale Production, 2022,
section 4.1); 0x5400 with a nibble 4 bits higher is 64 plus the nibble. The bias is subtracted exactly, in pairs.

For two rows, a warp uses tensor cores: its eight quads of lanes are the rows of weights, and the columns of activations. Of the
products of every row with every column, only those of a quad's weights with its own activations are used, and one lane of the
quad holds them. That lane gets the accumulation of all four lanes, so a reduction over whole quads is correct.
"""

from __future__ import annotations

from typing import Any

import tvm

CUDA_TYPES = {"float16": ("half", "__half2float({})"), "bfloat16": ("nv_bfloat16", "__bfloat162float({})"), "float32": ("float", "{}")}
"""Types in CUDA and their conversions to float, by dtype of the activations."""
WIDTHS = (16, 8, 4)
"""Bytes of weights that one thread loads with one instruction."""


def dot_intrinsic(width: int, dtype: str) -> str:
    """Return the intrinsic for `width` bytes of weights and twice as many activations of a dtype, registered; KeyError without one."""
    _ = CUDA_TYPES[dtype]
    if width not in WIDTHS:
        raise KeyError(width)
    name = f"kd.dot_i4.{width}.{dtype}"
    if tvm.s_tir.TensorIntrin.get(name, allow_missing=True) is None:
        tvm.s_tir.TensorIntrin.register(name, *_dot(width, dtype))
    return name


def dot_pair_intrinsic(width: int) -> str:
    """Return the intrinsic for two rows of `width` bytes of weights and float16 activations, registered; KeyError without one."""
    if width not in WIDTHS:
        raise KeyError(width)
    name = f"kd.dot_i4_pair.{width}"
    if tvm.s_tir.TensorIntrin.get(name, allow_missing=True) is None:
        tvm.s_tir.TensorIntrin.register(name, *_dot_pair(width))
    return name


def register_all() -> None:
    """Register every intrinsic: reading a database replays its traces, which name them."""
    for width in WIDTHS:
        dot_pair_intrinsic(width)
        for dtype in CUDA_TYPES:
            dot_intrinsic(width, dtype)


EVEN_BIAS, ODD_BIAS = 1024.0 + 8.0, 64.0 + 8.0
"""Bias of the halves made of nibbles, the weights' zero point 8 included: of the first nibble of a byte, and of the second."""

_HALVES = """
#include <cuda_fp16.h>
__device__ __forceinline__ void kd_halves_i4(unsigned bits, half2* even, half2* odd) {
  unsigned low, high;
  asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(low) : "r"(bits), "r"(0x64006400u));
  asm("lop3.b32 %0, %1, 0x00f000f0, %2, 0xea;" : "=r"(high) : "r"(bits), "r"(0x54005400u));
  *even = __hsub2(*reinterpret_cast<half2*>(&low), __float2half2_rn(1032.0f));
  *odd = __hsub2(*reinterpret_cast<half2*>(&high), __float2half2_rn(72.0f));
}
"""
"""CUDA that gives weights 0 and 4 of the 8 in a word, and 1 and 5; of the word shifted by 8, weights 2 and 6, and 3 and 7."""


def _source(name: str, width: int, dtype: str) -> str:
    ctype, widened = CUDA_TYPES[dtype]

    def multiplied(half: str, at: str) -> str:
        return f"sum = __fmaf_rn({half}, {widened.format(f'factors[8 * word + {at}]')}, sum);"

    return f"""{_HALVES.replace("kd_halves_i4", f"{name}_halves")}
__device__ __forceinline__ float {name}(const void* packed, const {ctype}* factors) {{
  float sum = 0.0f;
#pragma unroll
  for (int word = 0; word < {width // 4}; ++word) {{
#pragma unroll
    for (int pair = 0; pair < 4; pair += 2) {{
      half2 even, odd;
      {name}_halves(static_cast<const unsigned*>(packed)[word] >> (4 * pair), &even, &odd);
      {multiplied("__low2float(even)", "pair")}
      {multiplied("__low2float(odd)", "pair + 1")}
      {multiplied("__high2float(even)", "pair + 4")}
      {multiplied("__high2float(odd)", "pair + 5")}
    }}
  }}
  return sum;
}}
"""


def _pair_source(name: str, width: int) -> str:
    words = width // 4
    return f"""{_HALVES.replace("kd_halves_i4", f"{name}_halves")}
__device__ __forceinline__ void {name}(float* sums, const void* packed, const half* scales, const half* factors) {{
  float c0 = 0.0f, c1 = 0.0f, c2 = 0.0f, c3 = 0.0f;
#pragma unroll
  for (int word = 0; word < {words}; ++word) {{
#pragma unroll
    for (int pair = 0; pair < 4; pair += 2) {{
      half2 a[4], b[2];
      {name}_halves(static_cast<const unsigned*>(packed)[word] >> (4 * pair), &a[0], &a[2]);
      {name}_halves(static_cast<const unsigned*>(packed)[{words} + word] >> (4 * pair), &a[1], &a[3]);
      b[0] = __halves2half2(factors[8 * word + pair], factors[8 * word + pair + 4]);
      b[1] = __halves2half2(factors[8 * word + pair + 1], factors[8 * word + pair + 5]);
      const unsigned* x = reinterpret_cast<const unsigned*>(a);
      const unsigned* y = reinterpret_cast<const unsigned*>(b);
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                   "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
                   : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3) : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(y[0]), "r"(y[1]));
    }}
  }}
  int lane = threadIdx.x % 32, quad = lane / 4;
  if (lane % 4 == quad / 2) {{
    sums[0] = __fmaf_rn(quad % 2 ? c1 : c0, __half2float(scales[0]), sums[0]);
    sums[1] = __fmaf_rn(quad % 2 ? c3 : c2, __half2float(scales[1]), sums[1]);
  }}
}}
"""


def cp_async_source(nbytes: int) -> tuple[str, str]:
    """Return the name and CUDA of a function that copies 4, 8 or 16 bytes to shared memory by cp.async, and fills up with zeros."""
    name = f"kd_fetch_{nbytes}"
    # 16 bytes bypass L1: nobody reads them twice.
    copy = "cp.async.cg.shared.global.L2::128B" if nbytes == 16 else "cp.async.ca.shared.global"
    source = f"""
__device__ __forceinline__ void {name}(void* to, const void* from, int asked) {{
  unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("{copy} [%0], [%1], {nbytes}, %2;" : : "r"(at), "l"(from), "r"(asked) : "memory");
}}
"""
    return name, source


def prefetch_source() -> tuple[str, str]:
    """Return the name and CUDA of a function that prefetches the line of an address to L2."""
    source = """
__device__ __forceinline__ void kd_prefetch(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" : : "l"(from));
}
"""
    return "kd_prefetch", source


def permute_source() -> tuple[str, str]:
    """Return the name and CUDA of a function that stores 8 activations in the order of the half pairs of a word of weights."""
    source = """
__device__ __forceinline__ void kd_permuted_i4(void* to, const unsigned* x) {
  *static_cast<uint4*>(to) = make_uint4(x[0] & 0xffffu | x[2] << 16, x[0] >> 16 | x[2] & 0xffff0000u, x[1] & 0xffffu | x[3] << 16,
                                        x[1] >> 16 | x[3] & 0xffff0000u);
}
"""
    return "kd_permuted_i4", source


def bias_source() -> tuple[str, str]:
    """Return the name and CUDA of a function that stores the initial accumulator of a quad over 1024 weights: the negative bias."""
    source = f"""
__device__ __forceinline__ void kd_started_i4(float* to, const void* factors) {{
  float even = 0.0f, odd = 0.0f;
  for (int at = 0; at < 16; ++at) {{
    uint4 x = static_cast<const uint4*>(factors)[at / 4 * 32 + at % 4];
    const half2* pairs = reinterpret_cast<const half2*>(&x);
    even += __low2float(pairs[0]) + __high2float(pairs[0]) + __low2float(pairs[2]) + __high2float(pairs[2]);
    odd += __low2float(pairs[1]) + __high2float(pairs[1]) + __low2float(pairs[3]) + __high2float(pairs[3]);
  }}
  *to = -{EVEN_BIAS:.1f}f * even - {ODD_BIAS:.1f}f * odd;
}}
"""
    return "kd_started_i4", f"#include <cuda_fp16.h>{source}"


def reduce_source(rows: int) -> tuple[str, str]:
    """Return the name and CUDA of a function that reduces a warp's accumulators; a lane gets the result of row lane * rows / 32.

    `rows` is a power of two. Each shuffle exchanges half of the rows between half of the lanes, so both lanes use what they receive.
    """
    name = f"kd_combined_i4_{rows}"
    source = f"""
__device__ __forceinline__ float {name}(const float* sums) {{
  int lane = threadIdx.x % 32;
  float v[{rows}];
#pragma unroll
  for (int row = 0; row < {rows}; ++row) v[row] = lane % 4 == lane / 8 ? sums[row] : 0.0f;
#pragma unroll
  for (int half = {rows // 2}; half > 0; half /= 2) {{
    int bit = half * {32 // rows};
#pragma unroll
    for (int row = 0; row < half; ++row) {{
      float given = lane & bit ? v[row] : v[row + half], kept = lane & bit ? v[row + half] : v[row];
      v[row] = kept + __shfl_xor_sync(0xffffffffu, given, bit);
    }}
  }}
#pragma unroll
  for (int bit = {16 // rows}; bit > 0; bit /= 2) v[0] += __shfl_xor_sync(0xffffffffu, v[0], bit);
  return v[0];
}}
"""
    return name, source


def permute_registers_source() -> tuple[str, str]:
    """Return the name and CUDA of a function that permutes a lane's 32 activations in registers, and returns the initial accumulator."""
    source = f"""
__device__ __forceinline__ float kd_held_i4(unsigned* x) {{
  float even = 0.0f, odd = 0.0f;
#pragma unroll
  for (int at = 0; at < 16; at += 4) {{
    unsigned pairs[4] = {{x[at] & 0xffffu | x[at + 2] << 16, x[at] >> 16 | x[at + 2] & 0xffff0000u,
                         x[at + 1] & 0xffffu | x[at + 3] << 16, x[at + 1] >> 16 | x[at + 3] & 0xffff0000u}};
#pragma unroll
    for (int i = 0; i < 4; ++i) {{
      x[at + i] = pairs[i];
      float2 both = __half22float2(*reinterpret_cast<half2*>(&pairs[i]));
      (i % 2 ? odd : even) += both.x + both.y;
    }}
  }}
  float start = -{EVEN_BIAS:.1f}f * even - {ODD_BIAS:.1f}f * odd;
  start += __shfl_xor_sync(0xffffffffu, start, 1);
  return start + __shfl_xor_sync(0xffffffffu, start, 2);
}}
"""
    return "kd_held_i4", f"#include <cuda_fp16.h>{source}"


def _mma_of_half_words(name: str) -> str:
    """Return the CUDA with which `dot_rows_source` multiplies a word of weights of two rows."""
    return f"""#pragma unroll
      for (int half_word = 0; half_word < 2; ++half_word) {{
        unsigned a[4];
#pragma unroll
        for (int row = 0; row < 2; ++row) {{
          unsigned bits = {name}_word(w[2 * pair + row], word) >> (8 * half_word);
          asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(a[row]) : "r"(bits), "r"(0x64006400u));
          asm("lop3.b32 %0, %1, 0x00f000f0, %2, 0xea;" : "=r"(a[row + 2]) : "r"(bits), "r"(0x54005400u));
        }}
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                     "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
                     : "+f"(c[pair][0]), "+f"(c[pair][1]), "+f"(c[pair][2]), "+f"(c[pair][3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(half_word ? x.z : x.x), "r"(half_word ? x.w : x.y));
      }}"""


def dot_rows_source(rows: int, group: int, *, in_registers: bool = False) -> tuple[str, str]:
    """Return the name and CUDA of a function with which a warp adds dot products of 1024 weights to the accumulators of `rows` rows.

    `rows` is even. A lane has 16 bytes of each row, with a stride of 512 bytes, and activations as `permute_source` orders them, with
    512 bytes between words; scales, one per `group` weights, are stored row by row. Activations `in_registers` come with their initial
    accumulator (`permute_registers_source`). Nibbles are multiplied with their bias of 1024 or 64, and accumulators start at the
    negative bias (`bias_source`): in float32 that costs 7 bits of 24. A quad's accumulators are correct in the lane where
    `dot_pair_intrinsic` has them; the other lanes' are not used.
    """
    name = f"kd_dot_i4_{'held' if in_registers else 'rows'}_{rows}_{group}"
    pairs = rows // 2
    params = "const unsigned* factors, float start" if in_registers else "const void* factors, const float* starts"
    start = "start" if in_registers else "starts[quad]"
    vector = "make_uint4(factors[4 * word], factors[4 * word + 1], factors[4 * word + 2], factors[4 * word + 3])"
    loaded = vector if in_registers else "static_cast<const uint4*>(factors)[32 * word]"
    source = f"""#include <cuda_fp16.h>
__device__ __forceinline__ unsigned {name}_word(uint4 words, int at) {{
  return at < 2 ? (at < 1 ? words.x : words.y) : (at < 3 ? words.z : words.w);
}}
__device__ __forceinline__ void {name}(float* sums, const void* packed, const half* scales, {params}) {{
  int quad = threadIdx.x % 32 / 4;
  float c[{pairs}][4], begin = {start};
#pragma unroll
  for (int i = 0; i < {4 * pairs}; ++i) c[i / 4][i % 4] = begin;
  uint4 w[{rows}];
#pragma unroll
  for (int row = 0; row < {rows}; ++row) w[row] = static_cast<const uint4*>(packed)[32 * row];
#pragma unroll
  for (int word = 0; word < 4; ++word) {{
    uint4 x = {loaded};
#pragma unroll
    for (int pair = 0; pair < {pairs}; ++pair) {{
{_mma_of_half_words(name)}
    }}
  }}
#pragma unroll
  for (int row = 0; row < {rows}; ++row) {{
    float sum = quad % 2 ? c[row / 2][row % 2 * 2 + 1] : c[row / 2][row % 2 * 2];
    sums[row] += sum * __half2float(scales[{1024 // group} * row + quad * 128 / {group}]);
  }}
}}
"""
    return name, source


# TVMScript has its own rules for names, annotations and what counts as an expression.
# ruff: noqa: N806, N812
# mypy: disable-error-code="valid-type, no-any-return, misc, untyped-decorator"


def _dot(width: int, dtype: str) -> tuple[Any, Any]:
    """Return the computation and the CUDA of sum += (nibble - 8) * scale * activation over `width` bytes, low nibble first."""
    from tvm.script import tirx as T

    name = f"kd_dot_i4_{width}_{dtype}"
    source = _source(name, width, dtype)

    def widened(value: Any) -> Any:
        return value if dtype == "float32" else tvm.tirx.Cast("float32", value)

    @T.prim_func(s_tir=True)
    def described(sums: T.handle, packed: T.handle, scales: T.handle, factors: T.handle) -> None:
        Sum = T.match_buffer(sums, (1,), "float32", offset_factor=1, scope="local")
        Packed = T.match_buffer(packed, (width,), "uint8", offset_factor=width, scope="local")
        Scale = T.match_buffer(scales, (1,), dtype, offset_factor=1, scope="local")
        Factor = T.match_buffer(factors, (2 * width,), dtype, offset_factor=2 * width, scope="local")
        with T.sblock("root"):
            T.reads(Sum[0], Packed[0:width], Scale[0], Factor[0 : 2 * width])
            T.writes(Sum[0])
            for byte, nibble in T.grid(T.int64(width), T.int64(2)):
                with T.sblock("dot"):
                    at, shift = T.axis.remap("RR", [byte, nibble])
                    T.reads(Sum[0], Packed[at], Scale[0], Factor[at * T.int64(2) + shift])
                    T.writes(Sum[0])
                    bits = T.meta_var((Packed[at] >> T.Cast("uint8", shift * T.int64(4))) & T.uint8(15))
                    weight = T.meta_var(T.Cast("float32", T.Cast("int32", bits) - 8) * widened(Scale[0]))
                    Sum[0] = Sum[0] + weight * widened(Factor[at * T.int64(2) + shift])

    @T.prim_func(s_tir=True)
    def done(sums: T.handle, packed: T.handle, scales: T.handle, factors: T.handle) -> None:
        Sum = T.match_buffer(sums, (1,), "float32", offset_factor=1, scope="local")
        Packed = T.match_buffer(packed, (width,), "uint8", offset_factor=width, scope="local")
        Scale = T.match_buffer(scales, (1,), dtype, offset_factor=1, scope="local")
        Factor = T.match_buffer(factors, (2 * width,), dtype, offset_factor=2 * width, scope="local")
        with T.sblock("root"):
            T.reads(Sum[0], Packed[0:width], Scale[0], Factor[0 : 2 * width])
            T.writes(Sum[0])
            dot = T.meta_var(
                T.cuda.func_call(name, Packed.access_ptr("r"), Factor.access_ptr("r"), source_code=source, return_type="float32")
            )
            Sum[0] = Sum[0] + dot * widened(Scale[0])

    return described, done


def _dot_pair(width: int) -> tuple[Any, Any]:
    """Return the computation of `_dot` for two rows, and its CUDA for a warp."""
    from tvm.script import tirx as T

    name = f"kd_dot_i4_pair_{width}"
    source = _pair_source(name, width)

    @T.prim_func(s_tir=True)
    def described(sums: T.handle, packed: T.handle, scales: T.handle, factors: T.handle) -> None:
        Sum = T.match_buffer(sums, (2,), "float32", offset_factor=1, scope="local")
        Packed = T.match_buffer(packed, (2, width), "uint8", offset_factor=width, scope="local")
        Scale = T.match_buffer(scales, (2, 1), "float16", offset_factor=1, scope="local")
        Factor = T.match_buffer(factors, (2 * width,), "float16", offset_factor=2 * width, scope="local")
        with T.sblock("root"):
            T.reads(Sum[0:2], Packed[0:2, 0:width], Scale[0:2, 0], Factor[0 : 2 * width])
            T.writes(Sum[0:2])
            for row, byte, nibble in T.grid(T.int64(2), T.int64(width), T.int64(2)):
                with T.sblock("dot"):
                    r, at, shift = T.axis.remap("SRR", [row, byte, nibble])
                    T.reads(Sum[r], Packed[r, at], Scale[r, 0], Factor[at * T.int64(2) + shift])
                    T.writes(Sum[r])
                    bits = T.meta_var((Packed[r, at] >> T.Cast("uint8", shift * T.int64(4))) & T.uint8(15))
                    weight = T.meta_var(T.Cast("float32", T.Cast("int32", bits) - 8) * T.Cast("float32", Scale[r, 0]))
                    Sum[r] = Sum[r] + weight * T.Cast("float32", Factor[at * T.int64(2) + shift])

    @T.prim_func(s_tir=True)
    def done(sums: T.handle, packed: T.handle, scales: T.handle, factors: T.handle) -> None:
        Sum = T.match_buffer(sums, (2,), "float32", offset_factor=1, scope="local")
        Packed = T.match_buffer(packed, (2, width), "uint8", offset_factor=width, scope="local", strides=[width, 1])
        Scale = T.match_buffer(scales, (2, 1), "float16", offset_factor=1, scope="local", strides=[1, 1])
        Factor = T.match_buffer(factors, (2 * width,), "float16", offset_factor=2 * width, scope="local")
        with T.sblock("root"):
            T.reads(Sum[0:2], Packed[0:2, 0:width], Scale[0:2, 0], Factor[0 : 2 * width])
            T.writes(Sum[0:2])
            T.evaluate(
                T.cuda.func_call(
                    name,
                    Sum.access_ptr("rw"),
                    Packed.access_ptr("r"),
                    Scale.access_ptr("r"),
                    Factor.access_ptr("r"),
                    source_code=source,
                    return_type="void",
                )
            )

    return described, done
