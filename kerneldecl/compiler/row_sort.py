"""Owns the first elements of rows in their order as a computation: its canonical TensorIR, and the recognition of a function that is one.

Knows nothing of schedules, targets, or who declares a sort. A function is recognised as `compiler.attention` does it: by its canonical
text. So what is written here and what is recognised cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import te, tirx

from kerneldecl.analysis.row_sort import TopSizes
from kerneldecl.compiler.canonical import canonical_module, canonical_text, signature_of


@dataclass(frozen=True)
class TopSpec:
    """The first `count` elements of each row, along the last axis, and their places; equal ones in their order, NaN the largest."""

    shape: tuple[int, ...]
    count: int
    is_largest_first: bool
    dtype: str
    index_dtype: str

    @property
    def sizes(self) -> TopSizes:
        """Return what policies see of it."""
        return TopSizes(math.prod(self.shape[:-1]), self.shape[-1], self.count, self.dtype)

    @property
    def arguments(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Return name, shape and dtype of each argument; the last two are results."""
        out = (*self.shape[:-1], self.count)
        return ("X", self.shape, self.dtype), ("values", out, self.dtype), ("indices", out, self.index_dtype)


def top(spec: TopSpec) -> list[Any]:
    """Return the computation in TE: each element's place is the count of those before it, and a result the sum of one element and zeros."""
    x, extent = te.placeholder(spec.shape, spec.dtype, "X"), spec.shape[-1]
    other = te.reduce_axis((0, extent), "other")

    def place(*at: Any) -> Any:
        mine, its = x(*at), x(*at[:-1], other)
        if spec.dtype == "bfloat16":  # of which TVM has no isnan
            mine, its = mine.astype("float32"), its.astype("float32")
        is_before = _is_less(mine, its) if spec.is_largest_first else _is_less(its, mine)
        comes_first = tirx.any(is_before, tirx.all(_is_equal(mine, its), other < at[-1]))
        return te.sum(tirx.Select(comes_first, tirx.const(1, "int32"), tirx.const(0, "int32")), axis=other)

    places = te.compute(spec.shape, place, name="places")

    def placed(dtype: str, read: Callable[[Any, tuple[Any, ...]], Any]) -> Callable[..., Any]:
        source = te.reduce_axis((0, extent), "source")

        def element(*at: Any) -> Any:
            is_there = places(*at[:-1], source) == at[-1].astype("int32")
            return te.sum(tirx.Select(is_there, read(source, at), tirx.const(0, dtype)), axis=source)

        return element

    out = (*spec.shape[:-1], spec.count)
    values = te.compute(out, placed(spec.dtype, lambda source, at: x(*at[:-1], source)), name="values")
    indices = te.compute(out, placed(spec.index_dtype, lambda source, _: source.astype(spec.index_dtype)), name="indices")
    return [x, values, indices]


def order_key(spec: TopSpec, value: Any) -> Any:
    """Return an int64 that is smaller where a value comes earlier: the bits of a number, turned round below zero; NaN is the largest."""
    if "float" not in spec.dtype:
        key = value.astype("int64")
    else:
        wide = value if spec.dtype in {"float32", "float64"} else value.astype("float32")
        kind = "int64" if spec.dtype == "float64" else "int32"
        largest, zero = tirx.const(2 ** (63 if kind == "int64" else 31) - 1, kind), tirx.const(0, kind)
        bits = tirx.Select(wide == tirx.const(0, str(wide.ty.dtype)), zero, tirx.reinterpret(kind, wide))
        turned = tirx.Select(bits < zero, tirx.bitwise_xor(bits, largest), bits)
        key = tirx.Select(tirx.isnan(wide), largest, turned).astype("int64")
    return tirx.bitwise_not(key) if spec.is_largest_first else key


def read_top(mod: tvm.IRModule) -> TopSpec | None:
    """Return the sorted rows that a canonical module's `main` computes, None if it computes something else."""
    text = canonical_text(mod)

    def is_it(spec: TopSpec) -> bool:
        func = te.create_prim_func(top(spec), index_dtype_override="int64")
        return canonical_text(canonical_module(func)) == text

    return next(filter(is_it, _candidates(mod["main"])), None)


def _candidates(func: Any) -> Iterator[TopSpec]:
    """Yield the sorts that a function with these parameters may compute."""
    try:
        args = signature_of(func)
    except (TypeError, ValueError):
        return
    if len(args) != 3:
        return
    (shape, dtype), (out, _), (_, index_dtype) = args
    for is_largest_first in (True, False):
        spec = TopSpec(shape, out[-1], is_largest_first, dtype, index_dtype)
        if out and [(shape, dtype) for _, shape, dtype in spec.arguments] == args:
            yield spec


def _is_less(a: Any, b: Any) -> Any:
    """Say whether a is less than b, where NaN is larger than all other values."""
    if "float" not in str(a.ty.dtype):
        return a < b
    return tirx.any(a < b, tirx.all(tirx.isnan(b), tirx.Not(tirx.isnan(a))))


def _is_equal(a: Any, b: Any) -> Any:
    """Say whether two values are equal, or both NaN. It is not `not less`: TVM makes `a >= b` of `not a < b`."""
    return tirx.any(a == b, tirx.all(tirx.isnan(a), tirx.isnan(b))) if "float" in str(a.ty.dtype) else a == b
