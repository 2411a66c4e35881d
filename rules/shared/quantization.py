"""Owns quantised operands: how weights are stored, packed and dequantised, in TE and in NumPy.

Knows nothing of what they are multiplied with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array, numpy_dtype
from kerneldecl.lazy import np
from kerneldecl.rule import Arg

WeightDtype = Literal["int4", "float4_e2m1fn", "int8", "float8_e4m3fn", "float8_e5m2"]
"""Dtype of quantised weights; two of 4 bits share a byte."""
BlockScaleDtype = Literal["", "float8_e8m0fnu", "float8_e4m3fn"]
"""Dtype of the scales of blocks of float4_e2m1fn: powers of two for MXFP4, small floats for NVFP4."""
FLOAT4, E8M0 = "float4_e2m1fn", "float8_e8m0fnu"
BLOCKS = {E8M0: ("MXFP4", 32), "float8_e4m3fn": ("NVFP4", 16)}
"""Names of the formats of blocks of float4_e2m1fn, and their groups, by the dtype of scales."""
Granularity = Literal["tensor", "column", "group", "block"]
"""What shares a scale: all weights, those of a column of C, `group` of these along k, or `group` columns x `group` along k."""
WeightLayout = Literal["rows", "packed"]
"""How weights lie in memory: in rows [n, k], or in the order of tensor cores' fragments, as rule pack_weights stores them."""
INT4_ZERO = 8
"""Zero point of int4 where none are given: nibbles are 0 to 15."""
TILE_ROWS, TILE_K = 16, 64
"""Rows and elements along k of a tile of packed 4-bit weights, which is 512 bytes: 16 for each lane of a warp."""
FLOAT4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the last three bits of float4_e2m1fn stand for; the first one is the sign (OCP Microscaling Formats, "FP4")."""


@dataclass(frozen=True)
class Weights:
    """Quantised weights W[n, k]: values q, scales s and zero points z; a weight is (q - z) * s, of float4_e2m1fn q * s."""

    n: int
    k: int
    dtype: WeightDtype
    scales: Granularity
    group: int
    layout: WeightLayout
    has_zeros: bool
    compute_dtype: str
    """Of dequantised weights."""
    scale_dtype: str
    """That of dequantised weights, or one of `BLOCKS`."""

    @property
    def is_int4(self) -> bool:
        return self.dtype == "int4"

    @property
    def has_nibbles(self) -> bool:
        """Say whether two weights share a byte."""
        return self.dtype in {"int4", FLOAT4}

    @property
    def stored(self) -> Arg:
        """Return the argument that holds the values."""
        if not self.has_nibbles:
            return Arg("W", (self.n, self.k), self.dtype)
        shape = packed_shape(self.n, self.k) if self.layout == "packed" else (self.n, self.k // 2)
        return Arg("W", shape, "uint8")

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Return the shape of the scales, and of the zero points: groups come before columns, so that neighbours share a load."""
        by_granularity = {
            "tensor": (1,),
            "column": (self.n,),
            "group": (self.k // self.group, self.n),
            "block": (-(-self.n // self.group), self.k // self.group),
        }
        return by_granularity[self.scales]

    @property
    def args(self) -> tuple[Arg, ...]:
        zeros = (Arg("zeros", self.scale_shape, "uint8" if self.is_int4 else "int8"),) if self.has_zeros else ()
        stored_scale = "uint8" if self.scale_dtype == E8M0 else self.scale_dtype
        return (self.stored, Arg("weight_scales", self.scale_shape, stored_scale), *zeros)

    def _scale_index(self, row: Any, k: Any) -> tuple[Any, ...]:
        by_granularity: dict[str, tuple[Any, ...]] = {
            "tensor": (0,),
            "column": (row,),
            "group": (k // self.group, row),
            "block": (row // self.group, k // self.group),
        }
        return by_granularity[self.scales]

    def lower(self, w: Any, scale: Any, zeros: Any | None, dtype: str) -> Any:
        """Return the TE stage of weights [n, k], each computed in float32 and rounded to `dtype`."""
        from tvm import te

        def element(row: Any, k: Any) -> Any:
            at = self._scale_index(row, k)
            value = self._value(w, row, k)
            zero = zeros(*at).astype("int32") if zeros is not None else INT4_ZERO if self.is_int4 else None
            shifted = value if zero is None else value.astype("int32") - zero
            factor = lower_e8m0(scale(*at)) if self.scale_dtype == E8M0 else scale(*at).astype("float32")
            return (shifted.astype("float32") * factor).astype(dtype)

        return te.compute((self.n, self.k), element, name="dequantised")

    def _value(self, w: Any, row: Any, k: Any) -> Any:
        from tvm import tirx

        if not self.has_nibbles:
            return w(row, k)
        *place, nibble = packed_place(row, k) if self.layout == "packed" else (row, k // 2, k % 2)
        # Shifted and masked as bytes: 64-bit indices would make vectors of eight bytes an element of it.
        bits = (w(*place) >> (nibble * 4).astype("uint8")) & tirx.const(15, "uint8")
        return lower_float4(bits) if self.dtype == FLOAT4 else bits

    def values(self, w: Array) -> Array:
        """Return the stored values as an array [n, k]; those of int4 are 0 to 15."""
        if not self.has_nibbles:
            return w
        bits = unpacked(w) if self.layout == "packed" else np.stack([w & 15, w >> 4], axis=-1).reshape(self.n, self.k)
        return float4_values(bits) if self.dtype == FLOAT4 else bits

    def dequantised(self, values: Array, rows: slice, factors: Sequence[Array], dtype: Any) -> Array:
        """Return some rows of the weights, given all values and the scales, then zero points where there are some.

        They are rounded to the dtype of operands if that has 16 bits, as kernels round them.
        """
        scales = e8m0_values(factors[0]) if self.scale_dtype == E8M0 else factors[0]
        scale, *zeros = (self._spread(each.astype(dtype), rows) for each in (scales, *factors[1:]))
        zero = zeros[0] if zeros else dtype(INT4_ZERO if self.is_int4 else 0)
        weights = np.asarray((values[rows].astype(dtype) - zero) * scale)
        return weights if self.compute_dtype == "float32" else weights.astype(numpy_dtype(self.compute_dtype)).astype(dtype)

    def _spread(self, of_groups: Array, rows: slice) -> Array:
        """Return scales or zero points of some rows, so that they broadcast to weights."""
        match self.scales:
            case "group":
                return np.asarray(of_groups[:, rows].T.repeat(self.group, axis=1))
            case "block":
                return np.asarray(of_groups[np.arange(self.n)[rows] // self.group].repeat(self.group, axis=1))
            case "column":
                return of_groups[rows, np.newaxis]
        return of_groups

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return random values, scales with which weights are of size 1, and zero points about the middle."""
        w, scale, *zeros = self.args
        if self.dtype == FLOAT4:
            return [_random_values(rng, w), _random_block_scales(rng, scale)]
        size = {"int4": 4.6, "int8": 74.0}.get(self.dtype, 1.0)
        made = [_random_values(rng, w), rng.uniform(0.5 / size, 1.5 / size, scale.shape).astype(numpy_dtype(scale.dtype))]
        low, high = (4, 12) if self.is_int4 else (-16, 16)
        return [*made, *(rng.integers(low, high, zero.shape).astype(zero.dtype) for zero in zeros)]


def _random_values(rng: np.random.Generator, arg: Arg) -> Array:
    if arg.dtype == "uint8":
        return rng.integers(0, 256, arg.shape, np.uint8)
    if arg.dtype == "int8":
        return rng.integers(-128, 128, arg.shape, np.int8)
    return rng.standard_normal(arg.shape, np.float32).astype(numpy_dtype(arg.dtype))


def _random_block_scales(rng: np.random.Generator, arg: Arg) -> Array:
    """Return scales with which blocks of float4_e2m1fn, whose size is 2.9, are of size 1: powers of two from 2^-4 to 2^-1, or floats."""
    if arg.dtype == "uint8":
        return rng.integers(123, 127, arg.shape, np.uint8)
    return rng.uniform(0.5 / 2.9, 1.5 / 2.9, arg.shape).astype(numpy_dtype(arg.dtype))


def float4_values(bits: Array) -> Array:
    """Return what codes of float4_e2m1fn, 0 to 15, stand for."""
    table = np.array(FLOAT4_VALUES, np.float32)
    return np.concatenate([table, -table])[bits]


def e8m0_values(scales: Array) -> Array:
    """Return what codes of float8_e8m0fnu stand for: 2^(code - 127), and NaN for 255, which float32 represents exactly."""
    return scales.view(numpy_dtype(E8M0)).astype(np.float32)


def lower_float4(bits: Any) -> Any:
    """Return a code of float4_e2m1fn, a uint8 from 0 to 15, as float32 in TE.

    Its exponent and mantissa in those of float16 give the value times 2^-14, subnormal ones included.
    """
    from tvm import tirx

    def u16(value: int) -> Any:
        return tirx.const(value, "uint16")

    wide = bits.astype("uint16")
    half = ((wide & u16(8)) << u16(12)) | ((wide & u16(7)) << u16(9))
    return tirx.reinterpret("float16", half).astype("float32") * tirx.const(2.0**14, "float32")


def lower_e8m0(scale: Any) -> Any:
    """Return a code of float8_e8m0fnu, a uint8, as float32 in TE: its bits are the exponent, but for 2^-127 and NaN."""
    from tvm import tirx

    def u32(value: int) -> Any:
        return tirx.const(value, "uint32")

    wide = scale.astype("uint32")
    finite = tirx.Select(wide == u32(0), u32(0x400000), wide << u32(23))
    return tirx.reinterpret("float32", tirx.Select(wide == u32(255), u32(0x7FC00000), finite))


def packed_shape(n: int, k: int) -> tuple[int, int, int, int]:
    """Return the shape of packed 4-bit weights: tiles along k, tiles of 16 rows, lanes of a warp, bytes of a lane."""
    return k // TILE_K, n // TILE_ROWS, 32, 16


def packed_place(row: Any, k: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return where a packed 4-bit weight is: its indices in `packed_shape`, and which nibble of the byte, the low one first.

    A lane's 16 bytes are four words, one for each 16 elements of k: its eight elements of operand A of mma.m16n8k16 (PTX ISA, "Matrix
    Fragments for mma.m16n8k16"). Nibbles 0 to 3 of a word are the first halves of its four registers, nibbles 4 to 7 the second ones.
    """
    lane = row % 8 * 4 + k % 8 // 2
    byte = k % 64 // 16 * 4 + k % 2 * 2 + k % 16 // 8
    return k // TILE_K, row // TILE_ROWS, lane, byte, row % 16 // 8


def packed(w: Array) -> Array:
    """Return 4-bit weights that lie in rows [n, k / 2], the low nibble first, in the packed order."""
    n, row_bytes = w.shape
    values = np.stack([w & 15, w >> 4], axis=-1).reshape(n // TILE_ROWS, 2, 8, 2 * row_bytes // TILE_K, 4, 2, 4, 2)
    half, lane_row, k_tile, step, k_half, lane_k, parity = range(1, 8)
    ordered = values.transpose(k_tile, 0, lane_row, lane_k, step, parity, k_half, half)
    return np.ascontiguousarray(ordered[..., 0] | ordered[..., 1] << 4).reshape(packed_shape(n, 2 * row_bytes))


def unpacked(w: Array) -> Array:
    """Return packed 4-bit weights as values [n, k], 0 to 15."""
    k_tiles, tiles, *_ = w.shape
    values = np.stack([w & 15, w >> 4], axis=-1).reshape(k_tiles, tiles, 8, 4, 4, 2, 2, 2)
    lane_row, lane_k, step, parity, k_half, half = range(2, 8)
    return values.transpose(1, half, lane_row, 0, step, k_half, lane_k, parity).reshape(tiles * TILE_ROWS, k_tiles * TILE_K)
