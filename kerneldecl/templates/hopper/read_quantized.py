"""Owns the reading of a GEMM with packed 4-bit weights: the stage that dequantises them, and the GEMM behind it.

Knows nothing of tiles, instructions or targets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tvm
from tvm import te, tirx

from kerneldecl.analysis.packed_weights import FLOAT4_GROUPS, groups_of, packed_shape
from kerneldecl.compiler.canonical import canonical_module
from kerneldecl.compiler.equivalence import match_digest
from kerneldecl.templates.hopper.read_gemm import GemmProblem, read_gemm
from kerneldecl.templates.hopper.split_stages import fresh_of, split_stages

DTYPES = ("float16", "bfloat16")


class PackedWeights(NamedTuple):
    """Packed 4-bit weights [n, k] with their scales, in memory."""

    n: int
    k: int
    group: int
    """Weights along k that share a scale."""
    values: Any
    """Buffer of values, in `packed_shape`."""
    scales: Any
    """Buffer [k / group, n], or [n] where all of k shares a scale."""
    zeros: Any | None
    """Buffer of zero points, of the scales' shape; None where they are 8, and for float4_e2m1fn."""

    @property
    def is_float4(self) -> bool:
        """Say whether weights are float4_e2m1fn, not int4."""
        return str(self.scales.dtype) in FLOAT4_GROUPS


class QuantizedGemm(NamedTuple):
    """C[m, n] = epilogue(sum over k of A[m, k] * W[n, k]), W dequantised."""

    gemm: GemmProblem
    """The GEMM, whose operand B is no argument."""
    weights: PackedWeights

    @property
    def func_params(self) -> tuple[Any, ...]:
        """Return the function's parameters."""
        return tuple(param for param in self.gemm.func_params if not param.same_as(self.gemm.b.buffer))


def read_quantized(mod: tvm.IRModule) -> QuantizedGemm | None:
    """Return the GEMM with packed weights that a module's function is, None where it is another computation."""
    split = split_stages(mod["main"], 1)
    if split is None or len(split[0][0].params) not in (3, 4):
        return None
    [dequantising], rest = split
    gemm = read_gemm(canonical_module(rest))
    if gemm is None or not gemm.b.buffer.same_as(gemm.func_params[-1]) or gemm.extents[0] != 1:
        return None
    values, scales, *zeros, weights = dequantising.params
    (n, k), dtype = (int(extent) for extent in weights.shape), str(weights.dtype)
    group = k if len(scales.shape) == 1 else k // int(scales.shape[0])
    is_packed = [int(extent) for extent in values.shape] == list(packed_shape(n, k))
    if not is_packed or dtype not in DTYPES or group not in groups_of(str(scales.dtype), k) or k % group:
        return None
    if match_digest(dequantising) != match_digest(packed_stage(weights, scales, has_zeros=bool(zeros))):
        return None
    found = fresh_of(gemm, rest, (values, scales, *zeros))
    return QuantizedGemm(gemm, PackedWeights(n, k, group, found[0], found[1], found[2] if zeros else None))


def packed_stage(out: Any, scales: Any, *, has_zeros: bool) -> Any:
    """Return the stage that dequantises packed weights to a buffer: (nibble - zero point) * scale, or of float4_e2m1fn number * scale.

    They are computed in float32 and rounded to the buffer's dtype.
    """
    (n, k), dtype = (int(extent) for extent in out.shape), str(out.dtype)
    scale_shape, scale_dtype = scales.shape, str(scales.dtype)
    packed, scale = te.placeholder(packed_shape(n, k), "uint8"), te.placeholder(scale_shape, scale_dtype)
    zeros = [te.placeholder(scale_shape, "uint8")] if has_zeros else []

    def element(row: Any, at: Any) -> Any:
        lane, byte = row % 8 * 4 + at % 8 // 2, at % 64 // 16 * 4 + at % 2 * 2 + at % 16 // 8
        value = (packed(at // 64, row // 16, lane, byte) >> (row % 16 // 8 * 4).astype("uint8")) & tirx.const(15, "uint8")
        place = (row,) if len(scale_shape) == 1 else (at // (k // int(scale_shape[0])), row)
        if scale_dtype in FLOAT4_GROUPS:
            return (_float4(value) * _widened_scale(scale(*place), scale_dtype)).astype(dtype)
        zero = zeros[0](*place).astype("int32") if zeros else 8
        return ((value.astype("int32") - zero).astype("float32") * scale(*place).astype("float32")).astype(dtype)

    weights = te.compute((n, k), element, name="dequantised")
    return canonical_module(te.create_prim_func([packed, scale, *zeros, weights], index_dtype_override="int64"))["main"]


def _float4(bits: Any) -> Any:
    """Return a code of float4_e2m1fn as float32: its bits in those of a float16 are the number times 2^-14."""
    wide = bits.astype("uint16")
    sign, size = wide & tirx.const(8, "uint16"), wide & tirx.const(7, "uint16")
    half = (sign << tirx.const(12, "uint16")) | (size << tirx.const(9, "uint16"))
    return tirx.reinterpret("float16", half).astype("float32") * tirx.const(2.0**14, "float32")


def _widened_scale(scale: Any, dtype: str) -> Any:
    """Return a scale as float32; bytes are those of float8_e8m0fnu: exponents, but for 2^-127 and NaN."""
    if dtype != "uint8":
        return scale.astype("float32")
    wide = scale.astype("uint32")
    zero, nan, mantissa = (tirx.const(value, "uint32") for value in (0, 255, 23))
    finite = tirx.Select(wide == zero, tirx.const(0x400000, "uint32"), wide << mantissa)
    return tirx.reinterpret("float32", tirx.Select(wide == nan, tirx.const(0x7FC00000, "uint32"), finite))
