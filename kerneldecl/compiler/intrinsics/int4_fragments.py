"""Owns the CUDA that turns packed 4-bit weights into registers of operand A of mma.m16n8k16 and wgmma.m64nNk16.

Knows nothing of schedules, policies or how kernels are compiled.

A nibble becomes a 16-bit float by logic operations alone, as in `int4_dot`: 0x6400 with a nibble in its last bits is the half 1024 plus
the nibble, 0x5400 with one 4 bits higher 64 plus it, and 0x4300 with one in its last bits the bfloat16 128 plus it. The same bits with the
zero point are subtracted exactly. The product with the scale is rounded once.
"""

from __future__ import annotations

from typing import NamedTuple


class _Float16(NamedTuple):
    """How nibbles become pairs of one dtype of 16 bits."""

    ctype: str
    pair: str
    broadcast: str
    low: tuple[int, int]
    """Bits that a nibble in the last bits is combined with, and how far the zero point is shifted beside them."""
    high: tuple[int, int]
    """The same for a nibble 4 bits higher; the shift is 0 where those bits are shifted down before."""


_TYPES = {
    "float16": _Float16("half", "half2", "__half2half2", (0x6400, 0), (0x5400, 4)),
    "bfloat16": _Float16("__nv_bfloat16", "__nv_bfloat162", "__bfloat162bfloat162", (0x4300, 0), (0x4300, 0)),
}


def dequantise_source(dtype: str, scales: int, pitch: int, *, has_zeros: bool) -> tuple[str, str]:
    """Return the name and CUDA of a function that gives a lane its 16 registers of operand A of 16 rows and 64 elements along k.

    Its arguments are the registers, the lane's 4 words of weights, its first row's scale in shared memory, that of its second row 8
    further, and likewise the zero points where there are some. The `scales` of a row, 1 or 2 along k, are `pitch` elements apart.
    """
    kind = _TYPES[dtype]
    name = f"kd_dequantise_i4_{dtype}_{scales}_{pitch}{'_zeros' if has_zeros else ''}"
    zeros_argument = ", const unsigned char* zeros" if has_zeros else ""
    zero = f"zeros[s / {4 // scales} * {pitch} + row * 8]" if has_zeros else "8u"
    (low_bits, _), (high_bits, high_shift) = kind.low, kind.high
    shifted = "word" if high_shift else "(word >> 4)"
    source = f"""
#include <cuda_fp16.h>
#include <cuda_bf16.h>
__device__ __forceinline__ void {name}(unsigned* out, const unsigned* packed, const {kind.ctype}* scales{zeros_argument}) {{
  const uint4 words = *reinterpret_cast<const uint4*>(packed);
  const unsigned all[4] = {{words.x, words.y, words.z, words.w}};
#pragma unroll
  for (int s = 0; s < 4; ++s) {{
    {kind.pair} scale[2], bias[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {{
      scale[row] = {kind.broadcast}(scales[s / {4 // scales} * {pitch} + row * 8]);
      unsigned zero = {zero};
      unsigned bits = (row ? {high_bits:#x}u : {low_bits:#x}u) * 0x10001u | zero * (row ? {0x10001 << high_shift:#x}u : 0x10001u);
      bias[row] = *reinterpret_cast<{kind.pair}*>(&bits);
    }}
#pragma unroll
    for (int half_k = 0; half_k < 2; ++half_k) {{
      unsigned word = all[s] >> (8 * half_k), low, high;
      asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(low) : "r"(word), "r"({low_bits * 0x10001:#x}u));
      asm("lop3.b32 %0, %1, {0x000F000F << high_shift:#010x}, %2, 0xea;" : "=r"(high) : "r"({shifted}), "r"({high_bits * 0x10001:#x}u));
      {kind.pair} first = __hmul2(__hsub2(*reinterpret_cast<{kind.pair}*>(&low), bias[0]), scale[0]);
      {kind.pair} second = __hmul2(__hsub2(*reinterpret_cast<{kind.pair}*>(&high), bias[1]), scale[1]);
      out[4 * s + 2 * half_k] = *reinterpret_cast<unsigned*>(&first);
      out[4 * s + 2 * half_k + 1] = *reinterpret_cast<unsigned*>(&second);
    }}
  }}
}}
"""
    return name, source


class Codes(NamedTuple):
    """A function that gives a lane its 4 registers of operand A of 16 rows and 16 elements along k, of codes rather than values."""

    name: str
    source: str
    base: float
    """What is added to a code, in its units."""
    units: tuple[float, float]
    """What a code of a lane's first row is multiplied by, and of its second."""


def codes_source(dtype: str) -> Codes:
    """Return the function: its arguments are the registers and the lane's word of weights.

    A nibble among zeros is a subnormal half: as many times 2^-24, or 2^-20 where it is 4 bits higher. Subnormal bfloat16 would make sums
    vanish, so that a nibble is added to 128.
    """
    name = f"kd_codes_i4_{dtype}"
    if dtype == "float16":
        base, units = 0.0, (2.0**-24, 2.0**-20)
        masks = "out[2 * half_k] = word & 0x000f000fu;\n    out[2 * half_k + 1] = word & 0x00f000f0u;"
    else:
        base, units = 128.0, (1.0, 1.0)
        masks = """asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(out[2 * half_k]) : "r"(word), "r"(0x43004300u));
    asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(out[2 * half_k + 1]) : "r"(word >> 4), "r"(0x43004300u));"""
    source = f"""
__device__ __forceinline__ void {name}(unsigned* out, unsigned packed) {{
#pragma unroll
  for (int half_k = 0; half_k < 2; ++half_k) {{
    unsigned word = packed >> (8 * half_k);
    {masks}
  }}
}}
"""
    return Codes(name, source, base, units)
