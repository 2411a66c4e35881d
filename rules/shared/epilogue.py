"""Owns the epilogue of a GEMM or a convolution: bias, activations, residual, scales and cast in the kernel that accumulates.

Knows nothing of what is accumulated.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from kerneldecl.arrays import Array, random_array
from kerneldecl.lazy import np
from kerneldecl.model import Arg

from .pointwise import OPERATIONS, cast, lower, stage
from .precision import is_integer

Step = Literal[
    "bias", "add", "mul", "scale", "scale_columns",
    "relu", "relu6", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh", "hard_sigmoid", "hard_swish",
]  # fmt: skip
RowStep = Literal["scale_rows"]
"""A step of GEMMs alone."""
SCALES = frozenset({"scale", "scale_columns", "scale_rows"})


@dataclass(frozen=True)
class Epilogue:
    """Steps applied in order to accumulators of the dtype `accum`; the result is cast to the output's dtype."""

    steps: tuple[Step | RowStep, ...]
    accum: str
    out: Arg
    columns: int = -1
    """The axis of the output that the bias and the scales of columns go along: the last, or 1 where channels are behind the images."""

    def args(self) -> tuple[Arg, ...]:
        """Return the inputs of the steps, in their order.

        The bias, along `columns`, the residual and the factor, of the output's shape, have the output's dtype. Scales have the dtype
        that they are multiplied in: one scale for all elements, or one for each column or row.
        """
        *rows, _ = self.out.shape
        columns = self.out.shape[self.columns]
        scaled = scaled_dtype(self.accum)
        inputs = {
            "bias": Arg("bias", (columns,), self.out.dtype),
            "add": Arg("residual", self.out.shape, self.out.dtype),
            "mul": Arg("factor", self.out.shape, self.out.dtype),
            "scale": Arg("scale", (1,), scaled),
            "scale_columns": Arg("column_scales", (columns,), scaled),
            "scale_rows": Arg("row_scales", tuple(rows), scaled),
        }
        return tuple(inputs[step] for step in self.steps if step in inputs)

    def problems(self) -> Iterator[str]:
        dtype = self.accum
        for step, count in Counter(self.steps).items():
            if count > 1:
                yield f"epilogue repeats {step}; write it once"
            dtype = scaled_dtype(dtype) if step in SCALES else dtype
            if step in OPERATIONS and OPERATIONS[step].is_float_only and is_integer(dtype):
                yield f"epilogue {step} needs floating-point accumulators, but accum_dtype is {self.accum}; leave it out"

    def flops_per_element(self) -> int:
        return sum(OPERATIONS[step].flops if step in OPERATIONS else 1 for step in self.steps)

    def lower(self, accumulators: Callable[[str], Any], operands: Sequence[Any]) -> Any:
        """Return the output in TE. `accumulators` makes the TE tensor of the accumulators under a given name."""
        dtypes = list(accumulate(self.steps, lambda dtype, step: scaled_dtype(dtype) if step in SCALES else dtype, initial=self.accum))
        is_cast = dtypes[-1] != self.out.dtype
        names = ["sums", *self.steps, *(["cast"] if is_cast else [])]
        names[-1] = self.out.name
        remaining = list(operands)
        result = accumulators(names[0])
        for step, name, dtype in zip(self.steps, names[1:], dtypes[1:], strict=False):
            if step in _VECTORS:
                operation, place = operator.add if step == "bias" else operator.mul, self._place(step)
                operand, widened = cast(remaining.pop(0), dtype), cast(result, dtype) if step in SCALES else result
                result = stage(self.out.shape, name, operation, widened, lambda *i, operand=operand, place=place: operand(*place(i)))
            elif step in _WHOLE:
                result = lower(step, self.out.shape, name, dtype, result, cast(remaining.pop(0), dtype))
            else:
                result = lower(step, self.out.shape, name, dtype, result)
        return stage(self.out.shape, self.out.name, lambda x: x, cast(result, self.out.dtype)) if is_cast else result

    def _place(self, step: str) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
        """Return what makes the indices of a step's operand from those of the output: its operand is a vector or a scalar."""
        if step in {"bias", "scale_columns"}:
            return lambda i: (i[self.columns],)
        return (lambda _: (0,)) if step == "scale" else lambda i: i[:-1]

    def inputs(self, rng: np.random.Generator, terms: int, dtype: str) -> list[Array]:
        """Return the inputs of the steps; `terms` and `dtype` are those of the accumulation.

        Scales bring accumulated products of integers to a size of about 1, which 16-bit floats hold.
        """
        size = 128**2 / 3 * math.sqrt(terms) if is_integer(dtype) else 1.0
        return [
            rng.uniform(0.5 / size, 1.5 / size, arg.shape).astype(arg.dtype) if step in SCALES else random_array(rng, arg)
            for step, arg in zip((step for step in self.steps if step in _WHOLE or step in _VECTORS), self.args(), strict=True)
        ]

    def reference(self, accumulators: Array, operands: Sequence[Array]) -> Array:
        """Apply the steps in NumPy, in the dtype of the accumulators."""
        result, remaining = accumulators, [operand.astype(accumulators.dtype) for operand in operands]
        behind = (-1 - self.columns) % len(self.out.shape)
        for step in self.steps:
            if step in OPERATIONS and step not in _WHOLE:
                result = OPERATIONS[step].reference(result)
                continue
            operand = remaining.pop(0)
            if step in {"bias", "scale_columns"}:
                operand = operand.reshape(-1, *(1,) * behind)
            elif step == "scale_rows":
                operand = operand[..., None]
            result = result + operand if step in {"bias", "add"} else result * operand
        return np.asarray(result)


def scaled_dtype(accum: str) -> str:
    """Return the dtype of scales and of scaled accumulators: floating point of at least 32 bits."""
    return "float64" if accum in {"float64", "int64"} else "float32"


_WHOLE = frozenset({"add", "mul"})
"""Steps with an operand of the output's shape."""
_VECTORS = frozenset({"bias", "scale", "scale_columns", "scale_rows"})
"""Steps with a vector or a scalar."""
