"""Owns the pass that makes parallel sums of cumulative sums and of sorts, which TVM lowers to no TensorIR.

Knows nothing of where the module comes from, nor of how sums are scheduled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tvm import relax, te, tirx

from kerneldecl.compiler.graph.rewriting import Rewriter, dtype_of, graph_pass, static_shape

MOST_SORTED = 4096
"""Elements of a row that is sorted by comparing all with all; a sort of n log n steps, such as TVM's, overtakes that for longer ones."""
_SCANS: Mapping[str, tuple[Callable[..., Any], int]] = {
    "relax.cumsum": (te.sum, 0),
    "relax.cumprod": (te.comm_reducer(lambda a, b: a * b, lambda dtype: tirx.const(1, dtype), name="product"), 1),
}
"""How a scan combines elements, and what changes nothing."""
_SORTS = frozenset({"relax.sort", "relax.argsort", "relax.topk"})


@graph_pass
class ExpandScansAndSorts(Rewriter):
    """Writes cumulative sums and products, sorts and top-k out in functions that any target has kernels for.

    - A scan is done in blocks of about sqrt(n) elements: scans within them, of their ends, and the two combined, n sqrt(n) steps.
    - In a sort each element's place is the count of those before it, equal ones in their order, n^2 steps. NaN is the largest,
      as in torch. Rows of more than 4096 elements are left to TVM.
    """

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        shape = static_shape(call.args[0]) if call.args else None
        if shape is None or 0 in shape or not shape:
            return call
        if operator in _SCANS:
            return self._scanned(call, operator)
        return self._sorted(call, operator) if operator in _SORTS else call

    def _scanned(self, call: relax.Call, operator: str) -> relax.Expr:
        axis = call.attrs.axis
        if axis is None:
            return call  # of the flattened tensor; importers reshape it first
        dtype = dtype_of(self.builder_.normalize(call))
        combine, neutral = _SCANS[operator]
        name = operator.removeprefix("relax.")
        scan = _Scan(combine, neutral, int(axis) % len(call.args[0].ty.shape), dtype, bool(call.attrs.exclusive))
        within = self.emitted(self.builder_.call_te(scan.within, call.args[0], primfunc_name_hint=f"{name}_within"))
        ends = self.emitted(self.builder_.call_te(scan.ends, within, primfunc_name_hint=f"{name}_ends"))
        extents = static_shape(call.args[0])
        return self.builder_.call_te(scan.combined, within, ends, extents, primfunc_name_hint=name)

    def _sorted(self, call: relax.Call, operator: str) -> relax.Expr:
        value, attrs = call.args[0], call.attrs
        extents = static_shape(value) or ()
        axis = int(attrs.axis) % len(extents)
        if extents[axis] > MOST_SORTED:
            return call
        is_largest_first = bool(attrs.largest) if operator == "relax.topk" else bool(attrs.descending)
        count = extents[axis]
        if operator == "relax.topk" and int(attrs.k) > 0:
            count = min(int(attrs.k), count)
        places = self.emitted(self.builder_.call_te(lambda x: _places(x, axis, is_largest_first), value, primfunc_name_hint="places"))
        wanted = {"relax.sort": "values", "relax.argsort": "indices", "relax.topk": str(getattr(attrs, "ret_type", "both"))}[operator]
        results: list[relax.Expr] = []
        if wanted in {"values", "both"}:
            results.append(self.builder_.call_te(lambda x, p: _values(x, p, axis, count), value, places, primfunc_name_hint="sorted"))
        if wanted in {"indices", "both"}:
            dtype = str(attrs.dtype)
            results.append(self.builder_.call_te(lambda p: _indices(p, axis, count, dtype), places, primfunc_name_hint="sorted_indices"))
        return results[0] if len(results) == 1 else relax.Tuple([self.emitted(each) for each in results])


