"""Owns rotary embedding as models write it: x * cos + (halves of x, the second negated and first) * sin.

Knows nothing of rules.
"""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import relax

from kerneldecl.compiler.graph.dataflow import Dataflow
from kerneldecl.compiler.graph.rewriting import static_shape
from kerneldecl.compiler.graph.view_rewriting import slice_of


@dataclass(frozen=True)
class Rotary:
    """A rotary embedding."""

    x: relax.Var
    cos: relax.Expr
    sin: relax.Expr
    inner: tuple[relax.Var, ...]
    """Variables between x and the result."""


def rotary_of(graph: Dataflow, total: relax.Var) -> Rotary | None:
    """Return the rotary embedding of a variable's last axis that a sum is; None for another operator."""
    sum_ = graph.call(total)
    if sum_ is None or sum_.op.name != "relax.add":
        return None
    for straight, crossed in (sum_.args, sum_.args[::-1]):
        scaled, turned = graph.call(straight), graph.call(crossed)
        if scaled is None or turned is None or {scaled.op.name, turned.op.name} != {"relax.multiply"}:
            continue
        for half, sin in (turned.args, turned.args[::-1]):
            found = _rotated(graph, half)
            rest = [arg for arg in scaled.args if found is not None and not arg.same_as(found[0])]
            if found is not None and len(rest) == 1 and static_shape(found[0]) == static_shape(sum_):
                return Rotary(found[0], rest[0], sin, (straight, crossed, half, *found[1]))
    return None


def _rotated(graph: Dataflow, value: relax.Expr) -> tuple[relax.Var, tuple[relax.Var, ...]] | None:
    """Return x of concat(-x[size / 2:], x[:size / 2]) along the last axis, and the variables between."""
    joined = graph.call(value)
    shape = static_shape(value)
    if joined is None or joined.op.name != "relax.concat" or not shape or int(joined.attrs.axis) % len(shape) != len(shape) - 1:
        return None
    parts = joined.args[0] if isinstance(joined.args[0], relax.Tuple) else graph.values.get(joined.args[0])
    if not isinstance(parts, relax.Tuple) or len(parts.fields) != 2:
        return None
    negated, low = (graph.call(part) for part in parts.fields)
    high = graph.call(negated.args[0]) if negated is not None and negated.op.name == "relax.negative" else None
    if negated is None or low is None or high is None or {low.op.name, high.op.name} != {"relax.strided_slice"}:
        return None
    x, (axis, size) = low.args[0], (len(shape) - 1, shape[-1])
    halves = [(axis, 0, size // 2), (axis, size // 2, size)]
    is_same = isinstance(x, relax.Var) and high.args[0].same_as(x) and not isinstance(x, tvm.ir.GenericConst)
    if size % 2 or not is_same or [slice_of(low), slice_of(high)] != halves:
        return None
    return x, (*parts.fields, negated.args[0])
