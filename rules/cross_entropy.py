"""Owns the cross entropy of rows of logits against one class each, forward.

Knows nothing of how many passes over its input a schedule makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array, integers_between
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Extent, FloatDtype, Rule, Signature


@dataclass(frozen=True, kw_only=True)
class CrossEntropy(Rule):
    """Y = log(sum(exp(X))) - X[T] for each row, 0 where T is ignored: the loss of torch with reduction "none"."""

    rows: Extent
    """Rows of X: tokens, or images."""
    classes: Extent
    """Columns of X: a vocabulary, or classes."""
    ignore_index: int = -100
    """Value of T whose rows have no loss; others are classes, from 0 on."""
    index_dtype: Literal["int32", "int64"] = "int64"
    """Dtype of T."""
    dtype: FloatDtype = "float32"
    """Dtype of X, the logits."""
    out_dtype: Literal["float32", "float64"] = "float32"
    """Dtype of Y; what is added up has 32 bits at least."""

    def problems(self) -> Iterator[str]:
        if self.dtype == "float64" and self.out_dtype == "float32":
            yield "out_dtype float32 is narrower than dtype float64; leave it out"

    def signature(self) -> Signature:
        inputs = Arg("X", (self.rows, self.classes), self.dtype), Arg("T", (self.rows,), self.index_dtype)
        return Signature(inputs, (Arg("Y", (self.rows,), self.out_dtype),))

    def lower(self) -> list[Any]:
        from kerneldecl.compiler.cross_entropy import CrossEntropySpec

        return CrossEntropySpec(self.rows, self.classes, self.dtype, self.index_dtype, self.out_dtype, self.ignore_index).lowered()

    def reference(self, *inputs: Array) -> Array:
        x, target = inputs[0].astype(np.float64), inputs[1].astype(np.int64)
        highest = x.max(axis=1)
        total = np.exp(x - highest[:, np.newaxis]).sum(axis=1)
        own = np.take_along_axis(x, np.maximum(target, 0)[:, np.newaxis], axis=1)[:, 0]
        return np.asarray(np.where(target == self.ignore_index, 0.0, np.log(total) + (highest - own)))

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return standard normal logits and random classes, about one in eight rows ignored."""
        x, _ = super().inputs(rng)
        target = integers_between(rng, self.signature().inputs[1], 0, self.classes - 1)
        target[rng.random(self.rows) < 0.125] = self.ignore_index
        return [x, target]

    def flops(self) -> int:
        """Return four operations for each logit: max, minus, exp, plus."""
        return 4 * self.rows * self.classes
