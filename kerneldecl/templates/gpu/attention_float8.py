"""Owns the CUDA by which float8 of queries, keys and values becomes float16 on its way to shared memory.

Knows nothing of which rows are copied, or when. Every float8_e4m3fn is a float16: nothing is rounded.
"""

from __future__ import annotations

LOAD_SOURCE = """
__device__ __forceinline__ void tvm_attention_load8(unsigned* to, const void* from, int asked) {
  uint2 bytes = make_uint2(0u, 0u);
  if (asked) bytes = *static_cast<const uint2*>(from);
  to[0] = bytes.x;
  to[1] = bytes.y;
}
"""
"""Loads 8 elements, or zeros."""
_CONVERTED = """
__device__ __forceinline__ unsigned tvm_attention_halves(unsigned bytes) {
  unsigned halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<unsigned short>(bytes)));
  return halves;
}
"""
_BY_BITS = """
#include <cuda_fp16.h>
__device__ __forceinline__ unsigned tvm_attention_halves(unsigned bytes) {
  unsigned pair = (bytes & 0xffu) << 8 | (bytes & 0xff00u) << 16, sizes = pair & 0x7f007f00u;
  unsigned bits = (pair & 0x80008000u) | sizes >> 1 | (sizes + 0x01000100u & 0x80008000u) >> 1, factor = 0x5c005c00u;
  half2 exact = __hmul2(*reinterpret_cast<half2*>(&bits), *reinterpret_cast<half2*>(&factor));
  return *reinterpret_cast<unsigned*>(&exact);
}
"""
"""Of two float8_e4m3fn, without an instruction for it: exponent and mantissa in a float16 are 2^-8 of the value, and 0x5c00 is 2^8. The
largest magnitude is NaN, which one more gives a bit of its own: the first of a float16's exponent, whose others are ones then."""
_STORE = """
__device__ __forceinline__ void tvm_attention_store8(void* to, unsigned first, unsigned second) {
  *static_cast<uint4*>(to) = make_uint4(tvm_attention_halves(first), tvm_attention_halves(first >> 16),
                                        tvm_attention_halves(second), tvm_attention_halves(second >> 16));
}
"""


def store_source(*, has_conversion: bool) -> str:
    """Return CUDA that stores 8 elements as float16, by the instruction of compute capability 8.9 or by bits."""
    return (_CONVERTED if has_conversion else _BY_BITS) + _STORE
