"""Owns the CUDA that turns packed weights of float4_e2m1fn, in blocks with scales, into registers of operand A of wgmma.m64nNk16.

Knows nothing of schedules, policies or how kernels are compiled.

A code's sign, exponent and mantissa, moved to those of a 16-bit float, are its number times a constant power of two, 0.5 as a subnormal
one, which PTX multiplies exactly in both dtypes. Products with scales are exact too, but for those of powers of two in float16: they are
computed in float32 and rounded once.
"""

from __future__ import annotations

from typing import NamedTuple


class _Float16(NamedTuple):
    """How codes and scales become one dtype of 16 bits."""

    ctype: str
    pair: str
    code_shift: int
    """How far down a code's exponent and mantissa move from bits 12 to 14."""
    code_factor: str
    """What the bits of a pair of numbers are multiplied by: the powers of two of two biases, as bits."""
    e4m3_shift: int
    """How far up the exponent and mantissa of a float8_e4m3fn move."""
    e4m3_factor: str
    nan: int
    """The bits that make NaN of a scale, divided by 128."""


_TYPES = {
    "float16": _Float16("half", "half2", 3, "0x74007400u", 7, "0x5c005c00u", 0x7C00 // 128),  # 2^14, 2^8
    "bfloat16": _Float16("__nv_bfloat16", "__nv_bfloat162", 6, "0x7e807e80u", 4, "0x7b807b80u", 0x7F80 // 128),  # 2^126, 2^120
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
    scale_type = "float" if in_float32 else "unsigned"
    moved = f"word >> {kind.code_shift} & {0x70007000 >> kind.code_shift:#010x}u"
    source = f"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
__device__ __forceinline__ unsigned {name}_times(unsigned first, unsigned second) {{
  {kind.pair} product = __hmul2(*reinterpret_cast<{kind.pair}*>(&first), *reinterpret_cast<{kind.pair}*>(&second));
  return *reinterpret_cast<unsigned*>(&product);
}}
__device__ __forceinline__ void {name}_scales({scale_type}* scale, unsigned first, unsigned second) {{
{_scales_body(name, kind, scale_dtype, in_float32=in_float32)}
}}
__device__ __forceinline__ unsigned {name}_scaled(unsigned bits, {scale_type} scale) {{
  unsigned exact = {name}_times(bits, {kind.code_factor});
{_scaled_body(name, in_float32=in_float32)}
}}
__device__ __forceinline__ void {name}(unsigned* out, const unsigned* packed, const void* scales) {{
  const uint4 words = *reinterpret_cast<const uint4*>(packed);
  const unsigned all[4] = {{words.x, words.y, words.z, words.w}};
  const unsigned char* bytes = static_cast<const unsigned char*>(scales);
  {scale_type} scale[2];
#pragma unroll
  for (int s = 0; s < 4; ++s) {{
    int at = s / {4 // scales} * {pitch};
    if (s % {4 // scales} == 0) {name}_scales(scale, bytes[at], bytes[at + 8]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {{
      unsigned word = all[s] << (12 - 4 * i);
      out[4 * s + i] = {name}_scaled((word & 0x80008000u) | ({moved}), scale[i % 2]);
    }}
  }}
}}
"""
    return name, source


def values_source(dtype: str) -> tuple[str, str, float]:
    """Return the name and CUDA of a function that gives a lane its 4 registers of operand A of 16 rows and 16 elements along k, unscaled.

    Its arguments are the registers and the lane's word of weights. The third value is what sums of products are to be multiplied by:
    tensor cores take subnormal float16 as they are (Fasi et al., Numerical behavior of NVIDIA tensor cores, 2021), while products with
    those of bfloat16 would be subnormal float32.
    """
    kind = _TYPES[dtype]
    name = f"kd_values_f4_{dtype}"
    is_exact = dtype == "bfloat16"
    product = f"__hmul2(*reinterpret_cast<{kind.pair}*>(&bits), *reinterpret_cast<const {kind.pair}*>(&factor))"
    multiplied = f"""    const unsigned factor = {kind.code_factor};
    {kind.pair} exact = {product};
    out[i] = *reinterpret_cast<unsigned*>(&exact);"""
    source = f"""
__device__ __forceinline__ void {name}(unsigned* out, unsigned packed) {{
#pragma unroll
  for (int i = 0; i < 4; ++i) {{
    unsigned word = packed << (12 - 4 * i);
    unsigned bits = (word & 0x80008000u) | (word >> {kind.code_shift} & {0x70007000 >> kind.code_shift:#010x}u);
{multiplied if is_exact else "    out[i] = bits;"}
  }}
}}
"""
    return name, source, 1.0 if is_exact else 2.0**14


def wide_scale_source(scale_dtype: str) -> tuple[str, str]:
    """Return the name and CUDA of a function from the byte of a scale to float32; 2^-127, which sums lose, becomes zero."""
    name = f"kd_wide_{_SCALE_NAMES[scale_dtype]}"
    nan = "__int_as_float(0x7fc00000)"
    if scale_dtype == E8M0:
        body = f"  return byte == 255u ? {nan} : __int_as_float(static_cast<int>(byte << 23));"
    else:
        body = f"""  unsigned short bits = static_cast<unsigned short>((byte & 0x80u) << 8 | (byte & 0x7fu) << 7);
  float wide = __half2float(*reinterpret_cast<half*>(&bits)) * 256.0f;
  return (byte & 0x7fu) == 0x7fu ? {nan} : wide;"""
    return (
        name,
        f"""
__device__ __forceinline__ float {name}(unsigned byte) {{
{body}
}}
""",
    )


def _scales_body(name: str, kind: _Float16, scale_dtype: str, *, in_float32: bool) -> str:
    """Return the body of the function from the bytes of two rows' scales to what their weights are multiplied by."""
    if in_float32:
        return "\n".join(
            f"  scale[{at}] = __int_as_float(static_cast<int>({byte} << 23 | {_not_normal(byte, 0x400000)}));"
            for at, byte in enumerate(("first", "second"))
        )
    if scale_dtype == E8M0:
        return "\n".join(
            f"  scale[{at}] = ({byte} << 7 | {_not_normal(byte, 0x40)}) * 0x10001u;" for at, byte in enumerate(("first", "second"))
        )
    # The largest magnitude is NaN: one more than it has a bit of its own.
    return f"""  unsigned both = first | second << 16, sizes = both & 0x007f007fu, nan = sizes + 0x00010001u & 0x00800080u;
  unsigned bits = (both & 0x00800080u) << 8 | sizes << {kind.e4m3_shift} | nan * {kind.nan}u;
  unsigned exact = {name}_times(bits, {kind.e4m3_factor});
  scale[0] = __byte_perm(exact, exact, 0x1010);
  scale[1] = __byte_perm(exact, exact, 0x3232);"""


def _not_normal(byte: str, bit: int) -> str:
    """Return the mantissa's first bit where a power of two is subnormal, 2^-127, or NaN, the last code."""
    return f"(({byte} + 1u & 0xfeu) == 0u ? {bit:#x}u : 0u)"


def _scaled_body(name: str, *, in_float32: bool) -> str:
    """Return the body of the function that multiplies two weights."""
    if in_float32:
        return """  float2 wide = __half22float2(*reinterpret_cast<half2*>(&exact));
  half2 scaled = __floats2half2_rn(wide.x * scale, wide.y * scale);
  return *reinterpret_cast<unsigned*>(&scaled);"""
    return f"  return {name}_times(exact, scale);"
