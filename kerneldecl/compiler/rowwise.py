"""Owns softmax, norms and reductions of rows as computations: their canonical TensorIR, and the recognition of a function that is one.

Knows nothing of schedules, targets, or who declares them. A function is recognised as `compiler.group_norm` does it, by its canonical
text. So what is written here and what is recognised cannot differ. 16-bit elements are computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import tvm
import tvm_ffi
from tvm import te, tirx

from kerneldecl.analysis.split_rows import RowKind, RowSizes
from kerneldecl.compiler.canonical import canonical_module, canonical_text, signature_of

Shape = tuple[int, ...]
Op = Literal["sum", "mean", "max", "min"]
OPS: tuple[Op, ...] = ("sum", "mean", "max", "min")


@dataclass(frozen=True)
class RowSpec:
    """One function of rows, which are along the last axis."""

    kind: RowKind
    shape: Shape
    dtype: str
    out_dtype: str
    eps: float = 0.0
    op: Op = "sum"
    """Of a reduction."""
    reduced: int = 1
    """Axes of a row: a reduction may have several, the last ones."""

    @property
    def sizes(self) -> RowSizes:
        """Return what policies see of it."""
        rows, columns = (math.prod(part) for part in (self.shape[: -self.reduced], self.shape[-self.reduced :]))
        return RowSizes(self.kind, rows, columns, self.dtype, self.out_dtype)

    def lowered(self) -> list[Any]:
        """Return the computation in TE: inputs, then the result."""
        if self.kind == "reduce":
            axes = range(len(self.shape) - self.reduced, len(self.shape))
            return reduction(self.op, self.shape, tuple(axes), keepdims=False, dtype=self.dtype)
        if self.kind == "softmax":
            return softmax(self.shape, len(self.shape) - 1, self.dtype, self.out_dtype)
        return (layer_norm if self.kind == "layer_norm" else rms_norm)(self.shape, self.eps, self.dtype)


def accum_dtype(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def _wide(operand: Any, dtype: str) -> Callable[..., Any]:
    return lambda *i: operand(*i).astype(dtype)


@dataclass(frozen=True)
class Scores:
    """What a softmax is of: X, or X * scale + M of a mask whose shape broadcasts."""

    scale: float = 1.0
    mask: Shape = ()
    """Empty without a mask."""

    def inputs(self, shape: Shape, dtype: str) -> list[Any]:
        masks = [te.placeholder(self.mask, dtype, "M")] if self.mask else []
        return [te.placeholder(shape, dtype, "X"), *masks]

    def reader(self, inputs: list[Any], accum: str) -> Callable[..., Any]:
        """Return a reader of the scores in the accumulators' dtype."""
        x, *masks = (_wide(read, accum) for read in inputs)

        def read(*i: Any) -> Any:
            score = x(*i) if self.scale == 1.0 else x(*i) * tirx.const(self.scale, accum)
            own = [0 if extent == 1 else place for extent, place in zip(self.mask, i[len(i) - len(self.mask) :], strict=True)]
            return score + masks[0](*own) if masks else score

        return read


def softmax(shape: Shape, axis: int, dtype: str, out_dtype: str, scores: Scores = Scores()) -> list[Any]:
    """Return exp(S - max) / sum(exp(S - max)) along an axis, S being the scores."""
    rows = shape[:axis] + shape[axis + 1 :]
    inputs = scores.inputs(shape, dtype)
    wide = scores.reader(inputs, accum_dtype(dtype))

    def along(combine: Any, read: Any) -> Any:
        k = te.reduce_axis((0, shape[axis]), "k")
        return lambda *row: combine(read(*row[:axis], k, *row[axis:]), axis=k)

    def row_of(i: tuple[Any, ...]) -> tuple[Any, ...]:
        return i[:axis] + i[axis + 1 :]

    highest = te.compute(rows, along(te.max, wide), name="highest")
    powers = te.compute(shape, lambda *i: te.exp(wide(*i) - highest(*row_of(i))), name="powers")
    total = te.compute(rows, along(te.sum, powers), name="total")
    # Relax marks the last block so, and a kernel is found there only if its blocks have the same marks.
    y = te.compute(shape, lambda *i: (powers(*i) / total(*row_of(i))).astype(out_dtype), name="Y", attrs={"axis": axis})
    return [*inputs, y]


def layer_norm(shape: Shape, eps: float, dtype: str) -> list[Any]:
    """Return (X - mean) / sqrt(variance + eps) * gamma + beta, over the last axis."""
    accum = accum_dtype(dtype)
    *rows, columns = shape
    inputs = [te.placeholder(shape, dtype, "X"), *(te.placeholder(shape[-1:], dtype, name) for name in ("gamma", "beta"))]
    x, gamma, beta = (_wide(read, accum) for read in inputs)
    count, added = tirx.const(columns, accum), tirx.const(eps, accum)

    def sum_over_columns(read: Any) -> Any:
        k = te.reduce_axis((0, columns), "k")
        return lambda *row: te.sum(read(*row, k), axis=k)

    def squared(*i: Any) -> Any:
        return (x(*i) - mean(*i[:-1])) * (x(*i) - mean(*i[:-1]))

    def normalised(*i: Any) -> Any:
        deviation = tirx.rsqrt(squares(*i[:-1]) / count + added)
        return ((x(*i) - mean(*i[:-1])) * deviation * gamma(i[-1]) + beta(i[-1])).astype(dtype)

    total = te.compute(rows, sum_over_columns(x), name="total")
    mean = te.compute(rows, lambda *row: total(*row) / count, name="mean")
    squares = te.compute(rows, sum_over_columns(squared), name="squares")
    return [*inputs, te.compute(shape, normalised, name="Y")]


