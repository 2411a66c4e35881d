"""Owns attention as models write it: a product of queries and keys, scaled and masked, its softmax, and the product with values.

Knows nothing of rules, of layouts or of what masks mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from tvm import relax

from kerneldecl.compiler.graph.attention_masks import HIDDEN
from kerneldecl.compiler.graph.dataflow import Dataflow
from kerneldecl.compiler.graph.named_constants import array_of, scalar_of
from kerneldecl.compiler.graph.rewriting import static_shape
from kerneldecl.compiler.graph.view_rewriting import RESHAPES, axes_of
from kerneldecl.compiler.graph.views import Shape, View

_NO_KEY = ("logical_not", "astype", "max", "astype", "logical_not", "equal")
"""Operators that say which rows of scores are all -inf, from the last to the first."""


@dataclass(frozen=True)
class Mask:
    """What changes scores before softmax."""

    value: relax.Expr
    kind: Literal["added", "seen", "hidden"]
    """Numbers that are added, or bools: keys that are seen, or those that are not."""
    shape: Shape
    """Shape of the scores that it is broadcast to."""
    factor: float = 1.0
    """What the numbers are multiplied by."""
    low: float = 0.0
    """What scores become that bools hide."""


@dataclass(frozen=True)
class Written:
    """Attention as a model writes it."""

    q: relax.Expr
    """[batch, rows, columns]; without a batch axis where the products have none."""
    k: relax.Expr
    """[batch, columns, rows]"""
    v: relax.Expr
    """[batch, rows, columns]"""
    scale: float
    softcap: float
    """Scores become softcap * tanh(scores / softcap) before masks; 0 for no cap."""
    masks: tuple[Mask, ...]
    shapes: tuple[Shape, ...]
    """Shapes that scores and their softmax have on the way."""
    inner: tuple[relax.Var, ...]
    """Variables between the operands and the result."""
    is_guarded: bool = False
    """Whether rows that see no key are 0, whatever masks add."""


class RefusedError(Exception):
    """Softmax between two products is no attention that the rule computes; the text says why."""


def attention_of(graph: Dataflow, product: relax.Call) -> Written | None:
    """Return the attention whose last product is given; None where no softmax is before it. Raise RefusedError for another one."""
    walk = _Walk(graph)
    softmax = walk.softmax(product.args[0])
    if softmax is None:
        return None
    scores = walk.scores(softmax.args[0])
    scale, softcap = (walk.scale, 0.0) if walk.softcap is None else (walk.scale * walk.softcap, walk.softcap)
    return Written(
        q=scores.args[0],
        k=scores.args[1],
        v=product.args[1],
        scale=scale,
        softcap=softcap,
        masks=tuple(walk.masks),
        shapes=tuple(dict.fromkeys(walk.shapes)),
        inner=tuple(dict.fromkeys(walk.inner)),
    )


@dataclass
class _Walk:
    """The way from the last product back to the first, with what was met on it."""

    graph: Dataflow
    inner: list[relax.Var] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    scale: float = 1.0
    softcap: float | None = None

    def softmax(self, value: relax.Expr) -> relax.Call | None:
        """Return the softmax of rows that a value is, in another shape, rounded, or with 0 for rows without a key; None for another."""
        call = self.graph.call(value)
        if call is None:
            return None
        self._pass(value)
        if call.op.name == "relax.nn.softmax":
            return call if int(call.attrs.axis) % int(call.ty.ndim) == int(call.ty.ndim) - 1 else None
        if _keeps_elements(call):
            return self.softmax(call.args[0])
        return self._guarded(call) if call.op.name == "relax.where" else None

    def _guarded(self, call: relax.Call) -> relax.Call | None:
        """Return the softmax that keeps its value but in rows without a key, where it is 0 instead of NaN."""
        condition, instead, value = call.args
        softmax = self.softmax(value) if scalar_of(instead) == 0 else None
        is_nan = self.graph.call(condition)
        if softmax is None or is_nan is None:
            return None
        if is_nan.op.name == "relax.isnan" and isinstance(value, relax.Var) and is_nan.args[0].same_as(value):
            self._pass(condition)
            return softmax
        return softmax if self._says_no_key(condition, softmax.args[0]) else None

    def _says_no_key(self, condition: relax.Expr, scores: relax.Expr) -> bool:
        """Say whether a condition is that all scores of a row are -inf."""
        value, waiting = condition, list(_NO_KEY)
        while waiting:
            step = self.graph.call(value)
            if step is None or step.op.name not in {f"relax.{waiting[0]}", *RESHAPES}:
                return False
            self._pass(value)
            if step.op.name not in RESHAPES:
                waiting.pop(0)
            value = step.args[0]
        return scalar_of(step.args[1]) == -math.inf and value.same_as(scores)  # type: ignore[union-attr]

    def scores(self, value: relax.Expr) -> relax.Call:
        """Return the product of queries and keys that a value was made of."""
        while True:
            call = self.graph.call(value)
            shape = static_shape(value)
            if call is None or shape is None:
                raise RefusedError("what softmax reads is no product of queries and keys")
            self._pass(value)
            self.shapes.append(shape)
            if call.op.name == "relax.matmul":
                return call
            value = call.args[0] if _keeps_elements(call) else self._before(call, shape)

    def _before(self, call: relax.Call, shape: Shape) -> relax.Expr:
        """Return what an operator was applied to, and note what it did."""
        name = str(call.op.name).removeprefix("relax.")
        if name in {"multiply", "divide"}:
            return self._unscaled(call, name)
        if self.softcap is not None and name in {"add", "subtract", "where"}:
            raise RefusedError("its mask is applied before its softcap")
        if name in {"add", "subtract"}:
            first, other = call.args if name == "subtract" or self._is_product(call.args[0]) else call.args[::-1]
            self.masks.append(Mask(other, "added", shape, self.scale if name == "add" else -self.scale))
            return first
        if name == "where":
            return self._unmasked(call, shape)
        if name == "tanh" and self.softcap is None:
            self.softcap, self.scale = self.scale, 1.0
            return call.args[0]
        raise RefusedError(f"scores pass through {name}")

    def _unscaled(self, call: relax.Call, name: str) -> relax.Expr:
        first, other = call.args if name == "divide" or self._is_product(call.args[0]) else call.args[::-1]
        number = scalar_of(other)
        if not number:
            raise RefusedError("scores are scaled by more than a number")
        self.scale *= number if name == "multiply" else 1 / number
        return first

    def _unmasked(self, call: relax.Call, shape: Shape) -> relax.Expr:
        condition, seen, hidden = call.args
        is_kept = self._is_product(seen)
        low = array_of(hidden if is_kept else seen)
        if low is None or low.max() * self.scale > HIDDEN:
            raise RefusedError("scores are replaced by something that does not hide keys")
        self.masks.append(Mask(condition, "seen" if is_kept else "hidden", shape, low=float(low.max() * self.scale)))
        return seen if is_kept else hidden

    def _is_product(self, value: relax.Expr) -> bool:
        """Say whether a value leads to a product."""
        call = self.graph.call(value)
        if call is None:
            return False
        steps = {"relax.multiply", "relax.divide", "relax.add", "relax.subtract", "relax.tanh", "relax.where"}
        follows = call.args[:1] if _keeps_elements(call) else call.args if call.op.name in steps else ()
        return call.op.name == "relax.matmul" or any(map(self._is_product, follows))

    def _pass(self, value: relax.Expr) -> None:
        if isinstance(value, relax.Var):
            self.inner.append(value)


def _keeps_elements(call: relax.Call) -> bool:
    """Say whether a call changes the shape or the precision of a value and nothing else."""
    if call.op.name == "relax.astype":
        return "float" in str(call.ty.dtype.dtype) and "float" in str(call.args[0].ty.dtype.dtype)
    if call.op.name == "relax.permute_dims":
        whole = View.of(static_shape(call.args[0]) or (0,))
        return whole is not None and whole.permuted(axes_of(call)).is_reshape
    return call.op.name in RESHAPES
