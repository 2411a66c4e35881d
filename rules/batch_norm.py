"""Owns batch normalisation with statistics that are given, as in inference.

Knows nothing of how many elements a schedule takes at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Gt

from kerneldecl.arrays import Array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Extent, FloatDtype, Rule, Signature

from .shared.axes import axes_problems, positions


@dataclass(frozen=True, kw_only=True)
class BatchNorm(Rule):
    """Y = (X - mean) / sqrt(variance + eps) * gamma + beta, with one mean, variance, gamma and beta for each channel."""

    shape: tuple[Extent, ...]
    """Shape of X and Y."""
    axis: int = 1
    """The axis of the channels; a negative one counts from the last."""
    eps: Annotated[float, Gt(0)] = 1e-5
    """Added to the variance."""
    activation: Literal["", "relu"] = ""
    """What follows."""
    dtype: FloatDtype = "float32"
    """Dtype of all arguments; 16-bit ones are computed in float32."""

    def problems(self) -> Iterator[str]:
        if not self.shape:
            yield "shape has no extent; write shape = [16, 64], or other extents"
        else:
            yield from axes_problems([self.axis], len(self.shape))

    @property
    def _axis(self) -> int:
        return positions([self.axis], len(self.shape))[0]

    def signature(self) -> Signature:
        channels = (self.shape[self._axis],)
        inputs = tuple(Arg(name, channels, self.dtype) for name in ("mean", "variance", "gamma", "beta"))
        return Signature((Arg("X", self.shape, self.dtype), *inputs), (Arg("Y", self.shape, self.dtype),))

    def lower(self) -> list[Any]:
        from tvm import te, tirx

        inputs = [te.placeholder(arg.shape, arg.dtype, arg.name) for arg in self.signature().inputs]
        wide = "float64" if self.dtype == "float64" else "float32"

        def element(*at: Any) -> Any:
            x, mean, variance, gamma, beta = (read(*(at if read is inputs[0] else (at[self._axis],))).astype(wide) for read in inputs)
            y = (x - mean) * (gamma * te.rsqrt(variance + tirx.const(self.eps, wide))) + beta
            return (te.max(y, tirx.const(0, wide)) if self.activation else y).astype(self.dtype)

        return [*inputs, te.compute(self.shape, element, name="Y")]

    def reference(self, *inputs: Array) -> Array:
        x, *channels = (array.astype(np.float64) for array in inputs)
        apart = [-1 if axis == self._axis else 1 for axis in range(len(self.shape))]
        mean, variance, gamma, beta = (each.reshape(apart) for each in channels)
        y = (x - mean) / np.sqrt(variance + self.eps) * gamma + beta
        return np.asarray(np.maximum(y, 0) if self.activation else y)

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return standard normal values; variances are positive."""
        x, mean, variance, gamma, beta = super().inputs(rng)
        return [x, mean, (np.abs(variance.astype(np.float64)) + 0.1).astype(variance.dtype), gamma, beta]

    def takes_special_values(self) -> bool:
        """Say that a negative variance or one that is no number has no defined result."""
        return False

    def flops(self) -> int:
        """Return four operations for each element: minus, times, plus, and the factor."""
        return 4 * math.prod(self.shape)
