"""Owns kernels that take any number of rows: what a template makes of several sizes, as one function of the number of rows.

Knows nothing of templates, tiles or targets, nor of how the sizes are declared.

A template schedules static shapes. Applied with the same parameters to the same computation of other numbers of rows it gives the same
function with other integers. Each of these is a formula `a * rows + b * units + c`, `units` being the rows rounded up to whole tiles.
The formulas are solved from some sizes and hold at others, so the function of any number of rows is, at each of these, the static one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm_ffi import structural

from kerneldecl.model import Arch, Signature, Value
from kerneldecl.rows import Rows

UPTO = "kerneldecl.rows_upto"
"""The attribute of a function with the largest number of rows that it is called with."""
TRACE = "trace"
"""The template that replays a recorded schedule, of one number of rows."""
SIZES = 5
"""Sizes that a function is made of: three determine a formula, the others confirm it."""
MANY_SMS = 2**20
"""SMs of a GPU on which all blocks of a kernel run at once."""
FAR = 1024
"""Rows of the last of these sizes at least, where nothing tells of tiles."""


Apply = Callable[[int], tvm.IRModule | None]
"""What a template makes of a number of rows; None where it gives nothing."""


@dataclass(frozen=True)
class Formula:
    """An integer of a kernel as a function of its rows: a * rows + b * units + c."""

    a: int
    b: int
    c: int

    def at(self, rows: Any, units: Any) -> Any:
        return self.a * rows + self.b * units + self.c


@dataclass(frozen=True)
class _Size:
    """What a template makes of one number of rows."""

    rows: int
    units: int
    func: Any
    integers: tuple[int, ...]
    """Its integers, in order of occurrence."""
    skeleton: Any
    """The function with zeros in their place."""


def rows_of(spec: Mapping[str, Any]) -> int:
    """Return the number of rows that a workload's own is."""
    return Rows.from_json(spec["rows"]).of(spec["attrs"])


def with_upto(mod: tvm.IRModule, upto: int) -> tvm.IRModule:
    """Return a module whose function says how many rows it may be called with."""
    return tvm.IRModule({"main": mod["main"].with_attr(UPTO, upto)})


def unlimited_archs(spec: Mapping[str, Any], arch: Arch) -> tuple[Arch | None, ...]:
    """Return the arch with a GPU of any number of SMs, whose form is that of all numbers where it can be; None where none is tried.

    The last tuned number may stand for all above it, which take many waves: it has such a form only where it has no other.
    """
    if arch.gpu is None:
        return (None,)
    unlimited = replace(arch, gpu=replace(arch.gpu, sm_count=MANY_SMS))
    rows = Rows.from_json(spec["rows"])
    return (None, unlimited) if rows_of(spec) == rows.tuned[-1] < rows.upto else (unlimited,)


def varying_extents(one: Signature, other: Signature, rows: Rows, now: int) -> list[list[int]]:
    """Return the argument and the dimension of each extent that is the number of rows; raise ValueError where others depend on it.

    `one` is the signature of `now` rows, `other` that of two more.
    """
    found: list[list[int]] = []
    for place, (arg, later) in enumerate(zip(one.args, other.args, strict=True)):
        for dim, (extent, grown) in enumerate(zip(arg.shape, later.shape, strict=True)):
            if (extent, grown) == (now, now + 2):
                found.append([place, dim])
            elif extent != grown:
                raise ValueError(
                    f"dimension {dim} of {arg.name} is {extent} for {now} rows; expected {rows.attribute} itself, or no change"
                )
    if not any(place < len(one.inputs) for place, _ in found):
        raise ValueError(f"{rows.attribute} is an extent of no input: nothing tells a call's rows")
    return found


class Unit(NamedTuple):
    """The rows that a kernel computes at once."""

    rows: int
    tile: int
    """Rows to which the function is padded: the last unit lacks fewer than these."""
    group: int = 1
    """Units of a rasterization group: functions of whole groups may have a form of their own, which is not that of all numbers."""

    def whole_groups(self) -> Unit:
        """Return a unit of a whole group: the form of functions that do not take a part of one."""
        return Unit(self.rows * self.group, self.tile)


ONE_ROW = Unit(1, 1)
"""Of functions that compute each row by itself."""


