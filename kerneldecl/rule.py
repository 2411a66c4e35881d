"""Owns the base class of rules: a frozen dataclass with the operator's attributes, and methods for what it computes.

Knows nothing of policies, schedules, keys or files. Importing it imports neither TVM nor NumPy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NewType, Self, get_type_hints

from annotated_types import Ge, Gt

from kerneldecl.model import Arg, Signature, dtype_bytes, frozen

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Arg", "Dtype", "Extent", "FloatDtype", "Rule", "Signature", "Size", "WorkspaceFile", "dtype_tolerance"]

Extent = Annotated[int, Gt(0)]
"""A positive number of elements."""
Size = Annotated[int, Ge(0)]
"""A number of elements that may be zero, such as padding."""
FloatDtype = Literal["float16", "bfloat16", "float32", "float64"]
"""A dtype of floating point by its name."""
Dtype = Literal["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int16", "int32", "int64"]
"""A dtype by its name."""


WorkspaceFile = NewType("WorkspaceFile", str)
"""A path, relative to the workspace, of a file whose content is part of the entry's key; empty for none."""


class Rule:
    """One operator with one set of attributes: what it computes.

    A rule file holds one subclass, a frozen dataclass; the file's stem is the rule's name. Attributes are its fields.
    `signature`, `lower`, `reference` and `flops` must be given; the rest has defaults that suit most operators.
    Rule files import TVM inside `lower` alone: planning reads attributes and must work where TVM is not installed.
    """

    @classmethod
    def of(cls, root: Path, attrs: Mapping[str, Any]) -> Self:
        """Return the rule with declared attributes, its files as paths below `root`."""
        files = {name for name, hint in get_type_hints(cls).items() if hint is WorkspaceFile}
        return cls(**{name: str(root / value) if name in files and value else frozen(value) for name, value in attrs.items()})

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each invalid combination of attributes that are valid by themselves."""
        return iter(())

    def signature(self) -> Signature:
        """Return names, shapes and dtypes of the arguments: inputs first, then outputs, of which the first may be updated in place."""
        raise NotImplementedError

    def lower(self) -> Any:
        """Return the computation: TE tensors in the signature's order (placeholders, then outputs), or a PrimFunc."""
        raise NotImplementedError

    def reference(self, *inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | Sequence[np.ndarray[Any, Any]]:
        """Compute the output (or the outputs) in NumPy, at a higher precision than the kernel's.

        It is given inputs and, behind them, what the arguments hold that are updated in place; it returns those whole, elements that stay
        as they are among them.
        """
        raise NotImplementedError

    def flops(self) -> int:
        """Return the arithmetic operations of one call; a fused multiply-add is two."""
        raise NotImplementedError

    def least_bytes(self) -> int:
        """Return the bytes that must move if every input is read once and every output written once."""
        return sum(math.prod(arg.shape) * dtype_bytes(arg.dtype) for arg in self.signature().args)

    def inputs(self, rng: np.random.Generator) -> list[np.ndarray[Any, Any]]:
        """Return new random inputs in the signature's order: normal for floating point, small integers otherwise.

        Behind them it may return what updated arguments hold; by default that is random, too.
        """
        from kerneldecl.arrays import random_array

        return [random_array(rng, arg) for arg in self.signature().inputs]

    def takes_special_values(self) -> bool:
        """Say whether results are defined where floating-point inputs hold zeros, tiny and huge numbers, infinities and NaN.

        Kernels are then verified on such inputs, too. By default they are where no output is an integer, which has no NaN.
        """
        floats = [arg.dtype.startswith(("float", "bfloat")) for arg in self.signature().inputs]
        return any(floats) and not any(arg.dtype.startswith(("int", "uint")) for arg in self.signature().outputs)

    def largest_input(self) -> float:
        """Return the largest finite number that verification puts among inputs, as far as results depend on differences of products.

        Where they do, two results of inputs beyond it differ by more than what rounding leaves of the difference.
        """
        return math.inf

    def nan_may_vanish(self) -> bool:
        """Say whether a kernel may leave out inputs that count zero times: `reference` multiplies them by zero, and has their NaN.

        Where NaN is expected, any result of such a kernel is then right.
        """
        return False

    def rows_vary(self) -> bool:
        """Say whether rows of results, along the last axis, differ much in size, as means of few values and of many do.

        Each is then judged by its own size where that is larger than that of all results: rounding is relative to it.
        """
        return False

    def is_repeatable(self) -> bool:
        """Say whether two calls on the same inputs must give the same bits; False admits kernels that add in any order."""
        return True

    def tolerance(self) -> float:
        """Return the relative error allowed, of the least precise floating dtype among the arguments; 0 if all are integers."""
        return max((dtype_tolerance(arg.dtype) for arg in self.signature().args), default=0.0)


def dtype_tolerance(dtype: str) -> float:
    """Return the relative error that a few roundings to the dtype may cause; 0 for integers."""
    by_dtype = {"float8_e4m3fn": 0.1, "float8_e5m2": 0.2, "bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-4, "float64": 1e-9}
    return by_dtype.get(dtype, 0.0)
