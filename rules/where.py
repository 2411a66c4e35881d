"""Owns the choice between two arrays by a mask, element by element.

Knows nothing of how many elements a schedule takes at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Dtype, Extent, Rule, Signature

from .shared.axes import broadcast_index, broadcast_problems


@dataclass(frozen=True, kw_only=True)
class Where(Rule):
    """O = X where the mask is not zero, Y elsewhere; all three broadcast as NumPy's arrays do."""

    shapes: tuple[tuple[Extent, ...], ...]
    """Shapes of the mask, X and Y."""
    mask_dtype: Literal["uint8", "int8", "int32", "int64"] = "uint8"
    """Dtype of the mask; uint8 takes the memory of a torch or NumPy bool."""
    dtype: Dtype = "float32"
    """Dtype of X, Y and O."""

    def problems(self) -> Iterator[str]:
        if len(self.shapes) != 3:
            yield f"shapes has {len(self.shapes)} items; expected 3, of the mask, X and Y"
        else:
            yield from broadcast_problems(self.shapes)

    def signature(self) -> Signature:
        mask, x, y = self.shapes
        inputs = Arg("mask", mask, self.mask_dtype), Arg("X", x, self.dtype), Arg("Y", y, self.dtype)
        return Signature(inputs, (Arg("O", tuple(map(int, np.broadcast_shapes(*self.shapes))), self.dtype),))

    def lower(self) -> list[Any]:
        from tvm import te, tirx

        mask, x, y = inputs = [te.placeholder(arg.shape, arg.dtype, arg.name) for arg in self.signature().inputs]

        def element(*at: Any) -> Any:
            chosen, one, other = (read(*broadcast_index(shape, at)) for read, shape in zip((mask, x, y), self.shapes, strict=True))
            return tirx.Select(chosen != tirx.const(0, self.mask_dtype), one, other)

        return [*inputs, te.compute(self.signature().outputs[0].shape, element, name="O")]

    def reference(self, *inputs: Array) -> Array:
        mask, x, y = inputs
        return np.where(mask != 0, x, y)

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return a mask of zeros and other values, about as many."""
        mask, x, y = super().inputs(rng)
        return [(mask * rng.integers(0, 2, mask.shape)).astype(mask.dtype), x, y]

    def flops(self) -> int:
        return math.prod(self.signature().outputs[0].shape)

    def tolerance(self) -> float:
        """Return 0: elements are copied."""
        return 0.0
