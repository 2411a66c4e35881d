"""Owns what CPU kernels in TIR write with vectors: loads, stores, transposed squares, powers of e.

Knows nothing of what the kernels compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

LOWEST = -88.0
"""Arguments below count as this one, whose power is zero: 2^-127, rounded to a power of two, has no exponent in a float32."""
SHIFT = 1.5 * 2.0**23 + 127
"""Added to a number of less than 2^22, it leaves the nearest integer in the lowest bits, plus 127: an exponent's bits."""
COEFFICIENTS = (1.326472731e-3, 9.671512991e-3, 5.550733581e-2, 2.402224243e-1, 6.931470037e-1, 1.0)
"""Coefficients of 2^f for |f| <= 1/2, highest power first: our minimax fit of the relative error, 9.2e-8, that is exact for 0."""


def loop(extent: Any) -> Any:
    """Return a serial loop's frame; its variable has 64 bits, as offsets in large arguments need."""
    return T.serial(_wide(extent))


def parallel(extent: int) -> Any:
    """Return the frame of a loop on all cores, serial where there is one iteration: starting threads takes microseconds."""
    return T.parallel(_wide(extent)) if extent > 1 else loop(extent)


def _wide(extent: Any) -> Any:
    return T.int64(extent) if isinstance(extent, int) else extent


def load(buffer: Any, index: Sequence[Any], lanes: int) -> Any:
    """Return neighbouring elements, as many as `lanes`, in float32."""
    return in_float32(elements(buffer, index, lanes))


def elements(buffer: Any, index: Sequence[Any], lanes: int) -> Any:
    """Return neighbouring elements, as many as `lanes`, in the buffer's dtype."""
    *outer, column = index
    return buffer[(*outer, tirx.Ramp(_wide(column), T.int64(1), lanes))]


def store(buffer: Any, index: Sequence[Any], vector: Any) -> None:
    """Store a vector in neighbouring elements, rounded to their dtype."""
    *outer, column = index
    lanes = vector.ty.dtype.lanes
    T.buffer_store(buffer, rounded(vector, str(buffer.dtype)), [*outer, tirx.Ramp(_wide(column), T.int64(1), lanes)])


def has_vectors(dtype: str) -> bool:
    """Say whether TVM compiles conversions of vectors between a dtype and float32."""
    return dtype in ("float32", "float16", "bfloat16")


def kept(value: Any) -> Any:
    """Return what reads a vector from a variable.

    TVM's simplifier puts what `T.bind` binds in its place: x + c - c becomes x, and what is used twice is computed twice.
    """
    lanes = value.ty.dtype.lanes
    name = variable(lanes, str(value.ty.dtype).partition("x")[0])
    store(name, (0,), value)
    return elements(name, (0,), lanes)


def variable(count: int, dtype: str = "float32") -> Any:
    """Return a variable of so many elements, which LLVM keeps in registers where indices are constants.

    TVM puts less than 1 KiB of scope "global" on the stack; all else comes from the heap, where it stays.
    """
    return T.alloc_buffer((count,), dtype)


def spread(value: Any, lanes: int) -> Any:
    """Return a vector of equal elements, from a scalar in float32 or a number."""
    return tirx.Broadcast(T.float32(value) if isinstance(value, int | float) else value, lanes)


def in_float32(value: Any) -> Any:
    """Return a scalar or a vector in float32; for a bool, of a mask, what is added to a score: zero for true, else minus infinity."""
    dtype = value.ty.dtype
    lanes = dtype.lanes
    if str(dtype) == "bool":
        return tirx.Select(value, T.float32(0), T.float32(-math.inf))
    return value if str(dtype).startswith("float32") else tirx.Cast(_vector("float32", lanes), value)


def rounded(value: Any, dtype: str) -> Any:
    """Return a scalar or vector in another dtype."""
    wanted = _vector(dtype, value.ty.dtype.lanes)
    return value if str(value.ty.dtype) == wanted else tirx.Cast(wanted, value)


def _vector(dtype: str, lanes: int) -> str:
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def transposed(rows: Sequence[Any]) -> list[Any]:
    """Return the columns of a square of vectors: log2(n) rounds that interleave rows i and i + n/2 into rows 2i and 2i + 1."""
    lanes = len(rows)
    half = lanes // 2
    picks = [[at for first in range(start, start + half) for at in (first, lanes + first)] for start in (0, half)]
    found = [kept(row) for row in rows]
    for _ in range(lanes.bit_length() - 1):
        found = [kept(tirx.Shuffle([found[at], found[at + half]], pick)) for at in range(half) for pick in picks]
    return found


def larger(one: Any, other: Any) -> Any:
    """Return the larger elements; those of `one` where either is NaN."""
    return tirx.Select(one < other, other, one)


def power(x: Any) -> Any:
    """Return e^x for vectors without positive elements: zero below `LOWEST`, NaN for NaN.

    Its relative error is at most 2.3e-7 from -5 to 0, and 4.3e-7 below.
    """
    lanes = x.ty.dtype.lanes

    def const(value: float) -> Any:
        return spread(value, lanes)

    x = kept(x)
    clamped = kept(tirx.Select(x < const(LOWEST), const(LOWEST), x))
    shifted = kept(clamped * const(math.log2(math.e)) + const(SHIFT))
    fraction = kept(clamped * const(math.log2(math.e)) - (shifted - const(SHIFT)))
    value = const(COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        value = value * fraction + const(coefficient)
    exponent = tirx.reinterpret(_vector("int32", lanes), shifted) << tirx.Broadcast(T.int32(23), lanes)
    return kept(value * tirx.reinterpret(_vector("float32", lanes), exponent))
