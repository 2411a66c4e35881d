"""Owns normalisation by the root mean square over the last axis, of a sum with a residual and with a quantised result where declared.

Knows nothing of how many passes over its input a schedule makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Gt

from kerneldecl.arrays import Array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Extent, FloatDtype, Rule, Signature

from .shared.norms import Quantized, norm_outputs, norm_problems, norm_tolerance, quantized, residual_sum


@dataclass(frozen=True, kw_only=True)
class RmsNorm(Rule):
    """Y = X / sqrt(mean(X * X) + eps) * gamma, over the last axis."""

    shape: tuple[Extent, ...]
    """Shape of X and Y; gamma has the last extent."""
    eps: Annotated[float, Gt(0)] = 1e-5
    """Added to the mean of squares."""
    residual: bool = False
    """True normalises H = X + R, rounded to dtype; H is the second output."""
    out_dtype: Quantized = ""
    """Dtype to which Y is quantised; the last output is its scale for each row, max(|Y|) / 448 for float8_e4m3fn, / 127 for int8."""
    dtype: FloatDtype = "float32"
    """Dtype of all other arguments; 16-bit ones are computed in float32."""

    def problems(self) -> Iterator[str]:
        yield from norm_problems(self.shape, self.dtype, self.out_dtype)

    def signature(self) -> Signature:
        names = ("X", "R") if self.residual else ("X",)
        inputs = (*(Arg(name, self.shape, self.dtype) for name in names), Arg("gamma", self.shape[-1:], self.dtype))
        return Signature(inputs, norm_outputs(self.shape, self.dtype, self.out_dtype, has_residual=self.residual))

    def lower(self) -> list[Any]:
        """Return the computation; a plain norm in the stages that Relax legalises rms_norm to."""
        from kerneldecl.compiler.fused_norm import FusedNormSpec
        from kerneldecl.compiler.rowwise import rms_norm

        if not self.residual and not self.out_dtype:
            return rms_norm(self.shape, self.eps, self.dtype)
        return FusedNormSpec("rms_norm", self.shape, self.dtype, self.eps, self.residual, self.out_dtype or self.dtype).lowered()

    def reference(self, *inputs: Array) -> Array | list[Array]:
        gamma = inputs[-1].astype(np.float64)
        added = [residual_sum(inputs[0], inputs[1], self.dtype)] if self.residual else []
        x = added[0] if added else inputs[0].astype(np.float64)
        y = np.asarray(x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + self.eps) * gamma)
        first, *scale = quantized(y, self.out_dtype) if self.out_dtype else (y,)
        return [first, *added, *scale] if added or scale else first

    def flops(self) -> int:
        """Return four operations for each element: square, plus, times 1 / rms, times gamma; one for a residual, two to quantise."""
        return (4 + self.residual + 2 * bool(self.out_dtype)) * math.prod(self.shape)

    def takes_special_values(self) -> bool:
        """Say whether results are defined for infinities and NaN; a quantised row with one of them has no scale."""
        return not self.out_dtype

    def tolerance(self) -> float:
        return norm_tolerance(self.dtype, self.out_dtype)
