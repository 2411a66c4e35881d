"""Owns the reading of a GEMM whose operands are values of 8 bits or less times scales.

Knows nothing of tiles, instructions or targets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, TensorLoad
from tvm.s_tir import Schedule
from tvm.sym import Analyzer

from kerneldecl.analysis.scaled_gemm import INTEGER_DTYPE, VALUE_DTYPE
from kerneldecl.compiler.blocks import is_reduction

CENTRE, CENTRE_BITS = 512, 0x6600
"""An integer x from -512 to 511 added to the bits of 1536 in float16 makes those of 1536 + x: numbers from 1024 to 2047 are 1 apart."""

INTEGER_END = 128
"""Integers from -128 to 127 are those of INTEGER_DTYPE."""
FLOAT4_FACTOR = 2.0**14
"""What the bits of a code of float4_e2m1fn as float16 are multiplied by: all of its 16 numbers are exact."""

Element = Callable[[Any, Any], Any]
"""An expression of a row and a place along k."""


class Factored(NamedTuple):
    """An operand [rows, k] of a GEMM: values times scales."""

    values: Element
    """Values, exact in the dtype in which they are multiplied."""
    scale: Element | None
    """Scales of float32."""
    stored: Any = None
    """The buffer [rows, k] whose elements values are, None where they are computed of others."""


class ScaledGemm(NamedTuple):
    """sums[m, n] = sum over k of A[m, k] * B[n, k], and what follows."""

    func: Any
    a: Factored
    """Activations, whose values are stored as they are."""
    b: Factored
    extents: tuple[int, int, int]
    """Extents of m, n and k."""
    sums: Any
    """The buffer of sums."""
    rest: tuple[Any, ...]
    """The statements behind the GEMM."""
    buffers: tuple[Any, ...]
    """The buffers that these compute."""


def read_scaled(mod: tvm.IRModule, dtype: str = VALUE_DTYPE) -> ScaledGemm | None:
    """Return the GEMM of factored operands, values in a dtype, that a module's function is, None where it is another computation."""
    sch = Schedule(mod)
    root = sch.get(sch.get_sblock("root"))
    blocks = [sch.get(block) for block in sch.get_child_blocks(sch.get_sblock("root"))]
    at = next((place for place, block in enumerate(blocks) if is_reduction(block)), None)
    statements = list(root.body.seq) if isinstance(root.body, tirx.SeqStmt) else [root.body]
    if at is None or len(statements) != len(blocks):
        return None
    gemm, producers = blocks[at], {block.writes[0].source: block for block in blocks[:at]}
    if len(gemm.iter_vars) != 3 or not isinstance(gemm.body, tirx.BufferStore) or not isinstance(gemm.body.value, tirx.Add):
        return None
    m, n, k = (axis.var for axis in gemm.iter_vars)
    terms = _terms(gemm.body.value.b)
    if terms is None or not _is_at(terms[0], (m, k)) or not _is_at(terms[1], (n, k)) or not _is_at(gemm.body, (m, n)):
        return None
    operands = [_factored(load, producers, dtype) for load in terms]
    used = [load.source for load in terms if load.source in producers]
    if operands[0] is None or operands[1] is None or operands[0].stored is None or len(used) != len(producers):
        return None
    own = [*used, gemm.body.buffer]
    rest = [buffer for buffer in root.alloc_buffers if not any(buffer.same_as(each) for each in own)]
    rows, columns, depth = (int(axis.dom.extent) for axis in gemm.iter_vars)
    behind = tuple(statements[at + 1 :])
    return ScaledGemm(mod["main"], operands[0], operands[1], (rows, columns, depth), gemm.body.buffer, behind, tuple(rest))


def _terms(product: Any) -> tuple[Any, Any] | None:
    """Return the loads of two operands that are multiplied."""
    if not isinstance(product, tirx.Mul):
        return None
    first, second = (each.value if isinstance(each, tirx.Cast) else each for each in (product.a, product.b))
    return (first, second) if isinstance(first, TensorLoad) and isinstance(second, TensorLoad) else None


def _is_at(access: Any, axes: tuple[Any, ...]) -> bool:
    return len(access.indices) == len(axes) and all(index.same_as(axis) for index, axis in zip(access.indices, axes, strict=True))


def _factored(load: Any, producers: dict[Any, Any], dtype: str) -> Factored | None:
    """Return an operand that is an argument, or is computed by a block of its own; None where its values may not be exact."""
    block = producers.get(load.source)
    if block is None:
        value, scale, axes = load, None, tuple(load.indices)
    elif isinstance(block.body, tirx.BufferStore) and _is_at(block.body, tuple(axis.var for axis in block.iter_vars)):
        value, axes = block.body.value, tuple(block.body.indices)
        value, scale = (value.a, value.b) if isinstance(value, tirx.Mul) else (value, None)
        value = value.value if isinstance(value, tirx.Cast) else value
    else:
        return None
    exact = exact_value(value, dtype)
    if exact is None:
        return None
    stored = value.source if isinstance(value, TensorLoad) and _is_at(value, axes) else None
    return Factored(_element(exact, axes), None if scale is None else _element(scale, axes), stored)


def exact_value(value: Any, dtype: str) -> Any | None:
    """Return a value in VALUE_DTYPE or in INTEGER_DTYPE, None where that may not have it.

    Small integers become the last bits of 1536: it has ten of them, and no conversion of integers is as fast as bits and a subtraction.
    """
    own = str(value.ty.dtype)
    is_integer = dtype == INTEGER_DTYPE
    if not own.startswith(("int", "uint")):
        exact = tirx.Cast(VALUE_DTYPE, value) if own.startswith("float8") else _float4_value(value)
        return None if is_integer else exact
    bounds, most = Analyzer().const_int_bound(value), INTEGER_END if is_integer else CENTRE
    if int(bounds.min_value) < -most or int(bounds.max_value) >= most:
        return None
    if is_integer:
        return value if own == dtype else tirx.Cast(dtype, value)
    wide = value if own == "int32" else tirx.Cast("int32", value)
    bits = tirx.Cast("uint16", wide + tirx.const(CENTRE_BITS, "int32"))
    return tirx.reinterpret(VALUE_DTYPE, bits) - tirx.const(1024.0 + CENTRE, VALUE_DTYPE)


def _float4_value(value: Any) -> Any | None:
    """Return a code of float4_e2m1fn in VALUE_DTYPE, None for another value: bits of a float16 with so small an exponent, times 2^14."""
    if not isinstance(value, tirx.Mul) or not isinstance(value.a, tirx.Cast) or float(getattr(value.b, "value", 0)) != FLOAT4_FACTOR:
        return None
    bits = value.a.value
    return bits * tirx.const(FLOAT4_FACTOR, VALUE_DTYPE) if str(bits.ty.dtype) == VALUE_DTYPE and isinstance(bits, Call) else None


def _element(expr: Any, axes: tuple[Any, ...]) -> Element:
    def at(row: Any, k: Any) -> Any:
        places = dict(zip(axes, (row, k), strict=True))
        return tvm_ffi.structural_map(expr, [(tirx.Var, lambda var: places.get(var, var))])

    return at
