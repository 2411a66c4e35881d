"""Owns the CUDA that turns packed 4-bit weights into registers of operand A of wgmma.m64nNk32, of int8.

Knows nothing of schedules, policies or how kernels are compiled.

A nibble stays in the upper half of its byte: with the sign bit flipped that is (nibble - 8) * 16 in two's complement, so that no
instruction shifts it down or subtracts its zero point.
"""

from __future__ import annotations

UNITS = 16
"""How many times a weight is what the bytes are."""
NAME = "kd_bytes_of_i4"
SOURCE = f"""
__device__ __forceinline__ void {NAME}(unsigned* out, const unsigned* pair, int lane) {{
  const uint4 first = *reinterpret_cast<const uint4*>(pair), second = *reinterpret_cast<const uint4*>(pair + 4);
  const unsigned even[4] = {{first.x, first.y, first.z, first.w}}, odd[4] = {{second.x, second.y, second.z, second.w}};
  // A lane of operand A has four neighbours along k, and packed weights are in pairs: those of two lanes, in one half of 16 elements.
  const unsigned selectors = 0x6420u + lane % 4 / 2 * 0x1111u;
#pragma unroll
  for (int s = 0; s < 4; ++s) {{
    const unsigned codes = __byte_perm(even[s], odd[s], selectors);
    out[2 * s] = (codes << 4 & 0xf0f0f0f0u) ^ 0x80808080u;
    out[2 * s + 1] = (codes & 0xf0f0f0f0u) ^ 0x80808080u;
  }}
}}
"""
"""A function that gives a lane its 8 registers of operand A of 16 rows and 64 elements along k. Its arguments are the registers, the words
of the two lanes from 4 * (lane / 4) + lane % 2 * 2 on, and the lane."""
