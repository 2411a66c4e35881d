"""Owns the steps that follow the sums of a product or a convolution in one kernel: bias, activations, residual, scales, cast.

Knows nothing of what computes the sums.
"""

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from kerneldecl.arrays import Array, random_array
from kerneldecl.model import Arg

from ._pointwise import OPERATIONS, cast, lower, stage
from ._precision import is_integer

Step = Literal["bias", "relu", "gelu", "silu", "add", "scale", "scale_columns"]
RowStep = Literal["scale_rows"]
"""Of products alone."""
SCALES = frozenset({"scale", "scale_columns", "scale_rows"})


@dataclass(frozen=True)
class Epilogue:
    """Steps applied in order to sums kept in `accum`; the result is cast to the output's dtype."""

    steps: tuple[Step | RowStep, ...]
    accum: str
    out: Arg

    def args(self) -> tuple[Arg, ...]:
        """Return the inputs of the steps, in their order.

        A bias along the last axis and a residual of the output's shape have its dtype; factors have the one that they are
        multiplied in: one for all elements, or one for each column or row.
        """
        *outer, rows, columns = self.out.shape
        scaled = scaled_dtype(self.accum)
        inputs = {
            "bias": Arg("bias", (columns,), self.out.dtype),
            "add": Arg("residual", self.out.shape, self.out.dtype),
            "scale": Arg("scale", (1,), scaled),
            "scale_columns": Arg("column_scales", (columns,), scaled),
            "scale_rows": Arg("row_scales", (*outer, rows), scaled),
        }
        return tuple(inputs[step] for step in self.steps if step in inputs)

    def problems(self) -> Iterator[str]:
        dtype = self.accum
        for step, count in Counter(self.steps).items():
            if count > 1:
                yield f"epilogue repeats {step}"
            dtype = scaled_dtype(dtype) if step in SCALES else dtype
            if step in OPERATIONS and OPERATIONS[step].is_float_only and is_integer(dtype):
                yield f"epilogue {step} needs floating-point sums, but accum_dtype is {self.accum}"

    def flops_per_element(self) -> int:
        return sum(OPERATIONS[step].flops if step in OPERATIONS else 1 for step in self.steps)

    def lower(self, sums: Callable[[str], Any], operands: Sequence[Any]) -> Any:
        """Return the output in TE. `sums` makes the TE tensor of the sums under a given name."""
        dtypes = list(accumulate(self.steps, lambda dtype, step: scaled_dtype(dtype) if step in SCALES else dtype, initial=self.accum))
        is_cast = dtypes[-1] != self.out.dtype
        names = ["sums", *self.steps, *(["cast"] if is_cast else [])]
        names[-1] = self.out.name
        left = list(operands)
        result = sums(names[0])
        for step, name, dtype in zip(self.steps, names[1:], dtypes[1:], strict=False):
            if step in _PLACES:
                operation, place, operand = operator.add if step == "bias" else operator.mul, _PLACES[step], cast(left.pop(0), dtype)
                widened = cast(result, dtype) if step in SCALES else result
                result = stage(self.out.shape, name, operation, widened, lambda *i, operand=operand, place=place: operand(*place(i)))
            elif step == "add":
                result = lower(step, self.out.shape, name, dtype, result, cast(left.pop(0), dtype))
            else:
                result = lower(step, self.out.shape, name, dtype, result)
        return stage(self.out.shape, self.out.name, lambda x: x, cast(result, self.out.dtype)) if is_cast else result

    def inputs(self, rng: np.random.Generator, terms: int, dtype: str) -> list[Array]:
        """Return the inputs of the steps; factors bring sums of so many products of integers to the size of others, which 16 bits hold."""
        size = 128**2 / 3 * math.sqrt(terms) if is_integer(dtype) else 1.0
        return [
            rng.uniform(0.5 / size, 1.5 / size, arg.shape).astype(arg.dtype) if step in SCALES else random_array(rng, arg)
            for step, arg in zip((step for step in self.steps if step == "add" or step in _PLACES), self.args(), strict=True)
        ]

    def reference(self, sums: Array, operands: Sequence[Array]) -> Array:
        """Apply the steps in NumPy, in the dtype of the given sums."""
        result, left = sums, [operand.astype(sums.dtype) for operand in operands]
        for step in self.steps:
            if step in SCALES:
                result = result * (left.pop(0)[..., None] if step == "scale_rows" else left.pop(0))
            else:
                result = result + left.pop(0) if step in {"bias", "add"} else OPERATIONS[step].reference(result)
        return np.asarray(result)


def scaled_dtype(accum: str) -> str:
    """Return what factors and scaled sums are kept in: 32 bits at least, and floating point."""
    return "float64" if accum in {"float64", "int64"} else "float32"


_PLACES: dict[str, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = {
    "bias": lambda i: i[-1:],
    "scale": lambda _: (0,),
    "scale_columns": lambda i: i[-1:],
    "scale_rows": lambda i: i[:-1],
}
"""By step with an operand that is no matrix: where its element for an output's indices lies."""
