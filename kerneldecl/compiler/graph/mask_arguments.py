"""Owns masks that a model computes of its inputs: what they are before they are broadcast, rounded, or made of bools.

Knows nothing of the rule but its masks' shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from tvm import relax

from kerneldecl.compiler.graph.attention import Mask
from kerneldecl.compiler.graph.attention_masks import HIDDEN
from kerneldecl.compiler.graph.dataflow import Dataflow
from kerneldecl.compiler.graph.named_constants import Array, array_of
from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape
from kerneldecl.compiler.graph.view_rewriting import RESHAPES
from kerneldecl.compiler.graph.views import Shape


@dataclass
class Computed:
    """A mask on the way back to what it was made of."""

    graph: Dataflow
    value: relax.Expr
    shape: Shape
    """Shape of the value with four axes."""
    whole: Shape
    """[batch, heads, queries, keys]"""
    kind: str
    is_guarded: bool = False
    """Whether rows that see no key are 0 in the model, as the rule has them; else they are what the numbers make of them."""
    low: float | None = None
    """What the model adds for keys that are not seen, where that must be kept."""
    known: list[Array] = field(default_factory=list)
    """What else is added, [batch, heads, queries, keys]."""
    passed: list[relax.Expr] = field(default_factory=list)
    """What the mask was on the way, the value last."""

    @classmethod
    def of(cls, graph: Dataflow, mask: Mask, whole: Shape, *, is_guarded: bool) -> Computed:
        """Return a mask as early as possible."""
        given = static_shape(mask.value) or ()
        shape = whole if math.prod(given) == math.prod(whole) else _aligned(given, 4)
        is_guarded |= mask.low == -math.inf
        found = cls(graph, mask.value, shape, whole, mask.kind, is_guarded, None if mask.kind == "added" or is_guarded else mask.low)
        while found._step():
            pass
        found.passed.append(found.value)
        return found

    def _step(self) -> bool:
        """Go back by one operator; say whether there was one to pass."""
        call = self.graph.call(self.value)
        if call is None:
            return False
        name = str(call.op.name).removeprefix("relax.")
        ways: dict[str, Callable[[relax.Call], bool]] = {
            **dict.fromkeys((each.removeprefix("relax.") for each in RESHAPES), self._reshape),
            "broadcast_to": lambda call: self._to(call.args[0]),
            "astype": self._cast,
            "where": self._choice,
            "maximum": self._bound,
            "add": self._sum,
            **dict.fromkeys(("bitwise_and", "logical_and"), self._both),
            **dict.fromkeys(("bitwise_not", "logical_not"), self._inverse),
        }
        return name in ways and ways[name](call)

    def _to(self, value: relax.Expr) -> bool:
        """Go to an operand whose axes are the value's, those in front left out."""
        given = static_shape(value)
        if given is None or static_shape(self.value) != self.shape:
            return False
        self._go(value, _aligned(given, 4))
        return True

    def _go(self, value: relax.Expr, shape: Shape) -> None:
        self.passed.append(self.value)
        self.value, self.shape = value, shape

    def _reshape(self, call: relax.Call) -> bool:
        given = static_shape(call.args[0]) or ()
        if _without_ones(given) == _without_ones(self.shape):
            self._go(call.args[0], self.shape)
            return True
        return False

    def _cast(self, call: relax.Call) -> bool:
        return self.kind == "added" and "float" in dtype_of(call.args[0]) and self._to(call.args[0])

    def _choice(self, call: relax.Call) -> bool:
        condition, *arrays = call.args[0], *map(array_of, call.args[1:])
        if self.kind != "added" or any(array is None for array in arrays) or static_shape(self.value) != self.shape:
            return False
        seen, hidden = (array for array in arrays if array is not None)
        kind, low = ("seen", hidden) if not seen.any() else ("hidden", seen)
        if (seen.any() and hidden.any()) or low.max() > HIDDEN or not self._to(condition):
            return False
        self.kind = kind
        self.is_guarded |= bool(low.max() == -np.inf)  # else such a row is NaN in the model
        self.low = None if self.is_guarded else float(low.max())
        return True

    def _bound(self, call: relax.Call) -> bool:
        low = array_of(call.args[1])
        return self.kind == "added" and self.is_guarded and low is not None and low.max() <= HIDDEN and self._to(call.args[0])

    def _sum(self, call: relax.Call) -> bool:
        return self.kind == "added" and self._split(call, lambda array: array.astype("float32"))

    def _both(self, call: relax.Call) -> bool:
        return self.kind == "seen" and self._split(call, lambda array: np.where(array, np.float32(0), np.float32(-np.inf)))

    def _split(self, call: relax.Call, added: Callable[[Array], Array]) -> bool:
        """Go to one operand where the other is known, and note that."""
        for value, other in (call.args, call.args[::-1]):
            array = array_of(other)
            numbers = None if array is None else added(array.reshape(_aligned(array.shape, 4)))
            if numbers is not None and (self.is_guarded or numbers.min() > HIDDEN) and self._to(value):
                self.known.append(numbers)
                return True
        return False

    def _inverse(self, call: relax.Call) -> bool:
        if self.kind == "added" or not self._to(call.args[0]):
            return False
        self.kind = "hidden" if self.kind == "seen" else "seen"
        return True


def is_seen(graph: Dataflow, condition: relax.Expr, masks: list[relax.Expr]) -> bool:
    """Say whether a condition is that a row sees a key by one of these masks: a bool of it is true, or a number above -inf."""
    steps, value = [], condition
    while not any(value.same_as(mask) for mask in masks):
        call = graph.call(value)
        if call is None or not call.op.name.startswith("relax."):
            return False
        name = str(call.op.name)
        if name == "relax.greater":
            low = array_of(call.args[1])
            if low is None or low.max() > -math.inf:
                return False
        elif name == "relax.max":
            if [int(axis) % int(call.args[0].ty.ndim) for axis in call.attrs.axis or ()] != [int(call.args[0].ty.ndim) - 1]:
                return False
        elif name not in {"relax.astype", *RESHAPES}:
            return False
        steps += [name] if name in {"relax.greater", "relax.max"} else []
        value = call.args[0]
    return steps == (["relax.max"] if dtype_of(value) == "bool" else ["relax.greater", "relax.max"])


def _aligned(shape: Shape, rank: int) -> Shape:
    return (1,) * (rank - len(shape)) + tuple(shape)


def _without_ones(shape: Shape) -> Shape:
    return tuple(extent for extent in shape if extent > 1)
