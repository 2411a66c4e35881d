"""Owns the reading of a block that pads an image with zeros: what it pads, and how many zeros are before each dimension.

Knows nothing of what reads the padded image.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import TensorLoad, Var
from tvm.sym import Analyzer
from tvm_ffi import structural

_COMPARISONS = {"LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge}


def read_padding(block: Any) -> tuple[Any, list[int]] | None:
    """Return what a block pads with zeros, and how many are before each dimension; None where it does something else."""
    axes, store = [axis.var for axis in block.iter_vars], block.body
    if not isinstance(store, tirx.BufferStore) or not all(own.same_as(var) for own, var in zip(store.indices, axes, strict=True)):
        return None
    value, conditions = store.value, []
    if isinstance(value, tvm.ir.Call) and value.op.name == "prim.if_then_else":
        condition, value, otherwise = value.args
        conditions = list(_conjuncts(condition))
        if not isinstance(otherwise, tirx.FloatImm | tirx.IntImm) or otherwise.value != 0:
            return None
    if not isinstance(value, TensorLoad):
        return None
    offsets, analyzer = [], Analyzer()
    for index, var in zip(value.indices, axes, strict=True):
        moved = analyzer.simplify(index - var)
        if not isinstance(moved, tirx.IntImm):
            return None
        offsets.append(-int(moved.value))
    sides = [int(extent) for extent in value.source.shape]
    padded = [int(axis.dom.extent) for axis in block.iter_vars]
    is_zero_outside = all(map(_is_cut, axes, offsets, sides, padded, [conditions] * len(axes))) and all(
        sum(_mentions(condition, var) for var in axes) == 1 for condition in conditions
    )
    return (value.source, offsets) if is_zero_outside else None


def _is_cut(var: Any, offset: int, side: int, padded: int, conditions: Sequence[Any]) -> bool:
    """Say whether comparisons hold for a dimension's places within the source and fail for those outside.

    Each is linear in one variable, so that the places next to the edges decide for all.
    """
    own = [condition for condition in conditions if _mentions(condition, var)]
    if not all(type(condition).__name__ in _COMPARISONS for condition in own):
        return False

    def holds(place: int) -> bool:
        return all(_COMPARISONS[type(condition).__name__](*(_at(side, place) for side in (condition.a, condition.b))) for condition in own)

    edges = {place for place in (0, offset - 1, offset, offset + side - 1, offset + side, padded - 1) if 0 <= place < padded}
    return all(holds(place) == (offset <= place < offset + side) for place in edges)


def _at(expr: Any, place: int) -> int:
    return int(Analyzer().simplify(structural.structural_map(expr, [(Var, lambda own: tirx.const(place, own.ty.dtype))])).value)


def _mentions(expr: Any, var: Any) -> bool:
    found: list[Any] = []
    structural.structural_walk(expr, [(Var, lambda own: found.append(own) if own.same_as(var) else None)])
    return bool(found)


def _conjuncts(condition: Any) -> Iterator[Any]:
    if isinstance(condition, tirx.And):
        yield from _conjuncts(condition.a)
        yield from _conjuncts(condition.b)
    else:
        yield condition