def unit_of(params: Mapping[str, Value]) -> Unit:
    """Return the rows that a candidate with these parameters computes at once."""
    block, cluster = (params.get(name) for name in (("block_n", "cluster_n") if params.get("swap_ab") else ("block_m", "cluster_m")))
    if block is None:
        block = _rows_of_attention(params)
    found = [block, cluster, params.get("rows")]
    rows = math.prod(value for value in found if type(value) is int and value > 1)
    tile, group = params.get("tile_m", block), params.get("raster_group")
    return Unit(rows, min(rows, tile) if type(tile) is int else rows, max(1, group) if type(group) is int else 1)


def _rows_of_attention(params: Mapping[str, Value]) -> Value | None:
    """Return the rows of queries of a CTA of attention, 64 a warpgroup on wgmma and 16 a fragment of a warp; None of other kernels."""
    counts = {("consumers", "q_stages"): ("consumers", "cluster"), ("fragments", "q_in_registers"): ("fragments", "warps")}
    for names, factors in counts.items():
        if all(name in params for name in names):
            rows = 64 if "consumers" in names else 16
            return rows * math.prod(value for name in factors if type(value := params.get(name)) is int)
    return None


def for_any_rows(apply: Apply, tuned: int, unit: Unit, unlimited: Apply | None = None) -> tvm.IRModule | None:
    """Return the module whose `main` takes any number of rows, None where the template gives no such function.

    `apply` gives the template's module for a number of rows. Sizes are odd, near the one that the parameters are tuned for: what divides
    rows by chance is not relied on, and a kernel stays as persistent as it is there. `unlimited` gives what the template makes for a GPU of
    any number of SMs: that form is taken where it is the same at the tuned number, which one wave of blocks computes then. Other sizes may
    need more, and have another form for so many SMs. Where units come in groups, a function of any number of units is looked for first:
    one of whole groups computes up to a group's tiles in vain.
    """
    if unit.group > 1:
        return _of_units(apply, tuned, unit, unlimited) or _of_units(apply, tuned, unit.whole_groups(), unlimited)
    return _of_units(apply, tuned, unit, unlimited)


