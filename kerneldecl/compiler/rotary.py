"""Owns rotary position embedding as a computation: its canonical TensorIR, and the recognition of a function that is one.

Knows nothing of schedules, targets, or who declares it. A function is recognised as `compiler.attention` does it: by its canonical
text. So what is written here and what is recognised cannot differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import tvm
from tvm import te

from kerneldecl.analysis.rotary import RotarySizes
from kerneldecl.compiler.canonical import canonical_module, canonical_text, signature_of

_ORDERS = ("", "x", "y", "xy")


class RotarySpec(NamedTuple):
    """Y = X * COS + R * SIN for each token of each head, where R is X with halves (or neighbours) exchanged and the first ones negated."""

    batch: int
    tokens: int
    heads: int
    size: int
    interleaved: str
    """Which of X and Y is stored as [batch, tokens, heads, size] rather than [batch, heads, tokens, size]."""
    pairs: bool
    """Whether neighbours are exchanged rather than halves."""
    dtype: str

    @property
    def accum(self) -> str:
        return "float32" if self.dtype in {"float16", "bfloat16"} else self.dtype

    @property
    def sizes(self) -> RotarySizes:
        return RotarySizes(self.tokens, self.batch * self.heads, self.size, self.dtype)

    @property
    def arguments(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Return name, shape and dtype of each argument; the last one is the result."""
        table = (self.tokens, self.size)
        return (
            ("X", self._shape("x"), self.dtype),
            ("COS", table, self.dtype),
            ("SIN", table, self.dtype),
            ("Y", self._shape("y"), self.dtype),
        )

    def stored(self, name: str, heads: Any, tokens: Any) -> tuple[Any, Any]:
        """Return heads and tokens in the order in which X or Y has them, or the other way round."""
        return (tokens, heads) if name in self.interleaved else (heads, tokens)

    def _shape(self, name: str) -> tuple[int, ...]:
        return (self.batch, *self.stored(name, self.heads, self.tokens), self.size)


def rotary(spec: RotarySpec) -> list[Any]:
    """Return the computation in TE."""
    inputs = [te.placeholder(shape, dtype, name) for name, shape, dtype in spec.arguments[:-1]]
    x, cos, sin = inputs
    accum, half = spec.accum, spec.size // 2

    def element(b: Any, first: Any, second: Any, i: Any) -> Any:
        h, t = spec.stored("y", first, second)

        def read(place: Any) -> Any:
            return x(b, *spec.stored("x", h, t), place).astype(accum)

        if spec.pairs:
            turned = te.if_then_else(i % 2 == 0, -read(i + 1), read(i - 1))
        else:
            turned = te.if_then_else(i < half, -read(i + half), read(i - half))
        return (read(i) * cos(t, i).astype(accum) + turned * sin(t, i).astype(accum)).astype(spec.dtype)

    return [*inputs, te.compute(spec.arguments[-1][1], element, name="Y")]


def read_rotary(mod: tvm.IRModule) -> RotarySpec | None:
    """Return the rotary embedding that a canonical module's `main` computes, None if it computes something else."""
    text = canonical_text(mod)

    def is_it(spec: RotarySpec) -> bool:
        func = te.create_prim_func(rotary(spec), index_dtype_override="int64")
        return canonical_text(canonical_module(func)) == text

    return next(filter(is_it, _candidates(mod["main"])), None)


def _candidates(func: Any) -> Iterator[RotarySpec]:
    """Yield what a function with these parameters may compute."""
    try:
        args = signature_of(func)
    except (TypeError, ValueError):
        return
    if [len(shape) for shape, _ in args] != [4, 2, 2, 4]:
        return
    (x, dtype), ((tokens, size), _), *_ = args
    for interleaved, pairs in itertools.product(_ORDERS, (False, True)):
        heads = x[2] if "x" in interleaved else x[1]
        spec = RotarySpec(x[0], tokens, heads, size, interleaved, pairs, dtype)
        if [(shape, dtype) for _, shape, dtype in spec.arguments] == args:
            yield spec
