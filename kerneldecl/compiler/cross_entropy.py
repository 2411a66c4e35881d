"""Owns the cross entropy of rows as a computation: its canonical TensorIR, and how a function is recognised as one.

Knows nothing of schedules, targets, or who declares it. As in `compiler.rowwise`, a function is recognised by its canonical text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import te, tirx

from kerneldecl.analysis.cross_entropy import LossSizes
from kerneldecl.compiler.canonical import canonical_module, canonical_text, signature_of
from kerneldecl.compiler.rowwise import accum_dtype


@dataclass(frozen=True)
class CrossEntropySpec:
    """Y[i] = log(sum(exp(X[i]))) - X[i, T[i]], 0 where T[i] is `ignore_index`."""

    rows: int
    classes: int
    dtype: str
    index_dtype: str
    out_dtype: str
    ignore_index: int

    @property
    def sizes(self) -> LossSizes:
        """Return what policies see of it."""
        return LossSizes(self.rows, self.classes, self.dtype)

    def lowered(self) -> list[Any]:
        """Return the computation in TE: logits, classes and losses."""
        accum = accum_dtype(self.dtype)
        x = te.placeholder((self.rows, self.classes), self.dtype, "X")
        target = te.placeholder((self.rows,), self.index_dtype, "T")

        def along(combine: Any, read: Any) -> Any:
            k = te.reduce_axis((0, self.classes), "k")
            return lambda i: combine(read(i, k), axis=k)

        highest = te.compute((self.rows,), along(te.max, lambda i, k: x(i, k).astype(accum)), name="highest")
        total = te.compute((self.rows,), along(te.sum, lambda i, k: te.exp(x(i, k).astype(accum) - highest(i))), name="total")

        def loss(i: Any) -> Any:
            own = x(i, te.max(target(i), tirx.const(0, self.index_dtype))).astype(accum)
            ignored = target(i) == tirx.const(self.ignore_index, self.index_dtype)
            found = te.log(total(i)) + (highest(i) - own)
            return tirx.Select(ignored, tirx.const(0, accum), found).astype(self.out_dtype)

        return [x, target, te.compute((self.rows,), loss, name="Y")]


def read_cross_entropy(mod: tvm.IRModule) -> CrossEntropySpec | None:
    """Return the cross entropy that a canonical module's `main` computes, None if it is none."""
    candidates = list(_candidates(mod["main"]))
    if not candidates:
        return None
    text = canonical_text(mod)
    return next((spec for spec in candidates if canonical_text(_module(spec)) == text), None)


def _module(spec: CrossEntropySpec) -> tvm.IRModule:
    return canonical_module(te.create_prim_func(spec.lowered(), index_dtype_override="int64"))


def _candidates(func: Any) -> Iterator[CrossEntropySpec]:
    """Yield the cross entropies with these parameters and constants."""
    try:
        args = signature_of(func)
    except (TypeError, ValueError):
        return
    shapes, dtypes = [shape for shape, _ in args], [dtype for _, dtype in args]
    if len(args) != 3 or len(shapes[0]) != 2 or shapes[1] != shapes[0][:1] or shapes[2] != shapes[0][:1]:
        return
    (rows, classes), (dtype, index_dtype, out_dtype) = shapes[0], dtypes
    for ignored in _compared_with(func):
        yield CrossEntropySpec(rows, classes, dtype, index_dtype, out_dtype, ignored)


def _compared_with(func: Any) -> list[int]:
    """Return the whole numbers that something is compared with."""
    found: list[int] = []

    def note(equal: Any) -> None:
        found.extend(int(side.value) for side in (equal.a, equal.b) if isinstance(side, tirx.IntImm))

    tvm_ffi.structural_map(func.body, [(tirx.EQ, note)], order="pre")
    return list(dict.fromkeys(found))
