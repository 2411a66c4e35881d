"""Owns the places of the largest and the smallest elements along an axis as a computation: its TensorIR, and its recognition.

Knows nothing of schedules, targets, or who declares it. A function is recognised as `compiler.attention` does it: by its canonical
text. So what is written here and what is recognised cannot differ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import tvm
from tvm import te, tirx

from kerneldecl.analysis.arg_reduce import KEPT_PLACE, ArgSizes
from kerneldecl.compiler.canonical import canonical_module, canonical_text, signature_of


class ArgSpec(NamedTuple):
    """Y = the index of the largest (or smallest) element of X along an axis, the first of equals."""

    shape: tuple[int, ...]
    axis: int
    is_largest: bool
    dtype: str
    index_dtype: str

    @property
    def compared(self) -> str:
        """The dtype that elements are compared in, which holds every value of theirs."""
        return "float32" if self.dtype in {"float16", "bfloat16"} or self.dtype.startswith("float8") else self.dtype

    @property
    def sizes(self) -> ArgSizes:
        """Return what policies see of it."""
        before, along, behind = self.shape[: self.axis], self.shape[self.axis], self.shape[self.axis + 1 :]
        return ArgSizes(math.prod(before), along, math.prod(behind), self.dtype)

    @property
    def arguments(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Return name, shape and dtype of each argument; the last one is the result."""
        kept = self.shape[: self.axis] + self.shape[self.axis + 1 :]
        return ("X", self.shape, self.dtype), ("Y", kept, self.index_dtype)


def arg_reduce(spec: ArgSpec) -> list[Any]:
    """Return the extreme of each row, then the least place that holds it: two plain reductions, which every template takes.

    A reduction of pairs (place, value) reads X once, but only the slowest schedules take it.
    """
    x, axis = te.placeholder(spec.shape, spec.dtype, "X"), spec.axis
    out = spec.arguments[-1][1]

    def wide(*i: Any) -> Any:
        return x(*i).astype(spec.compared)

    def along(combine: Any, read: Any) -> Any:
        k = te.reduce_axis((0, spec.shape[axis]), "k")
        return lambda *at: combine(read(*at[:axis], k, *at[axis:]), axis=k)

    extreme = te.compute(out, along(te.max if spec.is_largest else te.min, wide), name="extreme")

    def place(*i: Any) -> Any:
        is_it = wide(*i) == extreme(*i[:axis], *i[axis + 1 :])
        return tirx.Select(is_it, i[axis].astype("int64"), tirx.const(KEPT_PLACE, "int64"))

    first = te.compute(out, along(te.min, place), name="first")
    return [x, te.compute(out, lambda *at: first(*at).astype(spec.index_dtype), name="Y")]


def read_arg_reduce(mod: tvm.IRModule) -> ArgSpec | None:
    """Return what a canonical module's `main` looks for, None if it computes something else."""
    text = canonical_text(mod)

    def is_it(spec: ArgSpec) -> bool:
        func = te.create_prim_func(arg_reduce(spec), index_dtype_override="int64")
        return canonical_text(canonical_module(func)) == text

    return next(filter(is_it, _candidates(mod["main"])), None)


def _candidates(func: Any) -> Iterator[ArgSpec]:
    """Yield what a function with these parameters may compute."""
    try:
        args = signature_of(func)
    except (TypeError, ValueError):
        return
    if len(args) != 2 or len(args[0][0]) < 2 or args[1][1] not in {"int32", "int64"}:
        return
    (shape, dtype), (_, index_dtype) = args
    for axis, is_largest in itertools.product(reversed(range(len(shape))), (True, False)):
        spec = ArgSpec(shape, axis, is_largest, dtype, index_dtype)
        if [(shape, dtype) for _, shape, dtype in spec.arguments] == args:
            yield spec
