"""Owns what topk and sort share: the first elements of rows in their order, and where they were.

Knows nothing of how a schedule finds them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Extent, Rule, Signature

from .precision import is_integer

SortedDtype = Literal["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64"]


@dataclass(frozen=True, kw_only=True)
class RowSortRule(Rule):
    """What rules of sorted rows share; each says how many results a row has, and which come first."""

    shape: tuple[Extent, ...]
    """Shape of X; rows are along the last axis."""
    index_dtype: Literal["int32", "int64"] = "int64"
    """Dtype of the indices."""
    dtype: SortedDtype = "float32"
    """Dtype of X and of the values."""

    def count(self) -> int:
        """Return the results of a row."""
        raise NotImplementedError

    def is_largest_first(self) -> bool:
        raise NotImplementedError

    def problems(self) -> Iterator[str]:
        if not self.shape:
            yield "shape has no extent; write shape = [16, 64], or other extents"
        elif not 1 <= self.count() <= self.shape[-1]:
            yield f"k {self.count()} is more than a row's elements, {self.shape[-1]}; write fewer"

    def signature(self) -> Signature:
        out = (*self.shape[:-1], self.count())
        outputs = Arg("values", out, self.dtype), Arg("indices", out, self.index_dtype)
        return Signature((Arg("X", self.shape, self.dtype),), outputs)

    def lower(self) -> list[Any]:
        from kerneldecl.compiler.row_sort import TopSpec, top

        return top(TopSpec(self.shape, self.count(), self.is_largest_first(), self.dtype, self.index_dtype))

    def reference(self, *inputs: Array) -> list[Array]:
        wide = inputs[0].astype(np.int64 if is_integer(self.dtype) else np.float64)
        key = _ordered(wide)
        order = np.argsort(~key if self.is_largest_first() else key, axis=-1, kind="stable")[..., : self.count()]
        return [np.take_along_axis(wide, order, -1), order.astype(self.index_dtype)]

    def takes_special_values(self) -> bool:
        """Say that NaN and infinities have their places, too."""
        return not is_integer(self.dtype)

    def flops(self) -> int:
        """Return one comparison for each element and each halving of the results."""
        return math.prod(self.shape) * max(1, math.ceil(math.log2(self.count() + 1)))

    def tolerance(self) -> float:
        """Return 0: elements are copied, and places are right or wrong."""
        return 0.0


def _ordered(x: Array) -> Array:
    """Return whole numbers, int64, in the order of x: of numbers below zero all bits but the sign are turned round; NaN is the largest."""
    if x.dtype == np.int64:
        return x
    bits = (x + 0.0).view(np.int64)  # -0 becomes 0
    return np.where(np.isnan(x), np.iinfo(np.int64).max, np.where(bits < 0, bits ^ np.iinfo(np.int64).max, bits))
