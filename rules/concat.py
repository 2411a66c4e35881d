"""Owns the concatenation of arrays along an axis.

Knows nothing of how many elements a schedule takes at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kerneldecl.arrays import Array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Dtype, Extent, Rule, Signature

from .shared.axes import axes_problems, positions

MOST = 16
"""Arrays at most: an element is found by as many comparisons."""


@dataclass(frozen=True, kw_only=True)
class Concat(Rule):
    """Y = the inputs one after another along an axis."""

    shapes: tuple[tuple[Extent, ...], ...]
    """Shapes of the inputs, alike but for the axis."""
    axis: int = 0
    """The axis; a negative one counts from the last."""
    dtype: Dtype = "float32"
    """Dtype of all arguments."""

    @property
    def _axis(self) -> int:
        return positions([self.axis], len(self.shapes[0]))[0]

    def problems(self) -> Iterator[str]:
        if not 2 <= len(self.shapes) <= MOST:
            yield f"shapes has {len(self.shapes)} items; 2 to {MOST} arrays are concatenated"
            return
        wrong = list(axes_problems([self.axis], len(self.shapes[0])))
        yield from wrong
        others = {(*shape[: self._axis], 0, *shape[self._axis + 1 :]) for shape in self.shapes}
        if not wrong and len(others) > 1:
            yield f"shapes {', '.join(map(str, self.shapes))} differ in more than axis {self.axis}; write equal extents, or another axis"

    def signature(self) -> Signature:
        first, axis = self.shapes[0], self._axis
        out = (*first[:axis], sum(shape[axis] for shape in self.shapes), *first[axis + 1 :])
        inputs = tuple(Arg(f"X{at}", shape, self.dtype) for at, shape in enumerate(self.shapes))
        return Signature(inputs, (Arg("Y", out, self.dtype),))

    def lower(self) -> list[Any]:
        from tvm import te

        inputs, axis = [te.placeholder(arg.shape, arg.dtype, arg.name) for arg in self.signature().inputs], self._axis
        firsts = [0, *itertools.accumulate(shape[axis] for shape in self.shapes)]

        def element(*at: Any) -> Any:
            def read(number: int) -> Any:
                return inputs[number](*at[:axis], at[axis] - firsts[number], *at[axis + 1 :])

            value = read(len(inputs) - 1)
            for number in reversed(range(len(inputs) - 1)):
                value = te.if_then_else(at[axis] < firsts[number + 1], read(number), value)
            return value

        return [*inputs, te.compute(self.signature().outputs[0].shape, element, name="Y")]

    def reference(self, *inputs: Array) -> Array:
        return np.concatenate(inputs, axis=self._axis)

    def flops(self) -> int:
        return 0

    def tolerance(self) -> float:
        """Return 0: elements are copied."""
        return 0.0