def rms_norm(shape: Shape, eps: float, dtype: str) -> list[Any]:
    """Return X / sqrt(mean(X * X) + eps) * gamma, in the stages that Relax legalises rms_norm to, casts that change nothing included."""
    accum = accum_dtype(dtype)
    *rows, columns = shape
    inputs = [te.placeholder(shape, dtype, "X"), te.placeholder(shape[-1:], dtype, "gamma")]
    count, added = tirx.const(columns, accum), tirx.const(eps, accum)
    x, gamma = (te.compute(read.shape, _wide(read, accum), name=f"{read.op.name}_wide") for read in inputs)
    square = te.compute(shape, lambda *i: x(*i) * x(*i), name="square")

    def sum_of_squares(*row: Any) -> Any:
        k = te.reduce_axis((0, columns), "k")
        return te.sum(square(*row, k), axis=k)

    total = te.compute(rows, sum_of_squares, name="total")
    inverse_rms = te.compute(rows, lambda *row: tirx.rsqrt(total(*row) / count + added), name="factor")
    wide = te.compute(shape, lambda *i: inverse_rms(*i[:-1]) * x(*i) * gamma(i[-1]), name="wide")
    return [*inputs, te.compute(shape, _wide(wide, dtype), name="Y")]


def reduction(op: Op, shape: Shape, axes: Shape, *, keepdims: bool, dtype: str) -> list[Any]:
    """Return a reduction over some axes, in order; sums of narrow floating-point dtypes are accumulated in float32."""
    is_sum = op in {"sum", "mean"}
    accum = accum_dtype(dtype) if is_sum and dtype.startswith(("float", "bfloat")) else dtype
    if is_sum and dtype in {"int8", "uint8", "int16"}:
        accum = "int32"
    kept = [axis for axis in range(len(shape)) if keepdims or axis not in axes]
    out = [1 if axis in axes else shape[axis] for axis in kept]
    x = te.placeholder(shape, dtype, "X")
    combine = {"sum": te.sum, "mean": te.sum, "max": te.max, "min": te.min}[op]

    def element(*i: Any) -> Any:
        over = {axis: te.reduce_axis((0, shape[axis]), f"k{axis}") for axis in axes}
        place = dict(zip(kept, i, strict=True))
        index = (over.get(axis, place.get(axis)) for axis in range(len(shape)))
        return combine(x(*index).astype(accum), axis=list(over.values()))

    if not is_sum or (op == "sum" and accum == dtype):
        return [x, te.compute(out, element, name="Y")]
    total = te.compute(out, element, name="total")
    count = tirx.const(math.prod(shape[axis] for axis in axes), accum)
    return [x, te.compute(out, lambda *i: (total(*i) / count if op == "mean" else total(*i)).astype(dtype), name="Y")]


def read_rowwise(mod: tvm.IRModule) -> RowSpec | None:
    """Return the function of rows that a canonical module's `main` computes, None if it is none."""
    candidates = list(_candidates(mod["main"]))
    if not candidates:
        return None
    text = canonical_text(mod)
    return next((spec for spec in candidates if canonical_text(_module(spec)) == text), None)


def _module(spec: RowSpec) -> tvm.IRModule:
    return canonical_module(te.create_prim_func(spec.lowered(), index_dtype_override="int64"))


def _candidates(func: Any) -> Iterator[RowSpec]:
    """Yield the functions with these parameters and constants."""
    try:
        args = signature_of(func)
    except (TypeError, ValueError):
        return
    (shape, dtype), (out_shape, out_dtype) = args[0], args[-1]
    if len(args) == 2 and len(out_shape) < len(shape) and shape[: len(out_shape)] == out_shape and dtype == out_dtype:
        # Integers have no mean.
        ops = OPS if dtype.startswith(("float", "bfloat")) else tuple(op for op in OPS if op != "mean")
        yield from (RowSpec("reduce", shape, dtype, dtype, op=op, reduced=len(shape) - len(out_shape)) for op in ops)
    if not shape or shape != out_shape:
        return
    if len(args) == 2:
        yield RowSpec("softmax", shape, dtype, out_dtype)
    elif args[1:-1] == [(shape[-1:], dtype)] * (len(args) - 2) and dtype == out_dtype and len(args) in {3, 4}:
        for eps in epsilons(func):
            yield RowSpec("rms_norm" if len(args) == 3 else "layer_norm", shape, dtype, dtype, eps)


def epsilons(func: Any) -> list[float]:
    """Return the constants that something under a root has added."""
    found: list[float] = []

    def note(call: Any) -> None:
        if getattr(call.op, "name", "") == "tirx.rsqrt" and isinstance(call.args[0], tirx.Add):
            found.extend(float(term.value) for term in (call.args[0].a, call.args[0].b) if isinstance(term, tirx.FloatImm))

    tvm_ffi.structural_map(func.body, [(tvm.ir.Call, note)], order="pre")
    return list(dict.fromkeys(found))
