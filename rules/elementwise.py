"""Owns operations that work on each element by itself.

Knows nothing of how many elements a schedule takes at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array, by_rows, numpy_dtype
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Dtype, Extent, Rule, Signature

from .shared.pointwise import OPERATIONS, cast, lower, stage
from .shared.precision import is_integer, reference_dtype


@dataclass(frozen=True, kw_only=True)
class Elementwise(Rule):
    """Y = op(X), or Y = op(X, Z) for an operation of two operands, element by element."""

    op: Literal[
        "copy", "add", "sub", "mul", "div", "maximum", "minimum", "neg", "abs",
        "relu", "relu6", "sqrt", "exp", "tanh", "sigmoid", "gelu", "gelu_tanh", "silu", "silu_mul", "gelu_mul", "gelu_tanh_mul",
        "hard_sigmoid", "hard_swish",
    ]  # fmt: skip
    """The operation; gelu is the exact one, with erf; hard_sigmoid is min(max(x + 3, 0), 6) / 6; silu_mul (SwiGLU) is silu(x) * z."""
    shape: tuple[Extent, ...]
    """Shape of every operand and of the result."""
    halves: bool = False
    """True takes both operands from one, X, whose last axis is twice as long: the first half of it, and the second."""
    dtype: Dtype = "float32"
    """Dtype of every operand and of the result; what rounds more than once is computed in 32 bits at least."""

    @property
    def _compute_dtype(self) -> str:
        is_narrow = self.dtype.startswith("float8") or (self.dtype in {"float16", "bfloat16"} and OPERATIONS[self.op].is_rounded)
        return "float32" if is_narrow else self.dtype

    def problems(self) -> Iterator[str]:
        if not self.shape:
            yield "shape has no extent; write shape = [16, 64], or other extents"
        if OPERATIONS[self.op].is_float_only and is_integer(self.dtype):
            yield f'op {self.op} needs a floating-point dtype, not {self.dtype}; write dtype = "float32" or another'
        if self.halves and OPERATIONS[self.op].operands != 2:
            yield f"halves is for operations of two operands; {self.op} has one; leave it out"
        if self.op in {"neg", "abs"} and self.dtype.startswith("uint"):
            yield f'op {self.op} needs a signed dtype, not {self.dtype}; write dtype = "int8" or another'

    def signature(self) -> Signature:
        if self.halves:
            both = Arg("X", (*self.shape[:-1], 2 * self.shape[-1]), self.dtype)
            return Signature((both,), (Arg("Y", self.shape, self.dtype),))
        inputs = tuple(Arg(name, self.shape, self.dtype) for name in ("X", "Z")[: OPERATIONS[self.op].operands])
        return Signature(inputs, (Arg("Y", self.shape, self.dtype),))

    def lower(self) -> list[Any]:
        from tvm import te

        inputs = [te.placeholder(arg.shape, arg.dtype, arg.name) for arg in self.signature().inputs]
        operands = _halves(*inputs, self.shape) if self.halves else inputs
        if self._compute_dtype == self.dtype:
            return [*inputs, lower(self.op, self.shape, "Y", self.dtype, *operands)]
        wide = lower(self.op, self.shape, "wide", self._compute_dtype, *(cast(x, self._compute_dtype) for x in operands))
        return [*inputs, stage(self.shape, "Y", lambda y: y, cast(wide, self.dtype))]

    def reference(self, *inputs: Array) -> Array:
        wide = np.int64 if is_integer(self.dtype) else reference_dtype(self.dtype)
        # Integers wrap around, in the kernel as in this cast.
        out = np.empty(math.prod(self.shape), numpy_dtype(self.dtype) if is_integer(self.dtype) else wide)
        operands = [x.reshape(-1) for x in (np.split(inputs[0], 2, axis=-1) if self.halves else inputs)]

        def part(rows: slice) -> Array:
            return OPERATIONS[self.op].reference(*(x[rows].astype(wide) for x in operands)).astype(out.dtype, copy=False)

        return by_rows(out, part, 1).reshape(self.shape)

    def flops(self) -> int:
        return OPERATIONS[self.op].flops * math.prod(self.shape)

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return standard normal values, made positive for sqrt; a divisor is at least 0.5 in size."""
        inputs = super().inputs(rng)
        if self.op == "sqrt":
            return [np.abs(inputs[0])]
        if self.op == "div" and self.halves:
            whole = inputs[0].astype(np.float64)
            return [(whole + np.copysign(0.5, whole)).astype(inputs[0].dtype)]
        if self.op == "div":
            divisor = inputs[1].astype(np.float64)
            return [inputs[0], (divisor + np.copysign(0.5, divisor)).astype(inputs[1].dtype)]
        return inputs


def _halves(x: Any, shape: tuple[int, ...]) -> list[Any]:
    """Return the halves of the last axis as tensors of their own, which schedules read in vectors."""
    from tvm import te

    def half(number: int) -> Any:
        return te.compute(shape, lambda *i: x(*i[:-1], i[-1] + number * shape[-1]), name=f"X{number}")

    return [half(0), half(1)]
