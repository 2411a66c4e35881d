"""Owns how four neighbouring integers of 4 bits become int8 together: as the bytes of one word.

Knows nothing of tiles or schedules. Element by element an integer takes four instructions and more; a word's four take seven: bytes are put
together, nibbles masked, and 8 is taken from each. A bit above each nibble keeps the subtractions apart.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad
from tvm.ir.prim.expr import BitwiseAnd, RShift
from tvm.script import tirx as T  # noqa: N812  # TVM's name
from tvm.sym import Analyzer

WORD_VALUES = 4
"""Values of a word."""
WORD_DTYPE = "uint32"
NIBBLES, SIGNS, EIGHTS = 0x0F0F0F0F, 0x80808080, 0x08080808
LOW_NIBBLES, HIGH_NIBBLES = 0x000F000F, 0x00F000F0
"""The same of two bytes, which lie two bytes apart."""


class Words(NamedTuple):
    """What makes the words of an operand [rows, k / 4]: a word and the region that it loads, as expressions of two axes."""

    axes: tuple[Any, Any]
    value: Any
    source: Any
    region: tuple[tuple[Any, int], ...]
    """Least index and extent of each dimension."""

    def at(self, row: Any, place: Any) -> Any:
        """Return the word of a row, of which `place` is counted in words."""
        return self._placed(self.value, row, place)

    def read(self, row: Any, place: Any) -> Any:
        """Return the region that it loads."""
        ranges = [tvm.ir.Range.from_min_extent(self._placed(least, row, place), T.int64(extent)) for least, extent in self.region]
        return tirx.BufferRegion(self.source, ranges)

    def _placed(self, expr: Any, row: Any, place: Any) -> Any:
        places = dict(zip(self.axes, (row, place), strict=True))
        return tvm_ffi.structural_map(expr, [(tirx.Var, lambda var: places.get(var, var))])


def words_of(values: Any, rows: int, k: int) -> Words | None:
    """Return the words of values, an expression of a row and a place along k; None where they are no integers of 4 bits less 8."""
    row, place = (tirx.Var(name, "int64") for name in ("row", "word"))
    analyzer = Analyzer()
    for var, extent in ((row, rows), (place, k // WORD_VALUES)):
        analyzer.bind(var, tvm.ir.Range(T.int64(0), T.int64(extent)))
    found = [_nibble(values(row, place * T.int64(WORD_VALUES) + T.int64(at))) for at in range(WORD_VALUES)]
    nibbles = [(load, analyzer.simplify(shift)) for load, shift in filter(None, found)]
    if len(nibbles) < WORD_VALUES or any(not load.source.same_as(nibbles[0][0].source) for load, _ in nibbles):
        return None
    loads, shifts = zip(*nibbles, strict=True)
    indices = [[analyzer.simplify(index) for index in load.indices] for load in loads]
    apart = [[analyzer.simplify(index - first) for index, first in zip(each, indices[0], strict=True)] for each in indices]
    if not all(isinstance(each, tirx.IntImm) and int(each) >= 0 for distances in apart for each in distances):
        return None
    masked = _masked([loads[0].source[tuple(each)] for each in indices], apart, shifts)
    if masked is None:
        return None
    region = tuple((least, 1 + max(int(each[at]) for each in apart)) for at, least in enumerate(indices[0]))
    return Words((row, place), ((masked | _word(SIGNS)) - _word(EIGHTS)) ^ _word(SIGNS), loads[0].source, region)


def _nibble(value: Any) -> tuple[Any, Any] | None:
    """Return the load and the shift of `int8(int32(load >> shift & 15) - 8)`, None for other values."""
    match value:
        case tirx.Cast(value=tirx.Sub(a=tirx.Cast(value=BitwiseAnd(a=RShift(a=load, b=shift), b=mask)), b=centre)):
            is_known = (int(getattr(mask, "value", 0)), int(getattr(centre, "value", 0))) == (15, 8)
            return (load, shift) if is_known and isinstance(load, TensorLoad) else None
        case _:
            return None


def _masked(loads: list[Any], apart: list[list[Any]], shifts: tuple[Any, ...]) -> Any | None:
    """Return a word of four nibbles, one in each byte: of one nibble of four bytes, or of both nibbles of two."""
    wide = [tirx.Cast(WORD_DTYPE, load) for load in loads]
    if all(tvm_ffi.structural_equal(shift, shifts[0]) for shift in shifts):
        together = wide[0] | wide[1] << _word(8) | wide[2] << _word(16) | wide[3] << _word(24)
        return together >> tirx.Cast(WORD_DTYPE, shifts[0]) & _word(NIBBLES)
    are_pairs = tvm_ffi.structural_equal(apart[0], apart[1]) and tvm_ffi.structural_equal(apart[2], apart[3])
    if not are_pairs or [int(getattr(shift, "value", -1)) for shift in shifts] != [0, 4, 0, 4]:
        return None
    together = wide[0] | wide[2] << _word(16)
    return together & _word(LOW_NIBBLES) | (together & _word(HIGH_NIBBLES)) << _word(4)


def _word(value: int) -> Any:
    return tirx.const(value, WORD_DTYPE)
