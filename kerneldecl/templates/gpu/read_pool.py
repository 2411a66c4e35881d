"""Owns the recognition of pooling, of both layouts: maxima or sums of windows, what is outside of images, and what becomes of a sum.

Knows nothing of kernels. A function is recognised by its structure, so that models' pooling is, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.ir import Call, TensorLoad
from tvm.s_tir import Schedule
from tvm.sym import Analyzer

from kerneldecl.analysis.pool import PoolSizes, pool_of
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.templates.gpu.cuda_types import cuda_type, narrowed
from kerneldecl.templates.shared import blocks

_OPERATORS = {tirx.Add: "+", tirx.Sub: "-", tirx.Mul: "*", tirx.Div: "/"}
_FUNCTIONS = {tirx.Max: "max", tirx.Min: "min"}


class PoolSpec(NamedTuple):
    """Windows of images, and what becomes of them."""

    sizes: PoolSizes
    before: tuple[int, int]
    """Rows above an image and columns left of it, with which its first window begins."""
    is_maximum: bool
    """Whether maxima are computed or sums."""
    finished: str
    """The result in CUDA, an expression of `sum`, in float32, and of the output's `row` and `column`."""


def read_pool(mod: tvm.IRModule) -> PoolSpec | None:
    """Return the pooling that a module's `main` computes, None if it computes something else."""
    sch = blocks.attempt(mod, _inlined)
    if sch is None or (sizes := pool_of(iter_space(sch.mod))) is None:
        return None
    found = [sch.get(leaf.rv) for leaf in blocks.leaves(sch) or ()]
    try:
        return _read(found[0], found[1:], sizes)
    except _OtherError:
        return None


class _OtherError(Exception):
    """The function computes something else."""


def _require(holds: object) -> None:
    if not holds:
        raise _OtherError


def _inlined(sch: Schedule) -> bool:
    """Inline padding into the reduction, and say whether there is one, with one block after it at most."""
    blocks.inline_producers(sch)
    found = blocks.leaves(sch)
    return found is not None and 1 <= len(found) <= 2 and found[0].block.is_reduction and not any(x.block.is_reduction for x in found[1:])


def _read(block: Any, after: list[Any], sizes: PoolSizes) -> PoolSpec:
    store = block.body
    _require(isinstance(store, tirx.BufferStore) and isinstance(store.value, tirx.Max | tirx.Add))
    is_maximum = isinstance(store.value, tirx.Max)
    operands = [store.value.a, store.value.b]
    terms = [each for each in operands if not (isinstance(each, TensorLoad) and each.source.same_as(store.buffer))]
    _require(len(terms) == 1)
    # Sums of 16 bits in 16 bits would be other numbers than in float32, and a maximum's start is the least number of its dtype.
    _require(sizes.accum == (sizes.dtype if is_maximum else "float32"))
    start = block.init.value if isinstance(block.init, tirx.BufferStore) else None
    _require(_is_least(start, sizes.accum) if is_maximum else _is_number(start, 0.0))
    load, condition = _load(terms[0], is_maximum)
    before = _before(load, block, sizes)
    _require(_is_inside(condition, load, block, sizes))
    if not after:
        return PoolSpec(sizes, before, is_maximum, _cast(sizes.dtype, "sum"))
    [last] = after
    _require(not is_maximum and isinstance(last.body, tirx.BufferStore) and str(last.body.buffer.dtype) == sizes.out_dtype)
    axes = [axis.var for axis in last.iter_vars]
    _require(len(axes) == 4 and all(one.same_as(other) for one, other in zip(last.body.indices, axes, strict=True)))
    row, column = _pixel(axes, sizes)
    return PoolSpec(sizes, before, is_maximum, _text(last.body.value, {row: "row", column: "column"}, store.buffer, axes))


def _pixel(each: Any, sizes: PoolSizes) -> Any:
    """Return what is of rows and of columns, of axes or of indices of images."""
    return each[2:4] if sizes.channels_first else each[1:3]


