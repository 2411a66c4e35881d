"""Owns the names of dtypes in CUDA text, and conversions between an element and the dtype that it is computed in.

Knows nothing of kernels.
"""

from __future__ import annotations

from kerneldecl.model import dtype_bytes

_TYPES = {
    "float16": "half",
    "bfloat16": "nv_bfloat16",
    "float32": "float",
    "float64": "double",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "int32": "int",
    "int64": "int64_t",
    "float8_e4m3fn": "__nv_fp8_e4m3",
}
_WIDEN = {"float16": "__half2float(x)", "bfloat16": "__bfloat162float(x)"}
_NARROW = {"float16": "__float2half_rn(x)", "bfloat16": "__float2bfloat16_rn(x)"}
_FLOAT8 = """
__device__ __forceinline__ float wide(__nv_fp8_e4m3 x) {
#if __CUDA_ARCH__ >= 890
  return static_cast<float>(x);
#else  // The header normalises in a loop: exponent and mantissa are those of a float16 times the power of two of both biases.
  unsigned size = x.__x & 0x7fu, half_bits = (x.__x & 0x80u) << 8 | (size == 0x7fu ? 0x7e00u : size << 7);
  return __half2float(__ushort_as_half(static_cast<unsigned short>(half_bits))) * 256.0f;
#endif
}
"""
"""From float8_e4m3fn to float32. Nothing is computed in float8."""
_RAW = {16: "uint4", 8: "uint2", 4: "unsigned", 2: "unsigned short", 1: "unsigned char"}


def access_type(nbytes: int) -> str:
    """Return CUDA's name of a type of so many bytes, a power of two up to 16, that one instruction loads or stores."""
    return _RAW[nbytes]


def cuda_type(dtype: str) -> str:
    """Return CUDA's name of a dtype."""
    return _TYPES[dtype]


def vector_types(dtype: str, accum: str, width: int) -> dict[str, str]:
    """Return CUDA's names of an element, of what it is computed in, and of so many neighbours, as texts name them."""
    return {"item": cuda_type(dtype), "sum": cuda_type(accum), "access": access_type(width * dtype_bytes(dtype))}


def narrowed(dtype: str) -> str:
    """Return CUDA's expression of an element of a dtype of x, which is what it is computed in."""
    return _NARROW.get(dtype, "x")


def widened(dtype: str, accum: str) -> str:
    """Return functions `wide`, from an element to the dtype that it is computed in, and `narrow`, back, if elements may be results."""
    if dtype == "float8_e4m3fn":
        return _FLOAT8
    item, sum_ = cuda_type(dtype), cuda_type(accum)
    there, back = _WIDEN.get(dtype, "x"), narrowed(dtype)
    return f"""
__device__ __forceinline__ {sum_} wide({item} x) {{ return {there}; }}
__device__ __forceinline__ {item} narrow({sum_} x) {{ return {back}; }}
"""


def in_float32(dtype: str, value: str) -> str:
    """Return an element in float32: of 16 bits converted, of others as it is."""
    return _WIDEN[dtype].replace("(x)", f"({value})") if dtype in _WIDEN else value
