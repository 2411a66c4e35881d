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

    def _arg(self, name: str) -> Arg:
        order = (self.tokens, self.heads) if name in self.interleaved else (self.heads, self.tokens)
        return Arg(name.upper(), (self.batch, *order, self.size), self.dtype)

    def signature(self) -> Signature:
        tables = (Arg(name, (self.tokens, self.size), self.dtype) for name in ("COS", "SIN"))
        return Signature((self._arg("x"), *tables), (self._arg("y"),))

    def lower(self) -> list[Any]:
        from kerneldecl.compiler.rotary import RotarySpec, rotary

        return rotary(RotarySpec(self.batch, self.tokens, self.heads, self.size, self.interleaved, self.pairs, self.dtype))

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
