"""Owns conversions from float8 on GPUs without an instruction for them, those before compute capability 8.9: bits of a float16, scaled.

Knows nothing of schedules or of what is computed. CUDA's headers normalise a subnormal float8_e4m3fn in a loop, some 30 instructions for
each element of which lanes of a warp take different numbers.

A float8_e5m2 is the upper half of a float16. Exponent and mantissa of a float8_e4m3fn, moved to those of a float16, give its value times
2^-8, the difference of both biases; subnormal numbers are subnormal there, so the product with 2^8 is exact.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.tirx import Cast
from tvm_ffi import structural

HALF = "float16"
MANTISSA_SHIFT, BIAS_FACTOR = 7, 2.0**8
"""By how much the bits of a float8_e4m3fn move, and what the number is multiplied by."""
E4M3_NAN, HALF_NAN = 0x7F, 0x7E00


def float8_by_bits(mod: tvm.IRModule) -> tvm.IRModule:
    """Return device functions whose casts of single float8 elements are arithmetic of bits; vectors are left to CUDA's headers."""

    def cast(node: Any) -> Any:
        made = _HALVES.get(str(node.value.ty.dtype))
        if made is None or str(node.ty.dtype) == str(node.value.ty.dtype):
            return node
        half, dtype = made(Cast("uint32", tirx.reinterpret("uint8", node.value))), str(node.ty.dtype)
        if dtype == HALF:
            return half
        wide = Cast("float32", half)
        return wide if dtype == "float32" else Cast(dtype, wide)

    return tvm.IRModule(
        {name: func.with_body(structural.structural_map(func.body, [(Cast, cast)])) for name, func in mod.functions.items()}
    )


def _u32(value: int) -> Any:
    return tirx.const(value, "uint32")


def _half(bits: Any) -> Any:
    return tirx.reinterpret(HALF, Cast("uint16", bits))


def _of_e4m3(bits: Any) -> Any:
    size, sign = bits & _u32(0x7F), (bits & _u32(0x80)) << _u32(8)
    moved = tirx.Select(size == _u32(E4M3_NAN), _u32(HALF_NAN), size << _u32(MANTISSA_SHIFT))
    return _half(moved | sign) * tirx.const(BIAS_FACTOR, HALF)


def _of_e5m2(bits: Any) -> Any:
    return _half(bits << _u32(8))


_HALVES = {"float8_e4m3fn": _of_e4m3, "float8_e5m2": _of_e5m2}
