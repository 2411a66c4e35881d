"""Owns arithmetic of extents that are known as expressions of a model's dynamic dimensions, and what can be proved of them.

Knows nothing of ONNX, nor of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tvm
from tvm.sym import Analyzer

LARGEST = 2**31 - 1
"""The largest extent that is thought of."""


class UnknownError(ValueError):
    """What is asked of extents depends on their sizes at run time."""


def plain(extent: Any) -> Any:
    """Return an extent as an int where it is a number, else simplified."""
    if isinstance(extent, int):
        return extent
    found = extent if isinstance(extent, tvm.tirx.IntImm) else _analyzer(extent).simplify(extent)
    return int(found) if isinstance(found, tvm.tirx.IntImm) else found


def is_same(left: Any, right: Any) -> bool:
    """Say whether two extents are equal, for one reason or another; raise UnknownError where some sizes make them so and others do not."""
    left, right = plain(left), plain(right)
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    if is_proved(left - right == 0, left, right):
        return True
    if is_proved(left - right != 0, left, right):
        return False
    raise UnknownError(f"whether {left} is {right} depends on sizes at run time")


def are_equal(left: Any, right: Any) -> bool:
    """Say whether two extents are equal whatever the sizes are."""
    try:
        return is_same(left, right)
    except UnknownError:
        return False


def is_less(left: Any, right: Any) -> bool:
    """Say whether an extent is less than another; raise UnknownError where that depends on sizes."""
    left, right = plain(left), plain(right)
    if isinstance(left, int) and isinstance(right, int):
        return left < right
    if is_proved(left < right, left, right):
        return True
    if is_proved(left >= right, left, right):
        return False
    raise UnknownError(f"whether {left} is less than {right} depends on sizes at run time")


def least(left: Any, right: Any) -> Any:
    try:
        return left if is_less(left, right) else right
    except UnknownError:
        return plain(tvm.tirx.min(left, right))


def most(left: Any, right: Any) -> Any:
    try:
        return right if is_less(left, right) else left
    except UnknownError:
        return plain(tvm.tirx.max(left, right))


def quotient(left: Any, right: Any) -> Any:
    """Return left / right, truncated; raise UnknownError for symbolic extents that may be negative."""
    left, right = plain(left), plain(right)
    if isinstance(left, int) and isinstance(right, int):
        if right == 0:
            raise UnknownError("a division by 0")
        return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
    if is_less(left, 0) or is_less(right, 0):
        raise UnknownError("a quotient of negative extents")
    return ratio([left], [right])


def remainder(left: Any, right: Any) -> Any:
    left, right = plain(left), plain(right)
    if is_less(left, 0) or is_less(right, 0):
        raise UnknownError("a remainder of negative extents")
    return left % right if isinstance(left, int) and isinstance(right, int) else plain(tvm.tirx.floormod(left, right))


def product(factors: Sequence[Any]) -> Any:
    found: Any = 1
    for factor in factors:
        found = found * factor
    return plain(found)


def ratio(above: Sequence[Any], below: Sequence[Any]) -> Any:
    """Return the quotient of two products of extents. Equal symbolic factors cancel, which TVM's simplifier does not do."""
    left, right = list(_factors(above)), []
    for factor in _factors(below):
        same = next((at for at, each in enumerate(left) if not isinstance(factor, int) and are_equal(each, factor)), None)
        if same is None:
            right.append(factor)
        else:
            del left[same]
    over, under = product(left), product(right)
    if isinstance(over, int) and isinstance(under, int):
        return over // under if under else 0
    return over if under == 1 else plain(tvm.tirx.floordiv(over, under))


def _factors(extents: Sequence[Any]) -> Iterator[Any]:
    for extent in map(plain, extents):
        if isinstance(extent, tvm.tirx.Mul):
            yield from _factors([extent.a, extent.b])
        else:
            yield extent


def is_proved(condition: Any, *extents: Any) -> bool:
    """Say whether a condition on extents holds whatever the sizes of their dimensions are."""
    return bool(_analyzer(*extents).can_prove(condition))


def symbols_in(extent: Any) -> set[Any]:
    """Return the dimensions in an extent."""
    return set() if isinstance(extent, int) else set(tvm.tirx.analysis.undefined_vars(extent))


def substituted(extent: Any, symbol: Any, value: Any) -> Any:
    """Return an extent with another one in the place of a dimension."""
    if symbol not in symbols_in(extent):
        return extent
    analyzer = Analyzer()
    analyzer.bind(symbol, tvm.tirx.IntImm("int64", value) if isinstance(value, int) else value)
    found = analyzer.simplify(extent)
    return int(found) if isinstance(found, tvm.tirx.IntImm) else found


def _analyzer(*extents: Any) -> Analyzer:
    """Return an analyzer that knows that dimensions have no negative sizes."""
    analyzer = Analyzer()
    for symbol in {each for extent in extents for each in symbols_in(extent)}:
        analyzer.bind(symbol, tvm.ir.Range.from_min_extent(tvm.tirx.IntImm("int64", 0), tvm.tirx.IntImm("int64", LARGEST)))
    return analyzer
