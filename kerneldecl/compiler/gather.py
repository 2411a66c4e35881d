"""Owns slices looked up by indices as a computation: its canonical TensorIR, and the recognition of a function that is one.

Knows nothing of schedules, targets, or who declares it. A function is recognised as `compiler.attention` does it: by its canonical
text. So what is written here and what is recognised cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import te

from kerneldecl.analysis.gather import GatherSizes
from kerneldecl.compiler.canonical import canonical_module, canonical_text, signature_of


@dataclass(frozen=True)
class GatherSpec:
    """Y = the slices of X along an axis that indices name; Y has the indices' axes in the place of the axis."""

    shape: tuple[int, ...]
    """Of X."""
    axis: int
    indices: tuple[int, ...]
    """Shape of the indices."""
    dtype: str
    index_dtype: str

    @property
    def sizes(self) -> GatherSizes:
        """Return what policies see of the lookup."""
        outer, inner = math.prod(self.shape[: self.axis]), math.prod(self.shape[self.axis + 1 :])
        return GatherSizes(outer, self.shape[self.axis], math.prod(self.indices), inner, self.dtype, self.index_dtype)

    @property
    def arguments(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Return name, shape and dtype of each argument; the last one is the result."""
        out = (*self.shape[: self.axis], *self.indices, *self.shape[self.axis + 1 :])
        return ("X", self.shape, self.dtype), ("indices", self.indices, self.index_dtype), ("Y", out, self.dtype)


def gather(spec: GatherSpec) -> list[Any]:
    """Return the computation in TE."""
    (x, indices), (_, out, _) = (te.placeholder(shape, dtype, name) for name, shape, dtype in spec.arguments[:2]), spec.arguments[2]
    axis, behind = spec.axis, spec.axis + len(spec.indices)
    return [x, indices, te.compute(out, lambda *at: x(*at[:axis], indices(*at[axis:behind]), *at[behind:]), name="Y")]


def read_gather(mod: tvm.IRModule) -> GatherSpec | None:
    """Return the lookup that a canonical module's `main` computes, None if it computes something else."""
    text = canonical_text(mod)

    def is_it(spec: GatherSpec) -> bool:
        func = te.create_prim_func(gather(spec), index_dtype_override="int64")
        return canonical_text(canonical_module(func)) == text

    return next(filter(is_it, _candidates(mod["main"])), None)


def _candidates(func: Any) -> Iterator[GatherSpec]:
    """Yield the lookups that a function with these parameters may compute."""
    try:
        args = signature_of(func)
    except (TypeError, ValueError):
        return
    if len(args) != 3 or not args[1][0]:
        return
    (shape, dtype), (indices, index_dtype), _ = args
    for axis in range(len(shape)):
        spec = GatherSpec(shape, axis, indices, dtype, index_dtype)
        if [(each, kind) for _, each, kind in spec.arguments] == args:
            yield spec
