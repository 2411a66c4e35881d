"""Functions that differ in names, widths of literals or the order of operands are one; what differs in anything else is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import te
from tvm.script import from_source

from kerneldecl.compiler.equivalence import match_digest, ordered

Expression = Callable[[Any, Any, Any], Any]
SAME: list[tuple[Expression, Expression]] = [
    (lambda a, b, *_: a + b, lambda a, b, *_: b + a),
    (lambda a, b, c: a * b + c, lambda a, b, c: c + b * a),
    (lambda a, b, c: (a + b) * c, lambda a, b, c: c * (b + a)),
    (lambda a, b, c: te.max(a, te.min(b, c)), lambda a, b, c: te.max(te.min(c, b), a)),
    (lambda a, b, c: te.exp(a - b * c), lambda a, b, c: te.exp(a - c * b)),
]
OTHER: list[Expression] = [
    lambda a, b, *_: a - b,
    lambda a, b, *_: b - a,
    lambda a, b, *_: a / b,
    lambda a, b, *_: b / a,
    lambda a, b, c: (a - b) * c,
    lambda a, b, c: a - b * c,
    lambda a, b, c: (a + b) * c,
    lambda a, b, c: a + b * c,
    lambda a, b, c: a * c + b,
    lambda a, b, *_: te.max(a, b),
    lambda a, b, *_: te.min(a, b),
    lambda a, b, c: a + b - c,
    lambda a, b, c: a - (b + c),
    lambda a, b, c: te.if_then_else(a < b, a, c),
    lambda a, b, c: te.if_then_else(b < a, a, c),
]


def function(expression: Expression) -> Any:
    given = [te.placeholder((8, 4), "float32", name) for name in ("first", "second", "third")]
    return te.create_prim_func([*given, te.compute((8, 4), lambda *i: expression(*(array[i] for array in given)))])


@pytest.mark.parametrize(("first", "second"), SAME)
def test_the_order_of_operands_does_not_matter(first: Expression, second: Expression) -> None:
    assert match_digest(function(first)) == match_digest(function(second))


def test_anything_else_matters() -> None:
    digests = [match_digest(function(expression)) for expression in OTHER]
    assert not any(one == other for one, other in itertools.combinations(digests, 2))


def test_indices_may_be_added_in_any_order_but_not_exchanged() -> None:
    x = te.placeholder((8, 8), "float32", "x")

    def shifted(index: Callable[[Any, Any], tuple[Any, Any]]) -> str:
        return match_digest(te.create_prim_func([x, te.compute((4, 4), lambda i, j: x[index(i, j)])]))

    assert shifted(lambda i, j: (i + j, j)) == shifted(lambda i, j: (j + i, j)) != shifted(lambda i, j: (j, i + j))


def test_a_statement_stays_in_its_block() -> None:
    script = """
@T.prim_func(s_tir=True)
def main(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
    for i in range(4):
        with T.sblock("sum"):
            vi = T.axis.spatial(4, i)
            T.reads(A[vi])
            T.writes(B[vi])
            if vi < 2:
                B[vi] = 0.0
{indent}B[vi] = 1.0 + A[vi]
"""
    after, inside = (match_digest(from_source(script.format(indent=" " * width))) for width in (12, 16))
    assert after != inside


def test_what_is_no_whole_statement_stays() -> None:
    for line in ("    for v1, v2 in T.grid(4, 2 + 1):", '    with T.sblock("v3"):', "@T.prim_func(s_tir=True)", '    v1["ü"] = 2 + 1'):
        assert ordered(line) == line


def test_numbers_are_compared_as_they_are() -> None:
    two, three = (function(lambda a, b, *_, n=n: a * tvm.tirx.const(n, "float32") + b) for n in (2.0, 3.0))
    assert match_digest(two) != match_digest(three)
