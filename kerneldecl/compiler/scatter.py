"""Owns rows added at indices as a computation: its canonical TensorIR, and the recognition of a function that is one.

Knows nothing of schedules, targets, or who declares it. A function is recognised as `compiler.attention` does it: by its canonical
text. So what is written here and what is recognised cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import te, tirx

from kerneldecl.analysis.scatter import ScatterSizes
from kerneldecl.compiler.canonical import canonical_module, canonical_text, signature_of


@dataclass(frozen=True)
class ScatterSpec:
    """Y[r] = base[r] + the sum of updates[i] over all i with indices[i] == r, in the order of i."""

    sizes: ScatterSizes

    @property
    def accum(self) -> str:
        return "float32" if self.sizes.dtype in {"float16", "bfloat16"} else self.sizes.dtype

    @property
    def arguments(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Return name, shape and dtype of each argument; the last one is the result."""
        sizes = self.sizes
        out, dtype = (sizes.rows, sizes.columns), sizes.dtype
        indices = ("indices", (sizes.updates,), sizes.index_dtype)
        base = (("base", out, dtype),) if sizes.has_base else ()
        return indices, ("updates", (sizes.updates, sizes.columns), dtype), *base, ("Y", out, dtype)


def scatter_add(spec: ScatterSpec) -> list[Any]:
    """Return the computation in TE: each row of the result looks through all indices."""
    inputs = [te.placeholder(shape, dtype, name) for name, shape, dtype in spec.arguments[:-1]]
    indices, updates, *base = inputs
    sizes, accum = spec.sizes, spec.accum
    i, shape = te.reduce_axis((0, sizes.updates), "i"), (sizes.rows, sizes.columns)

    def total(row: Any, column: Any) -> Any:
        is_here = indices(i) == row.astype(sizes.index_dtype)
        return te.sum(tirx.Select(is_here, updates(i, column).astype(accum), tirx.const(0, accum)), axis=i)

    sums = te.compute(shape, total, name="sums")

    def result(*at: Any) -> Any:
        value = base[0](*at).astype(accum) + sums(*at) if base else sums(*at)
        return value.astype(sizes.dtype)

    return [*inputs, te.compute(shape, result, name="Y")]


def read_scatter(mod: tvm.IRModule) -> ScatterSpec | None:
    """Return the rows added at indices that a canonical module's `main` computes, None if it computes something else."""
    text = canonical_text(mod)

    def is_it(spec: ScatterSpec) -> bool:
        func = te.create_prim_func(scatter_add(spec), index_dtype_override="int64")
        return canonical_text(canonical_module(func)) == text

    return next(filter(is_it, _candidates(mod["main"])), None)


def _candidates(func: Any) -> Iterator[ScatterSpec]:
    """Yield what a function with these parameters may compute."""
    try:
        args = signature_of(func)
    except (TypeError, ValueError):
        return
    if len(args) not in {3, 4} or [len(shape) for shape, _ in args[:2]] != [1, 2] or len(args[-1][0]) != 2:
        return
    ((updates,), index_dtype), _, *_, ((rows, columns), dtype) = args
    spec = ScatterSpec(ScatterSizes(rows, columns, updates, dtype, index_dtype, len(args) == 4))
    if [(shape, dtype) for _, shape, dtype in spec.arguments] == args:
        yield spec
