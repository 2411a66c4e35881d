"""Owns the CUDA that turns packed weights of float4_e2m1fn, in blocks with scales, into registers of operand A of wgmma.m64nNk16.

Knows nothing of schedules, policies or how kernels are compiled.

The last three bits of a code select the bytes of the 16-bit float that it stands for from a table of eight in two registers; its sign is
moved. Products with scales are exact, but for those of powers of two in float16: they are computed in float32 and rounded once. No step
computes with subnormal numbers of bfloat16, apart from products that are such.
"""

from __future__ import annotations

from typing import NamedTuple


class _Float16(NamedTuple):
    """How codes and scales become one dtype of 16 bits."""

    ctype: str
    pair: str
    broadcast: str
    lower: tuple[int, int] | None
    """Lower bytes of the eight magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6, four in a register; None where all are zero."""
    upper: tuple[int, int]
    """Their upper bytes."""


_TYPES = {
    "float16": _Float16("half", "half2", "__half2half2", None, (0x3E3C3800, 0x46444240)),
    "bfloat16": _Float16("__nv_bfloat16", "__nv_bfloat162", "__bfloat162bfloat162", (0xC0800000, 0xC0804000), (0x3F3F3F00, 0x40404040)),
}
E8M0, E4M3 = "uint8", "float8_e4m3fn"
"""Dtypes as which scales are passed: bytes of float8_e8m0fnu for MXFP4, and those of NVFP4."""
_SCALE_NAMES = {E8M0: "e8m0", E4M3: "e4m3"}


def dequantise_source(dtype: str, scale_dtype: str, scales: int, pitch: int) -> tuple[str, str]:
    """Return the name and CUDA of a function that gives a lane its 16 registers of operand A of 16 rows and 64 elements along k.

    Its arguments are the registers, the lane's 4 words of weights and its first row's scale in shared memory, that of its second row 8
    further. The `scales` of a row, 2 or 4 along k, are `pitch` elements apart.
    """
    kind = _TYPES[dtype]
    name = f"kd_dequantise_f4_{_SCALE_NAMES[scale_dtype]}_{dtype}_{scales}_{pitch}"
    in_float32 = dtype == "float16" and scale_dtype == E8M0
    scale_type = "float" if in_float32 else kind.pair
    source = f"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
__device__ __forceinline__ {scale_type} {name}_scale(unsigned bits) {{
{_scale_body(kind, scale_dtype, in_float32=in_float32)}
}}
__device__ __forceinline__ unsigned {name}_scaled(unsigned bits, {scale_type} scale) {{
{_scaled_body(kind, in_float32=in_float32)}
}}
__device__ __forceinline__ void {name}(unsigned* out, const unsigned* packed, const void* scales) {{
  const uint4 words = *reinterpret_cast<const uint4*>(packed);
  const unsigned all[4] = {{words.x, words.y, words.z, words.w}};
  const unsigned char* bytes = static_cast<const unsigned char*>(scales);
#pragma unroll
  for (int s = 0; s < 4; ++s) {{
    {scale_type} scale[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) scale[row] = {name}_scale(bytes[s / {4 // scales} * {pitch} + row * 8]);
    unsigned word = all[s], two[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {{
      unsigned codes = (half ? word >> 16 : word) & 0x7777u;
      unsigned lower = {_looked_up(kind.lower)}, upper = {_looked_up(kind.upper)};
      two[half][0] = __byte_perm(lower, upper, 0x5140);
      two[half][1] = __byte_perm(lower, upper, 0x7362);
    }}
#pragma unroll
    for (int at = 0; at < 4; ++at) {{
      unsigned sizes = __byte_perm(two[0][at / 2], two[1][at / 2], at % 2 ? 0x7632 : 0x5410);
      out[4 * s + at] = {name}_scaled(sizes | (word << (12 - 4 * at) & 0x80008000u), scale[at % 2]);
    }}
  }}
}}
"""
    return name, source


def _looked_up(table: tuple[int, int] | None) -> str:
    """Return the bytes of four codes in CUDA."""
    return "0u" if table is None else f"__byte_perm({table[0]:#010x}u, {table[1]:#010x}u, codes)"


def _scale_body(kind: _Float16, scale_dtype: str, *, in_float32: bool) -> str:
    """Return the body of the function from a scale's byte to what weights are multiplied by."""
    if in_float32:
        return f"  return __int_as_float(static_cast<int>(bits << 23 | {_not_normal(0x400000)}));"
    if scale_dtype == E8M0:
        return f"""  unsigned short both = bits << 7 | {_not_normal(0x40)};
  return {kind.broadcast}(*reinterpret_cast<{kind.ctype}*>(&both));"""
    # The bits in those of a half are the scale times 2^-8; the largest magnitude is NaN.
    exact = """  unsigned short shifted = (bits & 0x80u) << 8 | ((bits & 0x7fu) == 0x7fu ? 0x7e00u : (bits & 0x7fu) << 7);
  half exact = __hmul(*reinterpret_cast<half*>(&shifted), __float2half_rn(256.0f));"""
    value = "exact" if kind.ctype == "half" else "__float2bfloat16_rn(__half2float(exact))"
    return f"{exact}\n  return {kind.broadcast}({value});"


def _not_normal(bit: int) -> str:
    """Return the mantissa's first bit where a power of two is subnormal, 2^-127, or NaN, the last code."""
    return f"(bits == 0u || bits == 255u ? {bit:#x}u : 0u)"


def _scaled_body(kind: _Float16, *, in_float32: bool) -> str:
    """Return the body of the function that multiplies two weights."""
    if in_float32:
        return """  float2 wide = __half22float2(*reinterpret_cast<half2*>(&bits));
  half2 scaled = __floats2half2_rn(wide.x * scale, wide.y * scale);
  return *reinterpret_cast<unsigned*>(&scaled);"""
    return f"""  {kind.pair} scaled = __hmul2(*reinterpret_cast<{kind.pair}*>(&bits), scale);
  return *reinterpret_cast<unsigned*>(&scaled);"""
