"""Owns cumulative sums as a computation: their canonical TensorIR, and the recognition of a function that is one.

Knows nothing of schedules, targets, or who declares a sum. A function is recognised as `compiler.attention` does it: by its canonical
text. So what is written here and what is recognised cannot differ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import te, tirx

from kerneldecl.analysis.scan import ScanSizes
from kerneldecl.compiler.canonical import canonical_module, canonical_text, signature_of


@dataclass(frozen=True)
class ScanSpec:
    """Y[j] = the sum of X[k] over k <= j along an axis."""

    shape: tuple[int, ...]
    axis: int
    dtype: str
    """Of X and Y; 16-bit floating point is added up in float32."""
    is_exclusive: bool = False
    """Whether Y[j] leaves X[j] out."""
    is_reverse: bool = False
    """Whether sums are of k >= j."""

    @property
    def accum(self) -> str:
        return "float32" if self.dtype in {"float16", "bfloat16"} else self.dtype

    @property
    def sizes(self) -> ScanSizes:
        """Return what policies see of the sum."""
        axis = self.axis
        return ScanSizes(math.prod(self.shape[:axis]), self.shape[axis], math.prod(self.shape[axis + 1 :]), self.dtype)


def scan(spec: ScanSpec) -> list[Any]:
    """Return the computation in TE: each result is a sum over the whole axis, of elements that count and of zeros."""
    x, axis = te.placeholder(spec.shape, spec.dtype, "X"), spec.axis
    k = te.reduce_axis((0, spec.shape[axis]), "k")

    def counts(j: Any) -> Any:
        first, second = (j, k) if spec.is_reverse else (k, j)
        return first < second if spec.is_exclusive else first <= second

    def total(*at: Any) -> Any:
        term = x(*at[:axis], k, *at[axis + 1 :])
        wide = term if spec.accum == spec.dtype else term.astype(spec.accum)
        return te.sum(tirx.Select(counts(at[axis]), wide, tirx.const(0, spec.accum)), axis=k)

    if spec.accum == spec.dtype:
        return [x, te.compute(spec.shape, total, name="Y")]
    sums = te.compute(spec.shape, total, name="sums")
    return [x, te.compute(spec.shape, lambda *at: sums(*at).astype(spec.dtype), name="Y")]


def read_scan(mod: tvm.IRModule) -> ScanSpec | None:
    """Return the cumulative sum that a canonical module's `main` computes, None if it is none."""
    text = canonical_text(mod)

    def is_it(spec: ScanSpec) -> bool:
        func = te.create_prim_func(scan(spec), index_dtype_override="int64")
        return canonical_text(canonical_module(func)) == text

    return next(filter(is_it, _candidates(mod["main"])), None)


def _candidates(func: Any) -> Iterator[ScanSpec]:
    """Yield the sums that a function with these parameters may compute."""
    try:
        args = signature_of(func)
    except (TypeError, ValueError):
        return
    if len(args) != 2 or args[0] != args[1]:
        return
    (shape, dtype), _ = args
    for axis, exclusive, reverse in itertools.product(range(len(shape)), (False, True), (False, True)):
        yield ScanSpec(shape, axis, dtype, exclusive, reverse)