def _load(term: Any, is_maximum: bool) -> tuple[Any, Any]:
    """Return the load of an image's element, and the condition under which it is loaded, None without one."""
    condition = None
    if isinstance(term, Call) and term.op.name == "prim.if_then_else":
        condition, term, outside = term.args
        _require(_is_least(outside, str(outside.ty.dtype)) if is_maximum else _is_number(outside, 0.0))
    if isinstance(term, tirx.Cast):
        term = term.value
    if condition is None and isinstance(term, Call):
        return _load(term, is_maximum)
    _require(isinstance(term, TensorLoad))
    return term, condition


def _is_number(value: Any, number: float) -> bool:
    return isinstance(value, tirx.FloatImm) and value.value == number


def _is_least(value: Any, dtype: str) -> bool:
    return isinstance(value, tirx.FloatImm) and value.value <= tvm.tirx.min_value(dtype).value


def _analyzer(block: Any) -> Analyzer:
    """Return what knows the range of each of a block's axes."""
    analyzer = Analyzer()
    for axis in block.iter_vars:
        analyzer.bind(axis.var, axis.dom)
    return analyzer


def _before(load: Any, block: Any, sizes: PoolSizes) -> tuple[int, int]:
    """Return the padding above and to the left: how far before the image its first window begins."""
    axes = [axis.var for axis in block.iter_vars]
    (i, j), (k, m) = _pixel(axes, sizes), axes[4:]
    analyzer = _analyzer(block)
    steps = ((i, sizes.stride_rows, k, sizes.step_rows), (j, sizes.stride_columns, m, sizes.step_columns))
    found = [
        analyzer.simplify(place * stride + tap * step - index)
        for index, (place, stride, tap, step) in zip(_pixel(load.indices, sizes), steps, strict=True)
    ]
    _require(all(isinstance(each, tirx.IntImm) for each in found))
    rows, columns = map(int, found)
    return rows, columns


def _is_inside(condition: Any, load: Any, block: Any, sizes: PoolSizes) -> bool:
    """Say whether the condition holds just where the load is of an element of the image."""
    analyzer = _analyzer(block)
    extents = (sizes.image_rows, sizes.image_columns)
    inside = [each for index, extent in zip(_pixel(load.indices, sizes), extents, strict=True) for each in (index >= 0, index < extent)]
    if condition is None:
        return all(map(analyzer.can_prove, inside))
    every = tirx.all(*inside)
    with analyzer.constraint_scope(condition):
        implies = all(map(analyzer.can_prove, inside))
    with analyzer.constraint_scope(every):
        return implies and all(map(analyzer.can_prove, _conjuncts(condition)))


def _conjuncts(condition: Any) -> list[Any]:
    return [*_conjuncts(condition.a), *_conjuncts(condition.b)] if isinstance(condition, tirx.And) else [condition]


def _text(value: Any, places: Mapping[Any, str], sums: Any, axes: list[Any]) -> str:
    """Return an expression of a sum and of its place in CUDA."""

    def text(node: Any) -> str:
        if isinstance(node, TensorLoad):
            _require(node.source.same_as(sums) and all(one.same_as(other) for one, other in zip(node.indices, axes, strict=True)))
            return "sum"
        if isinstance(node, tirx.FloatImm | tirx.IntImm):
            return _number(node)
        if type(node) in _OPERATORS:
            return f"({text(node.a)} {_OPERATORS[type(node)]} {text(node.b)})"
        if type(node) in _FUNCTIONS:
            return f"{_FUNCTIONS[type(node)]}({text(node.a)}, {text(node.b)})"
        if isinstance(node, tirx.Cast):
            return _cast(str(node.ty.dtype), text(node.value))
        _require(node in places)
        return places[node]

    return text(value)


def _number(node: Any) -> str:
    """Return a literal in CUDA: an integer, or a finite number of float32."""
    if isinstance(node, tirx.IntImm):
        return str(int(node.value))
    _require(str(node.ty.dtype) == "float32" and math.isfinite(node.value))
    return f"{node.value}f"


def _cast(dtype: str, value: str) -> str:
    """Return a number in CUDA, converted to a dtype."""
    narrow = narrowed(dtype)
    return f"{cuda_type(dtype)}({value})" if narrow == "x" else narrow.replace("(x)", f"({value})")