def _of_units(apply: Apply, tuned: int, unit: Unit, unlimited: Apply | None) -> tvm.IRModule | None:
    first = -(-tuned // unit.rows)
    if unlimited is not None and _are_same(apply, unlimited, first, unit):
        found = _for_any_rows(unlimited, first, unit)
        if found is not None:
            return found
    return _for_any_rows(apply, first, unit)


def _are_same(apply: Apply, other: Apply, units: int, unit: Unit) -> bool:
    """Say whether two templates give the same function for the first number of rows with so many units."""
    rows = next((rows for rows, _ in _odd_rows(units, unit)), None)
    one, two = (None, None) if rows is None else (apply(rows), other(rows))
    return one is not None and two is not None and structural.structural_equal(one["main"], two["main"])


def _for_any_rows(apply: Apply, first: int, unit: Unit) -> tvm.IRModule | None:
    starts = (first, max(first, 2), max(2, first - SIZES - 1)) if unit.group == 1 else (first, max(first, unit.group + 1))
    for start in dict.fromkeys(starts):
        found = list(_sizes(apply, start, unit))
        if len(found) == SIZES and (formulas := _formulas(found)) is not None:
            return _function(found[0], formulas, unit.rows)
    return None


def _sizes(apply: Callable[[int], tvm.IRModule | None], start: int, unit: Unit) -> Iterator[_Size]:
    """Yield what the template makes of some sizes, as long as it gives functions of one structure."""
    before: _Size | None = None
    for rows, units in itertools.islice(_odd_rows(start, unit), SIZES):
        mod = apply(rows)
        if mod is None:
            return
        size = _size(rows, units, mod["main"])
        if before and not _are_alike(before, size):
            return
        before = size
        yield size


def _odd_rows(start: int, unit: Unit) -> Iterator[tuple[int, int]]:
    """Yield odd numbers of rows with their units. What lacks to whole tiles is no linear function of the units."""
    if unit.rows == 1:
        # What a tile hides, whose rows no parameter tells, shows far away: near the first size its count may be constant.
        near = [start | 1, (start | 1) + 2, (start | 1) + 4, (start | 1) + 6]
        yield from ((rows, rows) for rows in (*near, max(FAR, 2 * start) | 1))
        return
    if unit.tile < 3:
        return  # all that are not whole tiles lack one row
    counts = (units for units in itertools.count(start) if unit.group == 1 or units % unit.group)
    for units, place in zip(counts, itertools.cycle((0, 1, 0, 2, 1))):
        odd = [rows for lacking in range(1, unit.tile) if (rows := units * unit.rows - lacking) % 2]
        if odd:
            yield odd[place % len(odd)], units


def _size(rows: int, units: int, func: Any) -> _Size:
    integers: list[int] = []

    def noted(value: Any) -> Any:
        integers.append(int(value.value))
        return tirx.IntImm(value.ty.dtype, 0)

    skeleton = structural.structural_map(func, [(tirx.IntImm, noted)], order="post")
    return _Size(rows, units, func, tuple(integers), skeleton)


def _are_alike(one: _Size, other: _Size) -> bool:
    return len(one.integers) == len(other.integers) and structural.structural_equal(one.skeleton, other.skeleton)


def _formulas(sizes: Sequence[_Size]) -> list[Formula] | None:
    places = [(size.rows, size.units) for size in sizes]
    found: list[Formula] = []
    for values in zip(*(size.integers for size in sizes), strict=True):
        formula = solved(places, values)
        if formula is None:
            return None
        found.append(formula)
    return found


def solved(places: Sequence[tuple[int, int]], values: Sequence[int]) -> Formula | None:
    """Return the formula with integer coefficients that gives these values at these (rows, units); None where there is none."""
    (m0, q0), (m1, q1), (m2, q2) = places[:3]
    v0, v1, v2 = values[:3]
    if len({*values}) == 1:
        return Formula(0, 0, v0)
    determinant = (m1 - m0) * (q2 - q0) - (m2 - m0) * (q1 - q0)
    if not determinant and any(rows != units for rows, units in places):
        return None  # rows and units grow together: no value tells them apart
    guesses = [(Fraction(v1 - v0, m1 - m0), Fraction(0)), (Fraction(0), Fraction(v1 - v0, q1 - q0))]
    if determinant:
        a = Fraction((v1 - v0) * (q2 - q0) - (v2 - v0) * (q1 - q0), determinant)
        b = Fraction((m1 - m0) * (v2 - v0) - (m2 - m0) * (v1 - v0), determinant)
        guesses.append((a, b))
    for a, b in guesses:
        if a.denominator == b.denominator == 1:
            formula = Formula(int(a), int(b), int(v0 - a * m0 - b * q0))
            if all(formula.at(*place) == value for place, value in zip(places, values, strict=True)):
                return formula
    return None


def _function(size: _Size, formulas: Sequence[Formula], unit: int) -> tvm.IRModule:
    """Return a size's function with formulas of its rows, a variable of its arguments' shapes, in place of its integers."""
    rows = tirx.Var("rows", _index_dtype(size.func))
    # At least one row: divisors of unknown sign take comparisons in each kernel.
    least = tirx.Max(rows, tirx.IntImm(rows.ty.dtype, 1))
    units = tirx.floordiv(least + (unit - 1), unit) if unit > 1 else rows
    remaining = iter(formulas)

    def placed(value: Any) -> Any:
        formula = next(remaining)
        if formula.a == formula.b == 0:
            return value
        expr = formula.at(rows, units)
        return expr if expr.ty.dtype == value.ty.dtype else tirx.Cast(value.ty.dtype, expr)

    func = structural.structural_map(size.func, [(tirx.IntImm, placed)], order="post")
    func = structural.structural_map(func, [(kind, _divided) for kind in (tirx.FloorDiv, tirx.FloorMod)], order="post")
    return tvm.IRModule({"main": tirx.PrimFunc(func.params, func.body, func.ret_type, func.attrs)})


def _divided(value: Any) -> Any:
    """Return a division by at least one. Behind the last tile a rasterization group has no rows where the number of them divides all."""
    return type(value)(value.a, tirx.Max(value.b, tirx.IntImm(value.b.ty.dtype, 1))) if isinstance(value.b, tirx.Min) else value


def arguments_of(func: Any) -> list[tuple[tuple[int | str, ...], str]]:
    """Return (shape, dtype) of each buffer parameter, extents that are known when it is called as text."""
    extents = (tuple(int(each) if isinstance(each, tirx.IntImm) else str(each) for each in param.shape) for param in func.params)
    return [(shape, str(param.dtype)) for shape, param in zip(extents, func.params, strict=True)]


def _index_dtype(func: Any) -> str:
    return next(str(extent.ty.dtype) for param in func.params for extent in param.shape)
