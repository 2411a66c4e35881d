"""Owns rotary position embedding.

Knows nothing of how the tables of cosines and sines come about.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array, numpy_dtype, random_array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Extent, FloatDtype, Rule, Signature

from .shared.precision import accum_dtype


@dataclass(frozen=True, kw_only=True)
class Rotary(Rule):
    """Y = X * COS + R * SIN for each token of each head, where R is X with halves (or neighbours) exchanged and the first ones negated."""

    tokens: Extent
    """Tokens: rows of the tables."""
    heads: Extent
    """Heads, which share the tables."""
    size: Extent
    """Elements of a head, an even number: columns of the tables."""
    batch: Extent = 1
    """Sequences, which share the tables."""
    interleaved: Literal["", "x", "y", "xy"] = ""
    """Which of X and Y is stored as [batch, tokens, heads, size], as a projection writes it, rather than [batch, heads, tokens, size]."""
    pairs: bool = False
    """True turns neighbours, elements 2 i and 2 i + 1, as GPT-J and GLM do; False turns halves, i and i + size / 2, as Llama does."""
    dtype: FloatDtype = "float32"
    """Dtype of all arguments; 16-bit ones are computed in float32."""

    def problems(self) -> Iterator[str]:
        if self.size % 2:
            yield f"size {self.size} has no halves; write an even one"

    def _stored(self, name: str, heads: Any, tokens: Any) -> tuple[Any, Any]:
        return (tokens, heads) if name in self.interleaved else (heads, tokens)

    def _arg(self, name: str) -> Arg:
        return Arg(name.upper(), (self.batch, *self._stored(name, self.heads, self.tokens), self.size), self.dtype)

    def signature(self) -> Signature:
        tables = (Arg(name, (self.tokens, self.size), self.dtype) for name in ("COS", "SIN"))
        return Signature((self._arg("x"), *tables), (self._arg("y"),))

    def lower(self) -> list[Any]:
        from tvm import te

        accum, half = accum_dtype(self.dtype), self.size // 2
        x, cos, sin = inputs = [te.placeholder(arg.shape, arg.dtype, arg.name) for arg in self.signature().inputs]

        def element(b: Any, first: Any, second: Any, i: Any) -> Any:
            h, t = self._stored("y", first, second)

            def read(place: Any) -> Any:
                return x(b, *self._stored("x", h, t), place).astype(accum)

            if self.pairs:
                turned = te.if_then_else(i % 2 == 0, -read(i + 1), read(i - 1))
            else:
                turned = te.if_then_else(i < half, -read(i + half), read(i - half))
            return (read(i) * cos(t, i).astype(accum) + turned * sin(t, i).astype(accum)).astype(self.dtype)

        return [*inputs, te.compute(self._arg("y").shape, element, name="Y")]

    def reference(self, *inputs: Array) -> Array:
        x, cos, sin = (array.astype(np.float64) for array in inputs)
        by_heads = x.swapaxes(1, 2) if "x" in self.interleaved else x
        low, high = (by_heads[..., ::2], by_heads[..., 1::2]) if self.pairs else np.split(by_heads, 2, axis=-1)
        turned = np.stack([-high, low], axis=-1).reshape(by_heads.shape) if self.pairs else np.concatenate([-high, low], axis=-1)
        y = by_heads * cos + turned * sin
        return np.asarray(y.swapaxes(1, 2) if "y" in self.interleaved else y)

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return standard normal X, and cosines and sines of random angles."""
        x, cos, _ = self.signature().inputs
        angles = rng.uniform(0, 2 * math.pi, cos.shape)
        return [random_array(rng, x), *(table(angles).astype(numpy_dtype(cos.dtype)) for table in (np.cos, np.sin))]

    def flops(self) -> int:
        return 3 * math.prod(self.signature().outputs[0].shape)
