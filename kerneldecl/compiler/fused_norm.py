"""Owns norms of rows that add a residual before or quantise after: their canonical TensorIR, and how a function is recognised as one.

Knows nothing of schedules, targets, or who declares them. As in `compiler.rowwise`, a function is recognised by its canonical text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import te, tirx

from kerneldecl.analysis.fused_norm import LEAST_LARGEST, LIMITS, NormKind, NormSizes
from kerneldecl.compiler.canonical import canonical_module, canonical_text, signature_of
from kerneldecl.compiler.rowwise import Shape, accum_dtype, epsilons


@dataclass(frozen=True)
class FusedNormSpec:
    """Y = norm(X), or Y = norm(H) with H = X + R as a further output; of a quantised Y, the scale of each row is the last output."""

    kind: NormKind
    shape: Shape
    dtype: str
    eps: float
    has_residual: bool
    out_dtype: str

    @property
    def sizes(self) -> NormSizes:
        """Return what policies see of it."""
        return NormSizes(self.kind, math.prod(self.shape[:-1]), self.shape[-1], self.dtype, self.out_dtype, self.has_residual)

    def lowered(self) -> list[Any]:
        """Return the computation in TE: inputs, then results."""
        names = ["X", *(["R"] if self.has_residual else []), "gamma", *(["beta"] if self.kind == "layer_norm" else [])]
        shapes = {"X": self.shape, "R": self.shape}
        read = {name: te.placeholder(shapes.get(name, self.shape[-1:]), self.dtype, name) for name in names}
        accum, added = accum_dtype(self.dtype), []
        x = read["X"]
        if self.has_residual:
            x = te.compute(self.shape, lambda *i: (_wide(read["X"], accum)(*i) + _wide(read["R"], accum)(*i)).astype(self.dtype), name="H")
            added = [x]
        weights = [_wide(read[name], accum) for name in names if name in {"gamma", "beta"}]
        value = (_layer_norm if self.kind == "layer_norm" else _rms_norm)(self, _wide(x, accum), weights)
        if self.out_dtype not in LIMITS:
            return [*read.values(), te.compute(self.shape, lambda *i: value(*i).astype(self.out_dtype), name="Y"), *added]
        y, scale = _quantized(te.compute(self.shape, value, name="wide"), self.out_dtype)
        return [*read.values(), y, *added, scale]


def _wide(operand: Any, dtype: str) -> Any:
    return lambda *i: operand(*i).astype(dtype)


def _along(columns: int, combine: Any, read: Any) -> Any:
    k = te.reduce_axis((0, columns), "k")
    return lambda *row: combine(read(*row, k), axis=k)


def _rms_norm(spec: FusedNormSpec, x: Any, weights: list[Any]) -> Any:
    *rows, columns = spec.shape
    accum, (gamma,) = accum_dtype(spec.dtype), weights
    total = te.compute(rows, _along(columns, te.sum, lambda *i: x(*i) * x(*i)), name="total")
    count, added = tirx.const(columns, accum), tirx.const(spec.eps, accum)
    factor = te.compute(rows, lambda *row: tirx.rsqrt(total(*row) / count + added), name="inverse_rms")
    return lambda *i: x(*i) * factor(*i[:-1]) * gamma(i[-1])


def _layer_norm(spec: FusedNormSpec, x: Any, weights: list[Any]) -> Any:
    *rows, columns = spec.shape
    accum, (gamma, beta) = accum_dtype(spec.dtype), weights
    count = tirx.const(columns, accum)
    total = te.compute(rows, _along(columns, te.sum, x), name="total")
    mean = te.compute(rows, lambda *row: total(*row) / count, name="mean")

    def squared(*i: Any) -> Any:
        return (x(*i) - mean(*i[:-1])) * (x(*i) - mean(*i[:-1]))

    squares = te.compute(rows, _along(columns, te.sum, squared), name="squares")
    factor = te.compute(rows, lambda *row: tirx.rsqrt(squares(*row) / count + tirx.const(spec.eps, accum)), name="inverse_deviation")
    return lambda *i: (x(*i) - mean(*i[:-1])) * factor(*i[:-1]) * gamma(i[-1]) + beta(i[-1])


def _quantized(wide: Any, dtype: str) -> list[Any]:
    """Return rows divided by what brings their largest element to the largest number of the dtype, and these scales."""
    *rows, columns = (int(extent) for extent in wide.shape)
    limit, least = tirx.const(LIMITS[dtype], "float32"), tirx.const(LEAST_LARGEST, "float32")
    largest = te.compute(rows, _along(columns, te.max, lambda *i: te.abs(wide(*i))), name="largest")
    factor = te.compute(rows, lambda *row: limit / te.max(largest(*row), least), name="factor")
    scale = te.compute(rows, lambda *row: te.max(largest(*row), least) / limit, name="scale")

    def element(*i: Any) -> Any:
        value = wide(*i) * factor(*i[:-1])
        return (tirx.nearbyint(value) if dtype == "int8" else value).astype(dtype)

    return [te.compute(wide.shape, element, name="Y"), scale]


def read_fused_norm(mod: tvm.IRModule) -> FusedNormSpec | None:
    """Return the norm that a canonical module's `main` computes, None if it is none of these."""
    candidates = list(_candidates(mod["main"]))
    if not candidates:
        return None
    text = canonical_text(mod)
    return next((spec for spec in candidates if canonical_text(_module(spec)) == text), None)


def _module(spec: FusedNormSpec) -> tvm.IRModule:
    return canonical_module(te.create_prim_func(spec.lowered(), index_dtype_override="int64"))


def _candidates(func: Any) -> Iterator[FusedNormSpec]:
    """Yield the norms with these parameters and constants."""
    try:
        args = signature_of(func)
    except (TypeError, ValueError):
        return
    shape, dtype = args[0]
    for kind, weights in (("rms_norm", 1), ("layer_norm", 2)):
        for has_residual in (False, True):
            inputs = 1 + has_residual + weights
            results = args[inputs:]
            if not results or results[0][0] != shape or args[inputs - 1] != (shape[-1:], dtype):
                continue
            is_quantized = results[0][1] in LIMITS
            if len(results) == 1 + has_residual + is_quantized and (has_residual or is_quantized):
                yield from (FusedNormSpec(kind, shape, dtype, eps, has_residual, results[0][1]) for eps in epsilons(func))  # type: ignore[arg-type]
