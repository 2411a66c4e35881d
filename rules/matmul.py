"""Owns GEMM, with an optional epilogue in the same kernel.

Knows nothing of tiles, targets or how it is scheduled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import PERIOD, Array, distinct, random_array, repeated, widened
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Dtype, Extent, Rule, Signature, Size

from .shared.epilogue import Epilogue, RowStep, Step
from .shared.precision import (
    AccumDtype,
    OperandDtype,
    accum_dtype,
    accum_problems,
    accum_tolerance,
    as_tfloat32,
    largest_summand,
    out_dtype,
    reference_dtype,
)


@dataclass(frozen=True, kw_only=True)
class Matmul(Rule):
    """C = epilogue(A @ B): a GEMM, or a batch of them."""

    m: Extent
    """Rows of C."""
    n: Extent
    """Columns of C."""
    k: Extent
    """Extent of the reduction."""
    batch: Size = 0
    """GEMMs in the batch, along a leading axis of A, B and C; 0 for a single GEMM without that axis."""
    heads: Size = 0
    """GEMMs for each element of the batch, along a second axis, such as heads of attention; 0 for one without that axis."""
    interleaved: Literal["", "a", "b", "c", "ab", "ac", "bc", "abc"] = ""
    """Matrices that are stored as [batch, rows, heads, columns], as a projection writes them, rather than [batch, heads, rows, columns]."""
    layout: Literal["nn", "nt", "tn", "tt"] = "nn"
    """Layout of A, then of B: n stores A as [m, k] and B as [k, n]; t stores A as [k, m] and B as [n, k]."""
    dtype: OperandDtype = "float32"
    """Dtype of A and B."""
    accum_dtype: AccumDtype | Literal[""] = ""
    """Dtype of the accumulators and the epilogue; by default float32, int32 for integers, float64 for float64."""
    precision: Literal["", "tfloat32"] = ""
    """Precision of float32 A and B: tfloat32 drops the last 13 bits, which tensor cores do not read; by default all bits count."""
    out_dtype: Dtype | Literal[""] = ""
    """Dtype of C, the bias and the residual; by default dtype, int32 for integers."""
    epilogue: tuple[Step | RowStep, ...] = ()
    """Steps in order: bias adds a vector [n], add an operand like C, mul multiplies by one, scale, scale_columns, scale_rows by float32."""

    @property
    def _accum(self) -> str:
        return accum_dtype(self.dtype, self.accum_dtype)

    @property
    def _epilogue(self) -> Epilogue:
        c = Arg("C", self._stored("c", self.m, self.n), out_dtype(self.dtype, self.out_dtype))
        return Epilogue(self.epilogue, self._accum, c)

    @property
    def _batch(self) -> tuple[int, ...]:
        return tuple(extent for extent in (self.batch, self.heads) if extent)

    def _stored(self, name: str, rows: Any, columns: Any, batch: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        """Return the shape of a matrix as it is stored; with the place in the batch the indices of an element at a row and a column."""
        outer = self._batch if batch is None else batch
        return (*outer[:-1], rows, outer[-1], columns) if name in self.interleaved else (*outer, rows, columns)

    def _shape(self, name: str) -> tuple[int, ...]:
        rows, columns = (self.m, self.k) if name == "a" else (self.k, self.n)
        return self._stored(name, rows, columns) if self.layout["ab".index(name)] == "n" else self._stored(name, columns, rows)

    def problems(self) -> Iterator[str]:
        if self.heads and not self.batch:
            yield "heads needs batch, the extent of the axis before it; write batch as well"
        if self.interleaved and not self.heads:
            yield f"interleaved {self.interleaved} needs heads, the axis that the rows are before; write heads as well"
        yield from accum_problems(self.dtype, self._accum, self._epilogue.out.dtype)
        if self.precision and self.dtype != "float32":
            yield f"precision {self.precision} is for dtype float32, not {self.dtype}; leave it out"
        yield from self._epilogue.problems()

    def signature(self) -> Signature:
        inputs = Arg("A", self._shape("a"), self.dtype), Arg("B", self._shape("b"), self.dtype)
        return Signature((*inputs, *self._epilogue.args()), (self._epilogue.out,))

    def lower(self) -> list[Any]:
        from tvm import te

        from kerneldecl.compiler import tfloat32

        a, b, *operands = inputs = [te.placeholder(arg.shape, arg.dtype, arg.name) for arg in self.signature().inputs]

        def element(*i: Any) -> Any:
            *outer, column = i
            row = outer.pop(-2 if "c" in self.interleaved else -1)
            batch = tuple(outer)
            k = te.reduce_axis((0, self.k), "k")
            lhs = a(*self._stored("a", *((row, k) if self.layout[0] == "n" else (k, row)), batch))
            rhs = b(*self._stored("b", *((k, column) if self.layout[1] == "n" else (column, k)), batch))
            if self.precision:
                lhs, rhs = tfloat32.truncated(lhs), tfloat32.truncated(rhs)
            return te.sum(lhs.astype(self._accum) * rhs.astype(self._accum), axis=k)

        out = self._epilogue.out
        return [*inputs, self._epilogue.lower(lambda name: te.compute(out.shape, element, name=name), operands)]

    def reference(self, *inputs: Array) -> Array:
        a, b, *operands = inputs
        if self.precision:
            a, b = as_tfloat32(a), as_tfloat32(b)
        a, b = (x.swapaxes(-2, -3) if name in self.interleaved else x for name, x in (("a", a), ("b", b)))
        lhs = a if self.layout[0] == "n" else a.swapaxes(-1, -2)
        rhs = b if self.layout[1] == "n" else b.swapaxes(-1, -2)
        wide = reference_dtype(self._epilogue.out.dtype, self.dtype)
        rows, columns = distinct(lhs, -2), distinct(rhs, -1)
        accumulated = widened(lhs[..., :rows, :], wide) @ widened(rhs[..., :columns], wide)
        whole = repeated(repeated(accumulated, self.n, -1), self.m, -2)
        return self._epilogue.reference(whole.swapaxes(-2, -3) if "c" in self.interleaved else whole, operands)

    def flops(self) -> int:
        return math.prod(self._epilogue.out.shape) * (2 * self.k + self._epilogue.flops_per_element())

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return operands whose GEMM has unit variance. In large ones, rows of A and columns of B repeat: see `PERIOD`."""
        a, b, *_ = self.signature().inputs
        return [
            _operand(rng, a, self._rows_axis("a") if self.layout[0] == "n" else -1, 1.0),
            _operand(rng, b, -1 if self.layout[1] == "n" else self._rows_axis("b"), 1 / math.sqrt(self.k)),
            *self._epilogue.inputs(rng, self.k, self.dtype),
        ]

    def _rows_axis(self, name: str) -> int:
        return -3 if name in self.interleaved else -2

    def largest_input(self) -> float:
        return largest_summand(self._accum, self.k)

    def tolerance(self) -> float:
        return accum_tolerance(self._epilogue.out.dtype, self._accum, self.k, self.precision or self.dtype)


def _operand(rng: np.random.Generator, arg: Arg, axis: int, scale: float) -> Array:
    """Return an operand whose slices along an axis of C, m or n, repeat after PERIOD of them."""
    shape = list(arg.shape)
    shape[axis] = min(shape[axis], PERIOD)
    return repeated(random_array(rng, Arg(arg.name, tuple(shape), arg.dtype), scale), arg.shape[axis], axis)