class _Scan:
    """The three functions of a scan along an axis, which is blocked: [n] as [blocks, size]."""

    def __init__(self, combine: Callable[..., Any], neutral: int, axis: int, dtype: str, is_exclusive: bool) -> None:
        self._combine, self._neutral, self._axis, self._dtype, self._is_exclusive = combine, neutral, axis, dtype, is_exclusive

    def within(self, x: te.Tensor) -> te.Tensor:
        """Return the scans within blocks, [..., blocks, size, ...]; elements behind the end change nothing."""
        axis, extent = self._axis, int(x.shape[self._axis])
        size = 1 << math.ceil(math.log2(extent) / 2)
        blocks = -(-extent // size)
        earlier = te.reduce_axis((0, size), "earlier")

        def element(*at: Any) -> Any:
            source = at[axis] * size + earlier
            inside = tirx.all(earlier <= at[axis + 1], source < extent)
            read = x(*at[:axis], tirx.min(source, extent - 1), *at[axis + 2 :]).astype(self._dtype)
            return self._combine(tirx.Select(inside, read, tirx.const(self._neutral, self._dtype)), axis=earlier)

        return te.compute((*x.shape[:axis], blocks, size, *x.shape[axis + 1 :]), element, name="within")

    def ends(self, within: te.Tensor) -> te.Tensor:
        """Return for each block what all blocks before it make, [..., blocks, ...]."""
        axis, size = self._axis, int(within.shape[self._axis + 1])
        before = te.reduce_axis((0, int(within.shape[axis])), "before")

        def element(*at: Any) -> Any:
            read = within(*at[:axis], before, size - 1, *at[axis + 1 :])
            return self._combine(tirx.Select(before < at[axis], read, tirx.const(self._neutral, self._dtype)), axis=before)

        return te.compute((*within.shape[: axis + 1], *within.shape[axis + 2 :]), element, name="ends")

    def combined(self, within: te.Tensor, ends: te.Tensor, extents: Any) -> te.Tensor:
        """Return the scan, in the shape of what was scanned."""
        axis, size = self._axis, int(within.shape[self._axis + 1])
        neutral = tirx.const(self._neutral, self._dtype)

        def element(*at: Any) -> Any:
            place = at[axis] - 1 if self._is_exclusive else at[axis]
            source = tirx.max(place, 0) if self._is_exclusive else place
            block, rest = tirx.floordiv(source, size), tirx.floormod(source, size)
            inner, outer = within(*at[:axis], block, rest, *at[axis + 1 :]), ends(*at[:axis], block, *at[axis + 1 :])
            found = inner * outer if self._neutral else inner + outer
            return tirx.Select(place >= 0, found, neutral) if self._is_exclusive else found

        return te.compute(tuple(extents), element, name="scan")


def _places(x: te.Tensor, axis: int, is_largest_first: bool) -> te.Tensor:
    """Return the place of each element when its row is sorted: the count of elements before it, int32 of the shape of `x`."""
    extent = int(x.shape[axis])
    other = te.reduce_axis((0, extent), "other")

    def element(*at: Any) -> Any:
        mine, its = x(*at), x(*at[:axis], other, *at[axis + 1 :])
        is_before = _is_less(mine, its) if is_largest_first else _is_less(its, mine)
        comes_first = tirx.any(is_before, tirx.all(_is_equal(mine, its), other < at[axis]))
        return te.sum(tirx.Select(comes_first, tirx.const(1, "int32"), tirx.const(0, "int32")), axis=other)

    return te.compute(x.shape, element, name="places")


def _is_less(a: Any, b: Any) -> Any:
    """Say whether a is less than b, where NaN is larger than all other values."""
    if "float" not in str(a.ty.dtype):
        return a < b
    return tirx.any(a < b, tirx.all(tirx.isnan(b), tirx.Not(tirx.isnan(a))))


def _is_equal(a: Any, b: Any) -> Any:
    """Say whether two values are equal, or both NaN. It is not `not less`: TVM makes `a >= b` of `not a < b`."""
    return tirx.any(a == b, tirx.all(tirx.isnan(a), tirx.isnan(b))) if "float" in str(a.ty.dtype) else a == b


def _values(x: te.Tensor, places: te.Tensor, axis: int, count: int) -> te.Tensor:
    def read(source: Any, at: tuple[Any, ...]) -> Any:
        return x(*at[:axis], source, *at[axis + 1 :])

    return _placed(places, axis, count, str(x.dtype), read)


def _indices(places: te.Tensor, axis: int, count: int, dtype: str) -> te.Tensor:
    return _placed(places, axis, count, dtype, lambda source, _: source.astype(dtype))


def _placed(places: te.Tensor, axis: int, count: int, dtype: str, read: Callable[[Any, tuple[Any, ...]], Any]) -> te.Tensor:
    """Return the first elements in the order of their places: each is the sum of one element and zeros."""
    source = te.reduce_axis((0, int(places.shape[axis])), "source")

    def element(*at: Any) -> Any:
        is_there = places(*at[:axis], source, *at[axis + 1 :]) == at[axis].astype("int32")
        return te.sum(tirx.Select(is_there, read(source, at), tirx.const(0, dtype)), axis=source)

    return te.compute((*places.shape[:axis], count, *places.shape[axis + 1 :]), element, name="placed")
