"""Owns elementwise functions that are written as an expression, of several inputs that broadcast.

Knows nothing of how many elements a schedule takes at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from kerneldecl.arrays import Array, numpy_dtype
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Dtype, Extent, Rule, Signature

from .shared.axes import broadcast_index, broadcast_problems
from .shared.expression import NAMES, ExpressionError, Node, flops_of, in_numpy, in_te, names_in, parsed
from .shared.precision import is_integer


@dataclass(frozen=True, kw_only=True)
class Expression(Rule):
    """O = an expression of the elements of up to six inputs, which broadcast as NumPy's arrays do: gelu(x) * y + 1."""

    expr: str
    """The expression. Inputs are x, y, z, w, v, u; there are numbers, + - * /, functions (gelu, exp, max, …) and where(x < 0, y, z)."""
    shapes: tuple[tuple[Extent, ...], ...]
    """Shapes of the inputs, in the order x, y, z, w, v, u."""
    dtype: Dtype = "float32"
    """Dtype of the inputs; 16-bit and 8-bit floating point is computed in float32."""
    out_dtype: Dtype | Literal[""] = ""
    """Dtype of O; by default dtype. The result is cast to it."""

    @cached_property
    def _root(self) -> Node:
        return parsed(self.expr)

    @property
    def _shape(self) -> tuple[int, ...]:
        return tuple(int(extent) for extent in np.broadcast_shapes(*self.shapes))

    @property
    def _compute_dtype(self) -> str:
        return "float32" if self.dtype in {"float16", "bfloat16"} or self.dtype.startswith("float8") else self.dtype

    def problems(self) -> Iterator[str]:
        try:
            read = set(names_in(self._root))
        except ExpressionError as error:
            yield f"expr {error}"
            return
        given = NAMES[: len(self.shapes)]
        if not self.shapes or len(self.shapes) > len(NAMES):
            yield f"shapes has {len(self.shapes)} items; there are 1 to {len(NAMES)} inputs"
        elif missing := sorted(read - set(given)):
            yield f"expr reads {', '.join(missing)}, but shapes gives {', '.join(given)} alone; write a shape for each"
        elif unread := [name for name in given if name not in read]:
            yield f"expr does not read {', '.join(unread)}, whose shape is given; leave it out"
        elif is_integer(self.dtype):
            yield f"dtype {self.dtype} is an integer's; expressions are of floating point, rule elementwise has integers"
        yield from broadcast_problems(self.shapes)

    def signature(self) -> Signature:
        inputs = tuple(Arg(name.upper(), shape, self.dtype) for name, shape in zip(NAMES, self.shapes, strict=False))
        return Signature(inputs, (Arg("O", self._shape, self.out_dtype or self.dtype),))

    def lower(self) -> list[Any]:
        from tvm import te

        inputs = {arg.name.lower(): te.placeholder(arg.shape, arg.dtype, arg.name) for arg in self.signature().inputs}
        out, wide = self.signature().outputs[0], self._compute_dtype

        def element(*at: Any) -> Any:
            def read(name: str) -> Any:
                return inputs[name](*broadcast_index(tuple(map(int, inputs[name].shape)), at)).astype(wide)

            return in_te(self._root, read, wide).astype(out.dtype)

        return [*inputs.values(), te.compute(out.shape, element, name="O")]

    def reference(self, *inputs: Array) -> Array:
        arrays = {name: x.astype(np.float64) for name, x in zip(NAMES, inputs, strict=False)}
        value = np.broadcast_to(in_numpy(self._root, arrays), self._shape)
        dtype = self.out_dtype or self.dtype
        return np.asarray(value.astype(numpy_dtype(dtype)) if is_integer(dtype) else value)

    def flops(self) -> int:
        return flops_of(self._root) * math.prod(self._shape)

    def takes_special_values(self) -> bool:
        """Say whether results are defined for infinities and NaN: where everything is added, multiplied and compared in one order."""
        return False
