"""Owns margins around an array: a constant, the edge repeated, or the array reflected.

Knows nothing of how many elements a schedule takes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array, numpy_dtype
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Dtype, Extent, Rule, Signature, Size

from .shared.precision import is_integer


@dataclass(frozen=True, kw_only=True)
class Pad(Rule):
    """Y = X with margins: before each axis and after it."""

    shape: tuple[Extent, ...]
    """Shape of X."""
    pads: tuple[Size, ...]
    """Elements added before each axis, then after each axis, as in ONNX: [top, left, bottom, right] of two axes."""
    mode: Literal["constant", "edge", "reflect"] = "constant"
    """What the margins hold: `value`, the nearest element, or the array reflected at its first and last elements."""
    value: float = 0.0
    """The constant; a whole number where the dtype is an integer's."""
    dtype: Dtype = "float32"
    """Dtype of X and Y."""

    @property
    def _before(self) -> tuple[int, ...]:
        return self.pads[: len(self.shape)]

    @property
    def _after(self) -> tuple[int, ...]:
        return self.pads[len(self.shape) :]

    def problems(self) -> Iterator[str]:
        if not self.shape:
            yield "shape has no extent; write shape = [16, 64], or other extents"
        elif len(self.pads) != 2 * len(self.shape):
            yield f"pads has {len(self.pads)} items; expected {2 * len(self.shape)}, one before and one after each axis"
        elif self.mode == "reflect":
            for axis, (extent, *around) in enumerate(zip(self.shape, self._before, self._after, strict=True)):
                if max(around) >= extent:
                    yield f"pads reflect {max(around)} elements of axis {axis}, which has {extent}; write {extent - 1} or fewer"
        if self.value:
            yield from self._problems_of_value()

    def _problems_of_value(self) -> Iterator[str]:
        if is_integer(self.dtype) and not float(self.value).is_integer():
            yield f"value {self.value} is no whole number, which dtype {self.dtype} needs; write one"
        if not self._fits():
            yield f"value {self.value} is too large for dtype {self.dtype}; write a smaller one"
        if self.mode != "constant":
            yield f"value {self.value} is given beside mode {self.mode}, which has none; leave it out"

    def _fits(self) -> bool:
        """Say whether the dtype has numbers of the constant's size."""
        if not is_integer(self.dtype):
            with np.errstate(over="ignore"):
                return bool(np.isfinite(np.float64(self.value).astype(numpy_dtype(self.dtype))))
        limits = np.iinfo(numpy_dtype(self.dtype))
        return bool(limits.min <= self.value <= limits.max)

    def signature(self) -> Signature:
        sides = zip(self.shape, self._before, self._after, strict=True)
        return Signature((Arg("X", self.shape, self.dtype),), (Arg("Y", tuple(map(sum, sides)), self.dtype),))

    def lower(self) -> list[Any]:
        from tvm import te, tirx

        x = te.placeholder(self.shape, self.dtype, "X")

        def element(*at: Any) -> Any:
            inner = [place - before for place, before in zip(at, self._before, strict=True)]
            if self.mode == "constant":
                sides = zip(inner, self.shape, self._before, self._after, strict=True)
                bounds = [[place >= 0] * (before > 0) + [place < extent] * (after > 0) for place, extent, before, after in sides]
                inside = [bound for each in bounds for bound in each]
                value = tirx.const(int(self.value) if is_integer(self.dtype) else self.value, self.dtype)
                return te.if_then_else(tirx.all(*inside), x(*inner), value) if inside else x(*inner)
            return x(*(self._source(place, extent) for place, extent in zip(inner, self.shape, strict=True)))

        return [x, te.compute(self.signature().outputs[0].shape, element, name="Y")]

    def _source(self, place: Any, extent: int) -> Any:
        """Return which element of an axis a margin repeats."""
        from tvm import tirx

        if self.mode == "edge":
            return tirx.max(tirx.min(place, extent - 1), 0)
        first = tirx.max(place, -place)
        return tirx.min(first, 2 * (extent - 1) - first)

    def reference(self, *inputs: Array) -> Array:
        around = tuple(zip(self._before, self._after, strict=True))
        if self.mode != "constant":
            return np.pad(inputs[0], around, self.mode)
        return np.pad(inputs[0], around, constant_values=np.asarray(self.value).astype(numpy_dtype(self.dtype)))

    def flops(self) -> int:
        return 0

    def tolerance(self) -> float:
        """Return 0: elements are copied."""
        return 0.0
