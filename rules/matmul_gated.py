"""Owns gated GEMMs, the first layers of SwiGLU and GeGLU: two products of one operand, of which one gates the other.

Knows nothing of tiles, targets or how it is scheduled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array, random_array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Extent, FloatDtype, Rule, Signature

from .shared.pointwise import OPERATIONS
from .shared.precision import accum_dtype, accum_tolerance


@dataclass(frozen=True, kw_only=True)
class MatmulGated(Rule):
    """C = gate(A @ B[:n].T) * (A @ B[n:].T), in one kernel."""

    m: Extent
    """Rows of A and C."""
    n: Extent
    """Columns of C, and half of the rows of B."""
    k: Extent
    """Columns of A and B: extent of the reduction."""
    gate: Literal["silu", "gelu", "gelu_tanh", "relu", "sigmoid"] = "silu"
    """What is made of the first product: silu for SwiGLU, gelu for GeGLU."""
    dtype: FloatDtype = "float32"
    """Dtype of A, [m, k], and B, [2 n, k]: the gate's weights, then the others, each as a linear layer of torch stores them."""
    out_dtype: FloatDtype | Literal[""] = ""
    """Dtype of C; by default dtype."""

    @property
    def _out_dtype(self) -> str:
        return self.out_dtype or self.dtype

    def signature(self) -> Signature:
        inputs = Arg("A", (self.m, self.k), self.dtype), Arg("B", (2 * self.n, self.k), self.dtype)
        return Signature(inputs, (Arg("C", (self.m, self.n), self._out_dtype),))

    def lower(self) -> list[Any]:
        from kerneldecl.compiler.gated_gemm import GatedGemmSpec

        accum = accum_dtype(self.dtype)
        return GatedGemmSpec(self.gate, self.m, self.n, self.k, self.dtype, accum, self._out_dtype).lowered()

    def reference(self, *inputs: Array) -> Array:
        wide = np.float64 if self.dtype in {"float32", "float64"} else np.float32
        a, b = (array.astype(wide) for array in inputs)
        first, second = np.split(a @ b.T, 2, axis=1)
        return np.asarray(OPERATIONS[self.gate].reference(first) * second)

    def flops(self) -> int:
        return self.m * self.n * (4 * self.k + OPERATIONS[self.gate].flops + 1)

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return operands whose products have unit variance."""
        a, b = self.signature().inputs
        return [random_array(rng, a), random_array(rng, b, 1 / math.sqrt(self.k))]

    def tolerance(self) -> float:
        return accum_tolerance(self._out_dtype, accum_dtype(self.dtype), self.k, self.dtype)
