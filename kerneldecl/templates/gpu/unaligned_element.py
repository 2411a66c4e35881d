"""Owns an elementwise function's expression, divided by what it depends on: vectors, rows, places in a row, both.

Knows nothing of threads, or of how parameters are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Range, TensorLoad
from tvm.sym import Analyzer
from tvm_ffi import structural

_BINARY = (tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max)
_COMPARED = (tirx.LT, tirx.LE, tirx.GT, tirx.GE, tirx.EQ, tirx.NE)
_VALUES = (*_BINARY, *_COMPARED, tirx.Div, tirx.Mod, tirx.Cast, tirx.Select, Call, TensorLoad, tirx.Var)
_BOUND = 2**31


class UnknownPlaceError(Exception):
    """An expression that depends on places in another way than by its loads, comparisons and whole numbers."""


@dataclass
class Element:
    """A result's expression of variables: elements of vectors, terms of rows, terms of columns, and the place in a row.

    A term is a part of the expression that depends on the row alone, or on the place in a row and memory alone: it is computed once for
    each of the two rows that a vector may lie in, or for all vectors of a thread.
    """

    axes: Sequence[Any]
    """The result's axes."""
    extents: Sequence[int]
    flat_of: Mapping[Any, Any]
    """Arguments of one dimension, by the function's parameters."""
    column: Any = field(default_factory=lambda: tirx.Var("column", "int32"))
    digits: list[Any] = field(default_factory=list)
    """A variable for each axis before those of a row."""
    vectors: dict[Any, Any] = field(default_factory=dict)
    """For each argument that is read at the result's places, the variable of its element."""
    rows: list[tuple[Any, Any]] = field(default_factory=list)
    """Variable and expression of each term of rows, by digits."""
    columns: list[tuple[Any, Any]] = field(default_factory=list)
    """Variable and expression of each term of columns."""
    value: Any = None
    _analyzer: Any = field(default_factory=Analyzer)

    @classmethod
    def of(cls, axes: Sequence[Any], extents: Sequence[int], trailing: int, flat_of: Mapping[Any, Any], value: Any) -> Element:
        """Divide the value at some axes, the last of which (`trailing`) are those of a row; raise UnknownPlaceError where it cannot be."""
        element = cls(axes, extents, flat_of)
        element.digits = [tirx.Var(f"digit{at}", "int32") for at in range(len(extents) - trailing)]
        for axis, extent in zip(axes, extents, strict=True):
            element._analyzer.bind(axis, Range(0, extent))
        element.value = element._divided(value, guarded=False)
        if any(map(element._axes_in, (element.value, *(term for _, term in (*element.rows, *element.columns))))):
            raise UnknownPlaceError
        return element

    @property
    def has_column(self) -> bool:
        """Say whether results depend on their place in a row."""
        found: list[Any] = []
        for expr in (self.value, *(term for _, term in self.columns)):
            structural.structural_walk(expr, [(tirx.Var, lambda var: found.append(var) if var.same_as(self.column) else None)])
        return bool(found)

    def digits_of(self, row: Any) -> dict[Any, Any]:
        """Return the digits' values in a row."""
        found, step = {}, 1
        for digit, extent in reversed(list(zip(self.digits, self.extents, strict=False))):
            quotient = row if step == 1 else tirx.truncdiv(row, tirx.const(step, "int32"))
            found[digit] = quotient if digit.same_as(self.digits[0]) else tirx.truncmod(quotient, tirx.const(extent, "int32"))
            step *= extent
        return found

    def _axes_in(self, expr: Any) -> set[int]:
        places: set[int] = set()
        own = {axis: at for at, axis in enumerate(self.axes)}
        structural.structural_walk(expr, [(tirx.Var, lambda var: places.add(own[var]) if var in own else None)])
        return places

    def _is_of_row(self, used: set[int]) -> bool:
        return bool(used) and max(used) < len(self.digits)

    def _divided(self, expr: Any, *, guarded: bool) -> Any:
        return tvm_ffi.structural_map(expr, [(_VALUES, lambda each: self._visited(each, guarded=guarded))], order="pre")

    def _visited(self, expr: Any, *, guarded: bool) -> Any:
        """Return a part of the expression with variables for what depends on places. What is returned is visited again, and stays then.

        Behind a condition (`guarded`) loads stay where they are: their places may not exist.
        """
        used = self._axes_in(expr)
        if isinstance(expr, Call) and getattr(expr.op, "name", "").endswith("if_then_else") and used:
            condition, *values = expr.args
            return tirx.if_then_else(self._condition(condition, guarded=guarded), *(self._divided(each, guarded=True) for each in values))
        if isinstance(expr, TensorLoad) and self._is_flat(expr):
            return self.vectors.setdefault(expr.source, tirx.Var(f"own_{expr.source.name}", expr.ty.dtype))
        terms = self._terms_for(expr, used, guarded=guarded)
        if terms is not None:
            term = _term(terms, self._of_term(expr))
            return term if term.ty.dtype == expr.ty.dtype else tirx.Cast(expr.ty.dtype, term)
        if self._is_argument(expr):
            return self._load(expr, guarded=guarded)
        return self._in_32_bits(expr) if used and not _loads(expr) else expr

    def _condition(self, expr: Any, *, guarded: bool) -> Any:
        """Return a condition that is computed whole: of several, C++ makes branches, which no load crosses."""
        return self._flag(expr, guarded=guarded) != 0 if isinstance(expr, tirx.And) else self._divided(expr, guarded=guarded)

    def _flag(self, expr: Any, *, guarded: bool) -> Any:
        """Return 1 where a condition holds, else 0. What depends on the row alone is a term."""
        if isinstance(expr, tirx.And):
            return tirx.bitwise_and(self._flag(expr.a, guarded=guarded), self._flag(expr.b, guarded=guarded))
        if isinstance(expr, _COMPARED) and self._is_of_row(self._axes_in(expr)):
            one, other = self._narrowed(expr.a, in_term=True), self._narrowed(expr.b, in_term=True)
            if one is not None and other is not None:
                return _term(self.rows, _choice(type(expr)(one, other)))
        return _choice(self._divided(expr, guarded=guarded))

    def _terms_for(self, expr: Any, used: set[int], *, guarded: bool) -> list[tuple[Any, Any]] | None:
        """Return the terms of which a part of the expression is one, None where it is none."""
        loads = _loads(expr)
        if str(expr.ty.dtype) == "bool" or (guarded and loads) or any(map(self._is_flat, loads)):
            return None
        if self._is_of_row(used) or (not used and self._is_argument(expr)):
            return self.rows
        return self.columns if loads and used and min(used) >= len(self.digits) else None

    def _in_32_bits(self, expr: Any) -> Any:
        """Return a comparison or a whole number of places in 32 bits, anything else as it is."""
        if isinstance(expr, _COMPARED):
            one, other = self._narrowed(expr.a), self._narrowed(expr.b)
            return expr if one is None or other is None else type(expr)(one, other)
        narrow = self._narrowed(expr)
        return expr if narrow is None else tirx.Cast(expr.ty.dtype, narrow)

    def _is_argument(self, expr: Any) -> bool:
        """Say whether a part of the expression is a load of the function that was not replaced yet."""
        return isinstance(expr, TensorLoad) and expr.source in self.flat_of

    def _is_flat(self, load: Any) -> bool:
        is_whole = [int(extent) for extent in load.source.shape] == list(self.extents)
        return is_whole and all(index.same_as(axis) for index, axis in zip(load.indices, self.axes, strict=True))

    def _of_term(self, expr: Any) -> Any:
        """Return a term's expression of digits and the column."""

        def visited(each: Any) -> Any:
            if self._is_argument(each):
                return self.flat_of[each.source][self._of_term(_offset(each, range(len(each.indices))))]
            narrow = self._narrowed(each, in_term=True) if self._axes_in(each) else None
            return each if narrow is None else tirx.Cast(each.ty.dtype, narrow)

        narrow = self._narrowed(expr, in_term=True)
        return narrow if narrow is not None else tvm_ffi.structural_map(expr, [((*_BINARY, TensorLoad, tirx.Var), visited)], order="pre")

    def _load(self, load: Any, *, guarded: bool) -> Any:
        """Return the load of an element of flat memory: the row's part of its place is one term."""
        dims = range(len(load.indices))
        of_row = [self._is_of_row(self._axes_in(index)) and not (guarded and _loads(index)) for index in load.indices]
        places = []
        if any(of_row):
            places.append(_term(self.rows, self._of_term(_offset(load, [dim for dim in dims if of_row[dim]]))))
        if not all(of_row):
            rest = _offset(load, [dim for dim in dims if not of_row[dim]])
            narrow = self._narrowed(rest)
            places.append(self._divided(rest, guarded=guarded) if narrow is None else narrow)
        dtype = "int64" if "int64" in {str(place.ty.dtype) for place in places} else "int32"
        wide = [place if str(place.ty.dtype) == dtype else tirx.Cast(dtype, place) for place in places]
        return self.flat_of[load.source][wide[0] if len(wide) == 1 else wide[0] + wide[1]]

    def _narrowed(self, expr: Any, *, in_term: bool = False) -> Any:
        """Return whole numbers of places in 32 bits, None for what depends on more or may not fit. Other than in terms, rows are terms."""
        if isinstance(expr, tirx.IntImm):
            return tirx.const(int(expr.value), "int32") if abs(int(expr.value)) < _BOUND else None
        used = self._axes_in(expr)
        if used and not in_term and self._is_of_row(used):
            narrow = self._narrowed(expr, in_term=True)
            return None if narrow is None else _term(self.rows, narrow)
        if isinstance(expr, tirx.Var):
            return self._narrow_axis(next(iter(used))) if used else None
        if not isinstance(expr, _BINARY) or not str(expr.ty.dtype).startswith("int") or not self._fits(expr):
            return None
        a, b = self._narrowed(expr.a, in_term=in_term), self._narrowed(expr.b, in_term=in_term)
        return None if a is None or b is None else type(expr)(a, b)

    def _narrow_axis(self, at: int) -> Any:
        if at < len(self.digits):
            return self.digits[at]
        step = math.prod(self.extents[at + 1 :])
        place = self.column if step == 1 else tirx.truncdiv(self.column, tirx.const(step, "int32"))
        return place if at == len(self.digits) else tirx.truncmod(place, tirx.const(self.extents[at], "int32"))

    def _fits(self, expr: Any) -> bool:
        """Say whether a whole number of places fits 32 bits."""
        bound = self._analyzer.const_int_bound(expr)
        return int(bound.min_value) > -_BOUND and int(bound.max_value) < _BOUND


def _term(terms: list[tuple[Any, Any]], made: Any) -> Any:
    """Return the variable of a term, a new one where no equal term has one."""
    for var, known in terms:
        if tvm_ffi.structural_equal(known, made):
            return var
    terms.append((tirx.Var(f"term{len(terms)}", made.ty.dtype), made))
    return terms[-1][0]


def _offset(load: Any, dims: Sequence[int]) -> Any:
    """Return what some of a load's indices add to its place in flat memory."""
    shape = [int(extent) for extent in load.source.shape]
    parts = []
    for dim in dims:
        index, step = load.indices[dim], math.prod(shape[dim + 1 :])
        parts.append(index if step == 1 else index * tirx.const(step, index.ty.dtype))
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _choice(condition: Any) -> Any:
    return tirx.Select(condition, tirx.const(1, "int32"), tirx.const(0, "int32"))


def _loads(expr: Any) -> list[Any]:
    found: list[Any] = []
    structural.structural_walk(expr, [(TensorLoad, found.append)])
    return found


def replaced(expr: Any, values: Mapping[Any, Any]) -> Any:
    """Return an expression with values for variables."""
    return tvm_ffi.structural_map(expr, [(tirx.Var, lambda var: values.get(var, var))])
