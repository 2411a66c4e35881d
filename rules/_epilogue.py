"""Owns the steps that follow the sums of a product or a convolution in one kernel: bias, activations, residual, cast.

Knows nothing of what computes the sums.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kerneldecl.arrays import Array
from kerneldecl.model import Arg

from ._pointwise import OPERATIONS, cast, lower, stage
from ._precision import is_integer

Step = Literal["bias", "relu", "gelu", "silu", "add"]


@dataclass(frozen=True)
class Epilogue:
    """Steps applied in order to sums kept in `accum`; the result is cast to the output's dtype."""

    steps: tuple[Step, ...]
    accum: str
    out: Arg

    def args(self) -> tuple[Arg, ...]:
        """Return the inputs of the steps, in their order: a bias along the last axis, a residual of the output's shape."""
        inputs = {"bias": Arg("bias", self.out.shape[-1:], self.out.dtype), "add": Arg("residual", self.out.shape, self.out.dtype)}
        return tuple(inputs[step] for step in self.steps if step in inputs)

    def problems(self) -> Iterator[str]:
        for step, count in Counter(self.steps).items():
            if count > 1:
                yield f"epilogue repeats {step}"
            if step != "bias" and OPERATIONS[step].is_float_only and is_integer(self.accum):
                yield f"epilogue {step} needs floating-point sums, but accum_dtype is {self.accum}"

    def flops_per_element(self) -> int:
        return sum(1 if step == "bias" else OPERATIONS[step].flops for step in self.steps)

    def lower(self, sums: Callable[[str], Any], operands: Sequence[Any]) -> Any:
        """Return the output in TE. `sums` makes the TE tensor of the sums under a given name."""
        is_cast = self.accum != self.out.dtype
        names = ["sums", *self.steps, *(["cast"] if is_cast else [])]
        names[-1] = self.out.name
        left = [cast(operand, self.accum) for operand in operands]
        result = sums(names[0])
        for step, name in zip(self.steps, names[1:], strict=False):
            if step == "bias":
                bias = left.pop(0)
                result = stage(self.out.shape, name, lambda x, b: x + b, result, lambda *i, bias=bias: bias(i[-1]))
            elif step == "add":
                result = lower(step, self.out.shape, name, self.accum, result, left.pop(0))
            else:
                result = lower(step, self.out.shape, name, self.accum, result)
        return stage(self.out.shape, self.out.name, lambda x: x, cast(result, self.out.dtype)) if is_cast else result

    def reference(self, sums: Array, operands: Sequence[Array]) -> Array:
        """Apply the steps in NumPy, in the dtype of the given sums."""
        result, left = sums, list(operands)
        for step in self.steps:
            is_sum = step in {"bias", "add"}
            result = result + left.pop(0).astype(sums.dtype) if is_sum else OPERATIONS[step].reference(result)
        return np.asarray(result)
